"""A row's answer that depends on the rows per call: measured, the worse counts, said, and no dynamic batching."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import onnxruntime
import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.choose import Variant, onnx_variant
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.finalists import compare_outputs, evaluate_finalists
from slipstream.pipeline.export.package.triton import config_fields, write_repository
from slipstream.pipeline.export.quantize import search
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.quantize.recipes import Recipe
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import BatchDependence, ExportReport, read_export
from slipstream.shared.models.predict import ModelFunction, record_inputs, record_targets
from slipstream.shared.models.trained import TrainedModel
from tests.support.report_runs import export
from tests.support.toys import trained_on


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return write_table(tmp_path_factory.mktemp("table") / "data", "classification")


@pytest.fixture
def exported(data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An export of dynamic INT8, chosen by its size."""
    monkeypatch.setattr(search, "recipes_for", lambda *_: [Recipe("dynamic")])
    config = ExportConfig(seconds=1.0, optimise="size", max_loss=50.0)
    engine.export(tmp_path / "out", cast(TrainedModel, trained_on(data, 20)), data, config, {})
    return tmp_path / "out"


def test_dynamic_int8_is_evaluated_alone_and_in_batches(exported: Path, data: PreparedData) -> None:
    """The export's counts equal those of ONNX Runtime alone; the worse accuracy is the variant's."""
    report = read_export(exported)
    test = data.split("test")
    inputs, truth = record_inputs(data.signature, test), record_targets(test)
    session = onnxruntime.InferenceSession(exported / "model.dynamic.onnx")
    names = [value.name for value in session.get_inputs()]

    def outputs(rows: int) -> np.ndarray:
        calls = [[each[at : at + rows] for each in inputs] for at in range(0, len(test), rows)]
        return np.concatenate([session.run(None, dict(zip(names, call, strict=True)))[0] for call in calls])

    alone, together = outputs(1), outputs(256)
    dynamic = next(each for each in report.variants if each.recipe == "dynamic")
    assert dynamic.by_batch and dynamic.metrics
    different = int(np.sum(alone.argmax(axis=1) != together.argmax(axis=1)))
    assert (dynamic.by_batch.labels, dynamic.by_batch.of, dynamic.by_batch.batch) == (different, len(test), 256)
    assert dynamic.by_batch.largest_difference == pytest.approx(np.abs(alone - together).max(), rel=1e-3)
    assert dynamic.by_batch.largest_difference > 0.01
    right = [float(np.mean(each.argmax(axis=1) == truth)) for each in (alone, together)]
    assert dynamic.metrics.accuracy == min(right)
    fp32 = exported / "model.fp32.onnx"
    Quantiser(fp32, inputs, exported, 7).make(Recipe("static"), exported / "static.onnx")
    variants = [
        onnx_variant(recipe, exported / name, data.signature, test, ExportConfig(), recipe)
        for recipe, name in (("", fp32.name), ("u8s8", "static.onnx"))
    ]
    (static,) = evaluate_finalists(variants[0], variants[1:], data, test, ExportConfig())
    assert static.by_batch is None
    assert report.chosen == "int8 dynamic" and "depends on the other rows of its call" in report.why
    card = (exported / "MODEL_CARD.md").read_text()
    assert f"Note: {dynamic.by_batch}.\n" in card and card.count("depends on the other rows of its call") > 1


def test_triton_does_not_mix_requests_of_such_a_variant(exported: Path, tmp_path: Path) -> None:
    (made, *_) = write_repository(exported, tmp_path / "repository")
    text = (made / "config.pbtxt").read_text()
    assert text.startswith("# No dynamic batching: a row's answer depends") and "dynamic_batching {" not in text


@pytest.mark.parametrize(
    ("depends", "allowed", "batched"), [(False, None, True), (True, None, False), (True, True, True)]
)
def test_a_setting_lets_requests_mix(depends: bool, allowed: bool | None, batched: bool) -> None:
    found = export("accuracy")
    by_batch = BatchDependence(256, 11, 1786, 0.2) if depends else None
    speeds = {"1": 100.0, "32": 800.0, "256": 2000.0}
    variants = [replace(each, rows_per_second=speeds, by_batch=by_batch) for each in found.variants if each.chosen]
    report: ExportReport = replace(found, variants=variants, mix_requests=allowed)
    assert ("dynamic_batching" in config_fields("y", [], [], report)) == batched


def test_the_worse_loss_counts(data: PreparedData) -> None:
    """A variant that is right in batches and wrong alone has the loss of single rows, and the other way round."""
    test = data.split("test")
    truth = record_targets(test)
    right = np.eye(2, dtype=np.float32)[truth]
    numbers = {row.tobytes(): index for index, row in enumerate(record_inputs(data.signature, test)[0])}

    def variant(name: str, wrong: Callable[[int], bool], recipe: str = "dynamic") -> Variant:
        def run(inputs: object) -> np.ndarray:
            rows = [numbers[row.tobytes()] for row in cast(list[np.ndarray], inputs)[0]]
            return 1 - right[rows] if wrong(len(rows)) else right[rows]

        load: Callable[[], ModelFunction] = lambda: run  # noqa: E731
        return Variant(name, None, 0, load, 1 - right if wrong(256) else right, recipe)

    finalists = [
        variant("alone", lambda rows: rows == 1),
        variant("together", lambda rows: rows > 1),
        variant("never", lambda rows: False),
        variant("alone, static", lambda rows: rows == 1, "u8s8"),
    ]
    fp32 = variant("fp32", lambda rows: False, "")
    found = {each.variant.name: each for each in evaluate_finalists(fp32, finalists, data, test, ExportConfig())}
    assert {name: each.loss.loss for name, each in found.items()} == {
        "alone": 100, "together": 100, "never": 0, "alone, static": 100
    }  # fmt: skip
    assert found["never"].by_batch is None
    assert found["alone"].by_batch == BatchDependence(256, len(test), len(test), 1.0)


def test_a_threshold_decides_the_labels_that_are_compared() -> None:
    """Log odds of 0.5 and 1.5: only a threshold between their probabilities tells them apart."""
    together, alone = np.array([[0.0, 0.5]]), np.array([[0.0, 1.5]])
    assert compare_outputs("classification", together, alone, 32, None).labels == 0
    assert compare_outputs("classification", together, alone, 32, 0.7).labels == 1
    assert compare_outputs("regression", together[:, 1:], alone[:, 1:], 32, None) == BatchDependence(32, 0, 1, 1.0)
