"""The whole export of small models: what is written, what is chosen, what a failure does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from tasks.artifacts.format import Artifact
from tasks.artifacts.prepared import PreparedData
from tasks.errors import UserError
from tasks.export import engine, variants
from tasks.export.config import ExportConfig
from tasks.models.predict import Predictor, inputs_of, targets_of
from tests.support.captured import Captured
from tests.support.toys import ToyTrained, images, table, trained_on


@dataclasses.dataclass
class Case:
    data: PreparedData
    trained: ToyTrained
    artifact: Artifact
    printed: str

    @property
    def report(self) -> dict[str, Any]:
        return self.artifact.read_json("export.json")

    def variant(self, name: str) -> dict[str, Any]:
        return next(v for v in self.report["variants"] if v["name"] == name)


@pytest.fixture(scope="module", params=["table", "image", "regression"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    makers = {
        "table": lambda path: table(path, "classification"),
        "image": images,
        "regression": lambda path: table(path, "regression"),
    }
    data = makers[request.param](directory / "data")
    trained = trained_on(data)
    patch = pytest.MonkeyPatch()
    request.addfinalizer(patch.undo)
    patch.setattr(engine, "TIMING_SECONDS", 0.1)
    with Captured() as printed:
        artifact = engine.export(directory / "out", trained, data, ExportConfig(), {"why": "a test"})
    return Case(data, trained, artifact, printed.text)


def test_the_chosen_model_predicts_by_itself(case: Case) -> None:
    """Only the artifact's files are used: the session is fed by the names that signature.json gives."""
    signature = case.artifact.read_json("signature.json")
    assert {"schema.json", "statistics.json", "MODEL_CARD.md"} <= set(case.artifact.files)
    session = onnxruntime.InferenceSession(case.artifact.path(signature["model"]))
    test = case.data.split("test")
    feed = {spec["name"]: np.array(test[spec["name"]], spec["dtype"]) for spec in signature["inputs"]}
    outputs = session.run([signature["outputs"][0]["name"]], feed)[0]
    chosen = case.variant(case.report["chosen"])
    if case.data.signature.task == "classification":
        accuracy = np.mean(outputs.argmax(axis=1) == targets_of(test))
        assert accuracy == chosen["metrics"]["accuracy"] > 0.9
    else:
        rmse = np.sqrt(np.mean((outputs[:, 0].astype(np.float64) - targets_of(test)) ** 2))
        assert rmse == pytest.approx(chosen["metrics"]["rmse"], rel=1e-6)
        assert chosen["metrics"]["r2"] > 0.9


def test_figures_agree_with_the_files(case: Case) -> None:
    for variant in case.report["variants"]:
        if variant["file"]:
            assert variant["bytes"] == case.artifact.files[variant["file"]].size
        for batch in ("1", "256"):
            latency = variant["latency_ms"][batch]
            assert 0 < latency["p50"] <= latency["p99"]
            assert variant["rows_per_second"][batch] == pytest.approx(int(batch) / latency["p50"] * 1000)
    assert [v["name"] for v in case.report["variants"]] == ["torch-fp32", "onnx-fp32", "onnx-int8"]
    assert [v["name"] for v in case.report["variants"] if v["chosen"]] == [case.report["chosen"]]


def test_int8_is_another_model_that_is_nearly_as_good(case: Case) -> None:
    fp32, int8 = case.variant("onnx-fp32"), case.variant("onnx-int8")
    assert fp32["largest_difference"] < int8["largest_difference"]
    if case.data.signature.task == "classification":
        assert abs(fp32["metrics"]["accuracy"] - int8["metrics"]["accuracy"]) <= 0.02
    else:
        assert int8["metrics"]["rmse"] < 1.1 * fp32["metrics"]["rmse"]
    assert 0 <= int8["paired"]["p"] <= 1


def test_nothing_is_printed(case: Case) -> None:
    assert case.printed == ""


def fake_timing(p50: Mapping[str, float]) -> Any:
    def time_variants(runs: Mapping[str, Predictor], *_: Any) -> dict[str, Any]:
        return {name: {key: {"p50": p50[name], "p99": 1.0, "calls": 1} for key in ("1", "256")} for name in runs}

    return time_variants


@pytest.mark.parametrize(
    ("int8_ms", "chosen"),
    [(0.25, "onnx-int8"), (0.75, "onnx-fp32")],
)
def test_what_was_measured_decides(
    int8_ms: float, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = table(tmp_path / "data", "classification")
    timing = fake_timing({"torch-fp32": 0.1, "onnx-fp32": 0.5, "onnx-int8": int8_ms})
    monkeypatch.setattr(engine, "time_variants", timing)
    artifact = engine.export(tmp_path / "out", trained_on(data), data, ExportConfig(), {})
    report = artifact.read_json("export.json")
    assert report["chosen"] == chosen
    assert artifact.read_json("signature.json")["model"] == f"model.{chosen.removeprefix('onnx-')}.onnx"
    assert chosen in artifact.read_bytes("MODEL_CARD.md").decode()


def test_a_variant_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fp32: Path, int8: Path, *_: Any, **__: Any) -> None:
        int8.write_bytes(b"half a model")
        raise RuntimeError("no kernel for this operator")

    monkeypatch.setattr(variants, "quantise", broken)
    monkeypatch.setattr(engine, "TIMING_SECONDS", 0.1)
    data = table(tmp_path / "data", "classification")
    artifact = engine.export(tmp_path / "out", trained_on(data, steps=5), data, ExportConfig(), {})
    report = artifact.read_json("export.json")
    assert report["chosen"] == "onnx-fp32"
    assert report["variants"][-1] == {
        "name": "onnx-int8",
        "file": None,
        "bytes": None,
        "chosen": False,
        "verdict": "could not be made: no kernel for this operator",
    }
    assert "model.int8.onnx" not in artifact.files
    assert "no kernel for this operator" in artifact.read_bytes("MODEL_CARD.md").decode()


def test_an_export_that_does_not_agree_with_torch_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is made to write another model than it was given."""
    data = table(tmp_path / "data", "classification")
    trained, other = trained_on(data, steps=5), trained_on(data, steps=6)
    right = variants.to_onnx
    monkeypatch.setattr(variants, "to_onnx", lambda model, *rest: right(other.load(), *rest))
    with pytest.raises(UserError, match="ONNX Runtime and torch differ"):
        engine.export(tmp_path / "out", trained, data, ExportConfig(), {})
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_timing_covers_batches_larger_than_the_data(tmp_path: Path) -> None:
    data = table(tmp_path / "data", "classification")
    seen: set[int] = set()

    def run(inputs: Any) -> np.ndarray:
        seen.add(len(inputs[0]))
        assert inputs[0].shape[1:] == inputs_of(data.signature, data.split("test")[:1])[0].shape[1:]
        return inputs[0]

    variants.time_variants({"only": run}, data.signature, data.split("test")[:7], 1, seconds=0)
    assert seen == {1, 256}
