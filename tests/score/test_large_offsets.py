"""Targets with a large offset keep their digits from the rows to the scores; expected values are NumPy's float64."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest

from slipstream.pipeline.evaluate.engine import train_baseline
from slipstream.pipeline.export.convert import to_onnx
from slipstream.pipeline.export.package.triton import write_repository
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.comparison import ComparedPackage, paired_predictions
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.metrics import compute_scores
from slipstream.shared.models.predict import predict_records, record_inputs, record_targets
from slipstream.shared.source.config import DataConfig
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.proving import first_few
from tests.support.scoring import scored

OFFSETS = [0.0, 1.7e9, -1e12]
INPUTS = ["a", "b"]


def table(offset: float, rows: int = 1500, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame(draw.normal(size=(rows, 2)), columns=INPUTS)
    frame["city"] = draw.choice(["Oslo", "Rome"], rows)
    signal = 30 * frame["a"] - 12 * frame["b"] + 5 * (frame["city"] == "Oslo")
    frame["y"] = offset + (signal + draw.normal(0, 2, rows)).round(3)
    return frame


def prepared(directory: Path, offset: float) -> PreparedData:
    prepare(directory, table(offset), "y", DataConfig(), {})
    return PreparedData.open(directory)


def by_hand(model: Path, frame: pd.DataFrame) -> np.ndarray:
    session = onnxruntime.InferenceSession(model / "model.raw.onnx")
    feed = {name: frame[[name]].to_numpy(object if name == "city" else np.float64) for name in [*INPUTS, "city"]}
    return session.run(["value"], feed)[0]


@pytest.mark.parametrize("offset", first_few(OFFSETS))
def test_an_offset_changes_nothing_but_the_offset(tmp_path: Path, offset: float) -> None:
    data, frame = prepared(tmp_path / "prepared", offset), table(offset)
    stored = np.concatenate([data.split(split)["target"] for split in SPLITS])
    assert stored.dtype == np.float64 and np.array_equal(np.sort(stored), np.sort(frame["y"]))
    model = package(tmp_path / "package", data)
    signature = json.loads((model / "signature.json").read_text())
    for name, outputs in (("model.onnx", signature["outputs"]), ("model.raw.onnx", signature["raw"]["outputs"])):
        (output,) = onnx.load(model / name).graph.output
        assert (output.type.tensor_type.elem_type, outputs[0]["dtype"]) == (onnx.TensorProto.DOUBLE, "float64")
    assert signature["raw"]["tolerance"] < 0.5, "it follows the spread, not the offset"
    for path in write_repository(model, tmp_path / "triton"):
        assert 'name: "value"\n  data_type: TYPE_FP64' in (path / "config.pbtxt").read_text()
    expected = by_hand(model, frame)[:, 0]
    error = np.sqrt(np.mean((expected - frame["y"].to_numpy()) ** 2))
    assert error < 15 < frame["y"].std()
    registry = Registry(str(tmp_path / "registry"))
    put(model, registry, data)
    frame.drop(columns="y").to_parquet(tmp_path / "rows.parquet")
    found = scored(registry, tmp_path / "rows.parquet", tmp_path / "out", ScoringConfig(keep=INPUTS))
    assert found.schema.field("value").type == pa.float64()
    assert np.abs(found["value"].to_numpy() - expected).max() <= 1e-4 + np.spacing(abs(offset))
    # Evaluation, baseline and promotion.
    test = data.split("test")
    truth, baseline = record_targets(test), train_baseline(data, test)
    assert baseline.scores.rmse == pytest.approx(np.sqrt(np.mean((baseline.outputs[:, 0] - truth) ** 2)), rel=1e-6)
    assert baseline.scores.rmse and baseline.scores.rmse < 10
    paired = paired_predictions(ComparedPackage(model), ComparedPackage(model), data)
    assert np.array_equal(np.sort(paired.truth), np.sort(truth)) and np.array_equal(paired.new, paired.old)
    assert len(np.unique(paired.new)) > 0.9 * len(test)


@pytest.mark.parametrize("offset", first_few(OFFSETS))
def test_the_reported_error_is_the_real_one(tmp_path: Path, offset: float) -> None:
    import torch

    data = prepared(tmp_path / "prepared", offset)
    model = build_model(ModelConfig(arguments={"hidden": [8]}), data.signature, seed=0).eval()
    test = data.split("test")

    def run(inputs: object) -> np.ndarray:
        with torch.inference_mode():
            return model(*map(torch.from_numpy, inputs)).numpy()  # type: ignore[call-overload]

    outputs = predict_records(run, data.signature, test)
    truth = record_targets(test)
    found = compute_scores("regression", outputs, truth).rmse
    with torch.inference_mode():
        standard = model.network(*(torch.from_numpy(np.array(test[spec.name])) for spec in data.signature.inputs))
    exported = tmp_path / "model.onnx"
    rows = record_inputs(data.signature, test[:2])
    to_onnx(model, data.signature, rows, 20, exported)
    assert np.abs(onnx_predictor(exported, 1)(rows) - outputs[:2]).max() < 1e-3 + np.spacing(abs(offset))
    values = standard.double().numpy()[:, 0] * data.signature.target_std + data.signature.target_mean
    assert found == pytest.approx(np.sqrt(np.mean((values - truth) ** 2)), rel=1e-6)
    assert outputs.dtype == np.float64


@pytest.mark.prove
def test_packages_with_float_outputs_are_still_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an earlier version exported them, from targets in single precision."""
    monkeypatch.setattr("slipstream.pipeline.prepare.fit.fit.REGRESSION_DTYPE", "float32")
    data, frame = prepared(tmp_path / "prepared", 0.0), table(0.0).drop(columns="y")
    schema = json.loads((tmp_path / "prepared/statistics.json").read_text())
    assert data.signature.record["target"] == np.float32 and schema["target_dtype"] == "float32"
    model = package(tmp_path / "package", data)
    (output,) = onnx.load(model / "model.raw.onnx").graph.output
    assert output.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    registry = Registry(str(tmp_path / "registry"))
    put(model, registry, data)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    found = scored(registry, tmp_path / "rows.csv", tmp_path / "out", ScoringConfig())
    assert found.schema.field("value").type == pa.float64()
    assert np.abs(found["value"].to_numpy() - by_hand(model, frame)[:, 0]).max() < 1e-4


def with_outliers(values: np.ndarray) -> np.ndarray:
    values[::200] = 1e12
    return values


@pytest.mark.parametrize(
    ("column", "of_target", "of_input"),
    [
        (np.arange(1500) + 2.0**60, "in steps of 256", "in steps of 256"),
        (with_outliers(np.linspace(0, 1, 1500)), "outliers such as 1e+12", ""),  # an input's curve is logarithmic
        (with_outliers(np.zeros(1500)), "", ""),
        (np.append(np.linspace(0, 1, 1499), 100.0), "", ""),
        (np.arange(1500) + 1.7e9, "", ""),
    ],
)
def test_too_few_digits_are_a_warning(tmp_path: Path, column: np.ndarray, of_target: str, of_input: str) -> None:
    other = np.random.default_rng(0).normal(size=(2, 1500))
    for target, words in (("x", of_target), ("y", of_input)):
        frame = pd.DataFrame({"x": column, "y": other[0], "z": other[1]})
        prepare(tmp_path / target, frame, target, DataConfig(task="regression"), {})
        found = [each for each in PreparedData.open(tmp_path / target).card["warnings"] if "float" in each]
        assert bool(found) == bool(words) and all(words in each for each in found), (target, found)
