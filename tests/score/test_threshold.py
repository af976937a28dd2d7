"""A decision threshold of the trained model decides in every stage after training."""

import json
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score

import slipstream
from slipstream.pipeline.evaluate import engine as evaluation
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.pipeline.promote.comparison import ComparedPackage, on_tensors
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.predict import TensorPredictor
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData
from slipstream.shared.artifacts.results.evaluation import read_evaluation
from slipstream.shared.artifacts.results.training import ThresholdRule
from slipstream.shared.models.metrics import softmax
from slipstream.shared.models.predict import predict_records
from slipstream.shared.models.trained import TrainedModel
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.raw_tables import mixed_table
from tests.support.scoring import rows, scored
from tests.support.toys import ToyTrained, trained_on

THRESHOLD = 0.15


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("threshold")
    data = PreparedData.open(mixed_table(directory / "prepared", "classification"))
    package(directory / "package", data, 20, threshold=THRESHOLD)
    return directory


def decided(probabilities: np.ndarray) -> np.ndarray:
    return np.where(probabilities > THRESHOLD, "yes", "no")


def test_tensors_raw_columns_frames_and_tables_get_the_same_decisions(place: Path, tmp_path: Path) -> None:
    data, model = PreparedData.open(place / "prepared"), ComparedPackage(place / "package")
    assert model.signature.threshold == THRESHOLD
    assert "'yes' is predicted above 0.15" in str(model.signature.outputs[0].units)
    check_package(place / "package")
    records = data.split("test")
    outputs = predict_records(onnx_predictor(place / "package/model.onnx", 1), data.signature, records)
    expected = decided(softmax(outputs)[:, 1])
    assert np.mean(expected != np.where(outputs[:, 1] > outputs[:, 0], "yes", "no")) > 0
    assert (on_tensors(model, data, records) == expected).all()
    tensors = TensorPredictor.of(ServedModel(place / "package"))
    inputs = {name: np.ascontiguousarray(records[name]) for name in tensors.inputs}
    labels = tensors(inputs).labels
    assert labels is not None and labels.to_pylist() == expected.tolist()

    frame = rows(400)
    found = slipstream.load(place / "package").predict(frame)
    assert (found["label"] == decided(found["probability_yes"].to_numpy())).all() and (found["label"] == "yes").any()

    registry = Registry(str(tmp_path / "registry"))
    put(place / "package", registry, data)
    frame.to_csv(tmp_path / "rows.csv", index=False)
    table = scored(registry, tmp_path / "rows.csv", tmp_path / "output").to_pandas().set_index("id")
    assert table["label"][frame["id"]].tolist() == found["label"].tolist()


def test_a_model_without_a_threshold_has_the_signature_of_before(tmp_path: Path, place: Path) -> None:
    package(tmp_path / "package", PreparedData.open(place / "prepared"), 5)
    assert "threshold" not in json.loads((tmp_path / "package/signature.json").read_text())


def test_a_wrong_label_of_a_sample_row_is_found_by_the_threshold(place: Path) -> None:
    samples = json.loads((place / "package/samples.json").read_text())
    by_threshold = decided(np.array(samples["outputs"])[:, 1]).tolist()
    assert samples["labels"] == by_threshold


def test_accuracy_f1_and_confusion_are_scikit_learns_of_the_decisions(place: Path, tmp_path: Path) -> None:
    data = PreparedData.open(place / "prepared")
    toy = trained_on(data, 20)
    model = ToyTrained(data.signature, toy.model, threshold=THRESHOLD)
    model.history = cast(dict[str, object], type("H", (), {"rule": ThresholdRule((1.0, 6.0))}))
    evaluation.evaluate(tmp_path / "out", cast(TrainedModel, model), data, {})
    found, records = read_evaluation(tmp_path / "out"), data.split("test")
    outputs = predict_records(onnx_predictor(place / "package/model.onnx", 1), data.signature, records)
    decisions, labels = (softmax(outputs)[:, 1] > THRESHOLD).astype(int), np.array(records[TARGET])
    assert found.threshold == THRESHOLD and found.confusion == confusion_matrix(labels, decisions).tolist()
    assert found.model.accuracy == pytest.approx(accuracy_score(labels, decisions))
    assert found.model.macro_f1 == pytest.approx(f1_score(labels, decisions, average="macro"))
    assert found.metric.value == found.model.accuracy
