"""Whole exports of small models: files, the chosen variant, failures."""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import pytest

from slipstream.operations.proofs.gpu.trainings import write_prepared, write_table
from slipstream.pipeline.export import choose, engine
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.quantize import search
from slipstream.pipeline.export.quantize import search as searching
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.quantize.recipes import Recipe
from slipstream.pipeline.export.quantize.search import ExportCandidate
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures, VariantFigures
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import CpuModel
from slipstream.shared.models.predict import record_inputs, record_targets
from slipstream.shared.models.trained import TrainedModel
from tests.support.captured import Captured
from tests.support.proving import first_few
from tests.support.toys import ToyTrained, images, trained_on
from tests.support.wording import refuses

SHORT = ExportConfig(seconds=2.0)


def exported(
    directory: Path, trained: ToyTrained, data: PreparedData, config: ExportConfig, made_by: Mapping[str, Any]
) -> Artifact:
    return engine.export(directory, cast(TrainedModel, trained), data, config, made_by)


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


@pytest.fixture(
    scope="module", params=["table", *(pytest.param(name, marks=pytest.mark.prove) for name in ("image", "regression"))]
)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp(request.param)
    makers = {
        "table": lambda path: write_table(path, "classification"),
        "image": images,
        "regression": lambda path: write_table(path, "regression"),
    }
    data = makers[request.param](directory / "data")
    trained = trained_on(data)
    with Captured() as printed:
        artifact = exported(directory / "out", trained, data, SHORT, {"why": "a test"})
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
        accuracy = np.mean(outputs.argmax(axis=1) == record_targets(test))
        assert accuracy == chosen["metrics"]["accuracy"] > 0.9
    else:
        rmse = np.sqrt(np.mean((outputs[:, 0].astype(np.float64) - record_targets(test)) ** 2))
        assert rmse == pytest.approx(chosen["metrics"]["rmse"], rel=1e-6)
        assert chosen["metrics"]["r2"] > 0.9


def test_figures_agree_with_the_files(case: Case) -> None:
    timed = [variant for variant in case.report["variants"] if variant["metrics"]]
    assert next(v["name"] for v in timed if not v["name"].startswith("torch")) == "onnx-fp32" and len(timed) <= 6
    for variant in timed:
        if variant["file"]:
            assert variant["bytes"] == case.artifact.files[variant["file"]].size
        # On a machine that is busy with other work the largest batch may take too long to be timed.
        assert {"1", "32"} <= variant["latency_ms"].keys() <= {"1", "32", "256"}
        for batch, latency in variant["latency_ms"].items():
            for percentile, needed in (("p50", 20), ("p90", 100), ("p99", 1000)):
                assert (latency[percentile] is None) == (latency["calls"] < needed)
            if p50 := latency["p50"]:
                assert p50["low"] <= p50["value"] <= p50["high"]
                assert variant["rows_per_second"][batch] == pytest.approx(int(batch) / p50["value"] * 1000)
    assert [v["name"] for v in timed if v["chosen"]] == [case.report["chosen"]]
    made = {name for name in case.artifact.files if name.endswith(".onnx")} - {"model.onnx", "model.raw.onnx"}
    assert made == {variant["file"] for variant in timed if variant["file"]}
    assert {"1", "32"} <= case.report["best"].keys() <= {"1", "32", "256"}


def test_every_recipe_has_a_verdict_and_a_reason(case: Case) -> None:
    for variant in case.report["variants"]:
        assert variant["verdict"] and variant["reason"], variant
    verdicts = {each["recipe"] or each["name"]: each["verdict"] for each in case.report["variants"]}
    assert verdicts["onnx-fp32"] in ("exact", "chosen")
    assert {"dynamic", "int4"} <= set(verdicts)


def test_finalists_are_judged_on_the_same_rows(case: Case) -> None:
    finalists = [variant["quality"] for variant in case.report["variants"] if variant["quality"]]
    for quality in finalists:
        assert quality["low"] <= quality["loss"] <= quality["high"] and quality["rows"] == 300
        assert quality["level"] == pytest.approx(1 - 0.05 / len(finalists))


def test_the_profile_adds_up(case: Case) -> None:
    for at in case.report["profile"]:
        assert sum(at["operators"].values()) == pytest.approx(1)
        low, high = at["products_limits"]
        assert 0 < low <= at["products"] <= high < 1 and "at_most" not in at


def test_nothing_is_printed(case: Case) -> None:
    assert case.printed == ""


def fake_timing(speeds: Mapping[str, float]) -> Any:
    """Return a timer by which every file takes 1 ms, divided by its factor in ``speeds``."""

    def measure(loads: Mapping[str, Any], *_: Any) -> dict[str, Any]:
        found = {}
        for name in loads:
            speed = speeds.get(name, 1.0)
            p50 = Estimate(1 / speed, 0.99 / speed, 1.01 / speed)
            speedup = Estimate(speed, 0.99 * speed, 1.01 * speed)
            figures = LatencyFigures(p50, None, None, 99, speedup)
            found[name] = dict.fromkeys(("1", "32", "256"), figures)
        return found

    return measure


@pytest.mark.parametrize(
    ("speed", "doubt", "chosen"),
    first_few([(4.0, "keep", "fp32"), (4.0, "take", "int8"), (1.0, "take", "fp32")]),
)
def test_what_was_measured_decides(
    speed: float, doubt: Any, chosen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 rows cannot show that at most 0.5 points are lost."""
    data = write_table(tmp_path / "data", "classification")
    made = [Recipe("static", smooth=True), Recipe("dynamic")]
    monkeypatch.setattr(searching, "recipes_for", lambda *_: made)
    monkeypatch.setattr(search, "CLEARLY_SLOWER", 0.0)
    monkeypatch.setattr(engine, "measure_latencies", fake_timing({recipe.name: speed for recipe in made}))
    config = ExportConfig(seconds=5.0, max_loss=0.5, when_in_doubt=doubt)
    artifact = exported(tmp_path / "out", trained_on(data), data, config, {})
    report = artifact.read_json("export.json")
    assert (report["chosen"] == "onnx-fp32") == (chosen == "fp32")
    assert artifact.read_json("signature.json")["model"] == "model.onnx"
    file = next(variant["file"] for variant in report["variants"] if variant["chosen"])
    assert onnx.load(artifact.path("model.onnx")).graph == onnx.load(artifact.path(file)).graph
    assert report["chosen"] in artifact.read_bytes("MODEL_CARD.md").decode()
    if (speed, doubt) == (4.0, "keep"):
        assert "not significant with 300 rows" in report["why"] and "rows would be enough" in report["why"]


@pytest.mark.prove
def test_a_variant_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Quantiser, recipe: Recipe, prepared: Path, target: Path, *_: Any) -> None:
        target.write_bytes(b"half a model")
        raise RuntimeError("no kernel for this operator")

    for kind in ("_static", "_dynamic", "_int4"):
        monkeypatch.setattr(Quantiser, kind, broken)
    data = write_table(tmp_path / "data", "classification")
    artifact = exported(tmp_path / "out", trained_on(data, steps=5), data, SHORT, {})
    report = artifact.read_json("export.json")
    assert report["chosen"] == "onnx-fp32"
    (dynamic,) = (variant for variant in report["variants"] if variant["recipe"] == "dynamic")
    assert VariantFigures(**dynamic) == VariantFigures(
        name="int8 dynamic",
        recipe="dynamic",
        file=None,
        bytes=None,
        chosen=False,
        verdict="not made",
        reason="could not be made: no kernel for this operator",
    )
    assert {name for name in artifact.files if name.endswith(".onnx")} == {"model.fp32.onnx", "model.onnx"}
    assert "no kernel for this operator" in artifact.read_bytes("MODEL_CARD.md").decode()


def test_an_export_that_does_not_agree_with_torch_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter is made to write another model than it was given."""
    data = write_table(tmp_path / "data", "classification")
    trained, other = trained_on(data, steps=5), trained_on(data, steps=6)
    right = choose.to_onnx
    monkeypatch.setattr(choose, "to_onnx", lambda model, *rest: right(other.load(), *rest))
    with refuses(UserError):
        exported(tmp_path / "out", trained, data, SHORT, {})
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_the_test_split_is_not_seen_by_the_search(tmp_path: Path) -> None:
    """Other test rows change neither the candidates nor their reported losses; other training rows, which calibrate,
    change both."""
    data = write_table(tmp_path / "data", "classification")
    trained = trained_on(data, steps=20)
    fp32 = tmp_path / "fp32.onnx"
    choose.to_onnx(trained.load(), data.signature, record_inputs(data.signature, data.split("train")[:2]), 20, fp32)
    found = {}
    for changed in ("nothing", "test", "train"):
        splits = {name: np.array(data.split(name)) for name in ("train", "validation", "test")}
        if changed != "nothing":
            splits[changed]["numeric"] *= 1000
        other = write_prepared(tmp_path / changed / "data", data.signature, splits)
        quantiser = Quantiser(fp32, searching.calibration_inputs(other, SHORT), tmp_path / changed, 7)
        quantiser.make(Recipe("static"), tmp_path / changed / "int8.onnx")
        records = searching.search_rows(fp32, other, ExportConfig(seconds=1e6))
        found[changed] = (tmp_path / changed / "int8.onnx").read_bytes(), records.tobytes()
    assert found["nothing"] == found["test"] and found["nothing"][0] != found["train"][0]


def test_int8_for_vnni_is_not_made_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "this_machine", lambda: CpuModel("an old CPU", "x86_64", ("avx2",)))
    data = write_table(tmp_path / "data", "classification")
    with refuses(UserError, match=r"export\.target:"):
        exported(tmp_path / "out", trained_on(data, steps=1), data, ExportConfig(target="vnni"), {})


@pytest.mark.prove
def test_the_most_sensitive_layers_stay_in_fp32(tmp_path: Path) -> None:
    """The fastest candidate loses 5 points, and none once a layer is left alone: so just one is."""
    data = write_table(tmp_path / "data", "classification")
    inputs = record_inputs(data.signature, data.split("train")[:100])
    fp32 = tmp_path / "fp32.onnx"
    choose.to_onnx(trained_on(data, 20).load(), data.signature, [each[:2] for each in inputs], 20, fp32)
    (tmp_path / "scratch").mkdir()
    quantiser, recipe = Quantiser(fp32, inputs, tmp_path / "scratch", 7), Recipe("static")
    whole = tmp_path / "model.u8s8.onnx"
    quantiser.make(recipe, whole)

    def quantised(path: Path) -> int:
        return sum(node.op_type == "QuantizeLinear" for node in onnx.load(path).graph.node)

    def judge(path: Path) -> float:
        return 5.0 if quantised(path) == quantised(whole) else 0.0

    fastest = ExportCandidate(recipe.name, recipe, whole, 5.0, {1: 2.0})
    config, now = ExportConfig(seconds=60.0), time.perf_counter()
    (mixed,) = searching.make_mixed_precision(tmp_path, quantiser, [fastest], judge, config, now)
    assert (mixed.code, mixed.name) == ("u8s8-mixed1", "int8 static, 1 layer in FP32")
    assert mixed.loss == 0.0 and 0 < quantised(mixed.path) < quantised(whole)
    good = ExportCandidate(recipe.name, recipe, whole, 0.5, {1: 2.0})
    assert searching.make_mixed_precision(tmp_path, quantiser, [good], judge, config, now) == []
