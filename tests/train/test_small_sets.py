"""Small real sets are learned with the default settings, about as well as by boosting or a linear model."""

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import scipy.stats
from scipy.sparse import csr_array
from sklearn import datasets
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, RidgeCV
from sklearn.metrics import accuracy_score, r2_score

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.predict import model_function, predict_records, record_targets
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig, SplitConfig
from tests.support.proving import first_few
from tests.support.training import trained


def table(load: Callable[..., Any]) -> Callable[[Path], tuple[str, str]]:
    def write(directory: Path) -> tuple[str, str]:
        load(as_frame=True).frame.to_parquet(directory / "table.parquet", index=False)
        return str(directory / "table.parquet"), "target"

    return write


def digits(directory: Path) -> tuple[str, str]:
    return "", ""


def docstrings(directory: Path) -> tuple[str, str]:
    """Documentation of functions in class folders, by the package that they belong to."""
    for package in (np, scipy.stats, datasets):
        for number, text in enumerate(dict.fromkeys(documentation(package))):
            path = directory / package.__name__ / f"{number}.txt"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
    return str(directory), ""


def documentation(package: ModuleType) -> Iterator[str]:
    for name in sorted(vars(package)):
        text = inspect.getdoc(getattr(package, name)) if not name.startswith("_") else None
        # The package's own name in the text would tell it.
        yield from re.findall(r"(?:[^\n]+\n){3,}", re.sub(r"numpy|scipy|sklearn|stats|np", "", text or ""))


SETS: dict[str, Callable[[Path], tuple[str, str]]] = {
    "digits": digits,
    "breast cancer": table(datasets.load_breast_cancer),
    "wine": table(datasets.load_wine),
    "diabetes": table(datasets.load_diabetes),
    "iris": table(datasets.load_iris),
    "texts": docstrings,
}


def dense_and_sparse(data: PreparedData, split: str) -> tuple[np.ndarray, Any]:
    """Return the inputs of a split for boosting and for a linear model; words are counted."""
    records, inputs = data.split(split), data.signature.inputs
    words = next((spec for spec in inputs if spec.name == "tokens"), None)
    if words is None:
        flat = np.concatenate([records[spec.name].reshape(len(records), -1) for spec in inputs], axis=1).astype(float)
        return flat, flat
    ids = records[words.name].reshape(len(records), -1)
    rows, places = np.nonzero(ids)
    counts = csr_array((np.ones(len(rows)), (rows, ids[rows, places])), shape=(len(ids), data.signature.buckets))
    return counts.toarray()[:, :0], counts


def score_of(data: PreparedData, predicted: np.ndarray) -> float:
    truth = record_targets(data.split("test"))
    return float((r2_score if data.signature.task == "regression" else accuracy_score)(truth, predicted))


def others(data: PreparedData) -> float:
    """Return the score of the better of boosting and a linear model, trained on the same rows."""
    regression = data.signature.task == "regression"
    train, test, truth = dense_and_sparse(data, "train"), dense_and_sparse(data, "test"), data.split("train")["target"]
    scores = []
    if train[0].shape[1]:
        boosting = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
        scores.append(score_of(data, boosting(random_state=0).fit(train[0], truth).predict(test[0])))
    scale = np.abs(train[1]).max(axis=0)
    scale = np.maximum(scale.toarray() if hasattr(scale, "toarray") else scale, 1e-9).ravel()
    linear = RidgeCV() if regression else LogisticRegression(max_iter=3000)
    fitted = linear.fit(train[1] / scale, truth)
    return max(*scores, score_of(data, fitted.predict(test[1] / scale)), -1.0)


def lost(name: str, seed: int, directory: Path) -> float:
    """Train with the default settings; return by how much others are better, as a share or in R²."""
    (directory / "raw").mkdir(parents=True)
    address, target = SETS[name](directory / "raw")
    prepare(directory / "data", address, target, DataConfig(split=SplitConfig(seed=seed)), {})
    data = PreparedData.open(directory / "data")
    model = trained(directory / "data", directory / "run", 1, TrainingConfig(), model=ModelConfig())
    network = TrainedModel.open(model).load()
    outputs = predict_records(model_function(network), data.signature, data.split("test"))
    found = score_of(data, outputs[:, 0] if data.signature.task == "regression" else outputs.argmax(axis=1))
    return others(data) - found


@pytest.mark.parametrize("name", first_few(["breast cancer", "wine"], 1))
def test_a_small_set_is_learned_with_the_default_settings(name: str, tmp_path: Path) -> None:
    assert lost(name, 0, tmp_path) <= 0.06  # of 28 rows one is 0.036


@pytest.mark.prove
@pytest.mark.parametrize("name", SETS)
def test_small_sets_are_learned_as_well_as_by_others(name: str, tmp_path: Path) -> None:
    seeds = range(3 if name in ("digits", "texts") else 10)  # their test splits have hundreds of rows
    mean = np.mean([lost(name, seed, tmp_path / str(seed)) for seed in seeds])
    assert mean <= (0.05 if name == "diabetes" else 0.02)
