"""Permutation importance against scikit-learn's, worst errors, and the PR curve."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
from sklearn.inspection import permutation_importance
from sklearn.metrics import accuracy_score, auc, average_precision_score, root_mean_squared_error

from slipstream.pipeline.evaluate import explain
from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.evaluation import Evaluation, read_evaluation
from slipstream.shared.models.metrics import precision_recall_points
from slipstream.shared.models.predict import held_out_rows, model_function, predict_records, record_targets
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig, SplitConfig
from tests.support.raw_tables import mixed_table
from tests.support.toys import ToyTrained, trained_on

TASKS = ("classification", "regression")


class Evaluated:
    """A small model of a table with every type of column, and its evaluation."""

    def __init__(self, directory: Path, task: str) -> None:
        self.data = PreparedData.open(mixed_table(directory / "data", task))
        self.trained: ToyTrained = trained_on(self.data, 300)
        evaluate(directory / "out", cast(TrainedModel, self.trained), self.data, {})
        self.found: Evaluation = read_evaluation(directory / "out")
        self.records = held_out_rows(self.data)
        self.run = model_function(self.trained.load())
        self.outputs = predict_records(self.run, self.trained.signature, self.records)

    def answers(self, outputs: np.ndarray) -> np.ndarray:
        return outputs.argmax(axis=1) if self.found.classes else outputs[:, 0]


@pytest.fixture(scope="module", params=TASKS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    return Evaluated(tmp_path_factory.mktemp(request.param), request.param)


def test_importance_is_that_of_scikit_learn(case: Evaluated) -> None:
    """Its estimator gets row numbers per raw column, so that a column's inputs are permuted together."""
    transform = explain.table_transform(case.data)
    assert transform and case.found.importance
    inputs = explain.column_inputs(transform)
    names = list(inputs)

    class Estimator:
        def fit(self, *_: Any) -> None: ...

        def predict(self, numbers: np.ndarray) -> np.ndarray:
            rows = case.records.copy()
            for column, name in enumerate(names):
                for field, place in inputs[name]:
                    rows[field][:, place] = case.records[field][numbers[:, column], place]
            return case.answers(predict_records(case.run, case.trained.signature, rows))

    numbers = np.tile(np.arange(len(case.records))[:, None], len(names))
    classifies = bool(case.found.classes)

    def score(model: Estimator, x: np.ndarray, y: np.ndarray) -> float:
        given = model.predict(x)
        return float(accuracy_score(y, given)) if classifies else -float(root_mean_squared_error(y, given))

    theirs = permutation_importance(
        Estimator(), numbers, record_targets(case.records), scoring=score, n_repeats=20, random_state=1
    )
    ours = {each.name: each.loss for each in case.found.importance}
    for name, mean, std in zip(names, theirs.importances_mean, theirs.importances_std, strict=True):
        assert abs(ours[name] - mean) < 4 * std * np.sqrt(1 / explain.REPEATS + 1 / 20) + 1e-9, name
    assert list(ours) == sorted(ours, key=lambda name: -ours[name])
    assert next(iter(ours)) in ("age", "income"), "they decide the target"


def test_importance_is_bounded_by_counts_and_repeats_itself(case: Evaluated) -> None:
    transform = explain.table_transform(case.data)
    assert transform
    arguments = (case.trained.signature, transform, case.records)
    rows = list[int]()

    def counting(inputs: Any) -> np.ndarray:
        rows.append(len(inputs[0]))
        return case.run(inputs)

    again = explain.column_importance(counting, *arguments, 1)
    assert again == case.found.importance and sum(rows) <= explain.MOST_ROWS
    rows.clear()
    fewer = explain.MOST_WORK // (120 * explain.REPEATS * len(transform.columns))
    assert explain.column_importance(counting, *arguments, fewer)
    # The rows as they are come once besides.
    assert sum(rows) <= 120 * (explain.REPEATS * len(transform.columns) + 1)
    assert explain.column_importance(counting, *arguments, 10**9) is None


def test_the_worst_errors_are_the_surest_or_the_largest(case: Evaluated) -> None:
    truth, worst = record_targets(case.records), case.found.worst
    assert worst and len(worst) <= explain.ERRORS
    answers = case.answers(case.outputs)
    if case.found.classes:
        powers = np.exp(case.outputs.astype(float) - case.outputs.max(axis=1, keepdims=True))
        sizes = np.where(answers == truth, 0, (powers / powers.sum(axis=1, keepdims=True)).max(axis=1))
        assert all(each.truth != each.predicted for each in worst)
    else:
        sizes = np.abs(case.outputs[:, 0].astype(float) - truth)
    np.testing.assert_allclose([each.size for each in worst], np.sort(sizes)[::-1][: len(worst)], rtol=1e-6)
    assert [each.size for each in worst] == pytest.approx([sizes[each.row - 1] for each in worst])
    important = [each.name for each in case.found.importance or []][: explain.DESCRIBED]
    assert all(list(each.values) == sorted(important) for each in worst)


def test_rows_are_described_in_the_units_of_the_data(case: Evaluated) -> None:
    transform = explain.table_transform(case.data)
    assert transform
    described = [explain.row_values(transform, record, transform.columns) for record in case.records]
    assert {each["city"] for each in described} == {"Oslo", "Rome", "Lima", "São Paulo", "missing"}
    ages = [float(each["age"]) for each in described if each["age"] != "missing"]
    assert len(ages) < len(described) and abs(np.mean(ages) - 40) < 2
    assert all(each["when"][:4] in ("2021", "2022", "2023") for each in described)


def test_rows_are_described_by_their_own_values(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(0), 400
    days = pd.Timestamp("2010-01-01") + pd.to_timedelta(draw.integers(0, 5000, rows), unit="D")
    table = pd.DataFrame(
        {"day": days, "amount": draw.integers(10_000, 9_999_999, rows), "gap": draw.normal(50, 5, rows)}
    )
    table["split"] = np.resize(["train", "test", "val"], rows)
    table.loc[table["split"] == "test", "gap"] = np.nan
    table["y"] = draw.choice(["a", "b"], rows)
    prepare(tmp_path / "data", table, "y", DataConfig(split=SplitConfig(column="split")), {})
    data = PreparedData.open(tmp_path / "data")
    transform = explain.table_transform(data)
    assert transform
    described = [explain.row_values(transform, record, transform.columns) for record in held_out_rows(data)]
    found = pd.DataFrame(described).sort_values(["day", "amount"]).reset_index(drop=True)
    shown = table[table["split"] == "test"].sort_values(["day", "amount"]).reset_index(drop=True)
    assert found["day"].tolist() == shown["day"].dt.strftime("%Y-%m-%dT%H:%M:%S").tolist()
    assert found["amount"].tolist() == shown["amount"].astype(str).tolist()
    assert set(found["gap"]) == {"missing or average"}


def test_the_curve_has_the_area_of_the_average_precision() -> None:
    draw = np.random.default_rng(0)
    labels = (draw.random(5000) < 0.2).astype(int)
    positive = 1 / (1 + np.exp(-(2 * labels - 1 + draw.normal(size=5000))))
    probabilities = np.stack([1 - positive, positive], axis=1)
    for flipped in (False, True):
        given = (probabilities[:, ::-1], 1 - labels) if flipped else (probabilities, labels)
        curve = precision_recall_points(*given, ["a", "b"])
        assert curve and curve.positive == ("a" if flipped else "b") and curve.rate == labels.mean()
        assert len(curve.recall) <= 200 and curve.recall == sorted(curve.recall)
        area = auc(curve.recall, curve.precision)
        assert area == pytest.approx(average_precision_score(labels, positive), abs=0.005)
    assert precision_recall_points(probabilities, np.zeros(5000, int), ["a", "b"]) is None
