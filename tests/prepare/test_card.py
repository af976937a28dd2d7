"""The data card describes the data and warns of properties that would make a model useless."""

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from sklearn.metrics import roc_auc_score

from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source import memory
from tests.support.tables import Prepare


def column(data: PreparedData, name: str) -> dict[str, Any]:
    return next(result for result in data.card["columns"] if result["name"] == name)


def test_a_column_that_tells_the_target_is_called_a_leak_and_noise_is_not(prepared: Prepare) -> None:
    draw = np.random.default_rng(0)
    y = draw.integers(0, 2, 2000)
    table = pa.table({"noise": draw.normal(size=2000), "outcome": np.where(y, "paid", "due"), "y": y})
    data = prepared(table)
    assert column(data, "outcome")["alone"] == 1.0 and column(data, "noise")["alone"] < 0.2
    assert [w.split("'")[1] for w in data.card["warnings"]] == ["outcome"]


def test_a_regression_target_that_is_copied_is_a_leak(prepared: Prepare) -> None:
    draw = np.random.default_rng(1)
    x = np.floor(draw.uniform(0, 15, 5000))
    data = prepared(pa.table({"noise": draw.normal(size=5000), "copy": x, "y": x + 0.25}))
    assert column(data, "noise")["alone"] < 0.1
    assert column(data, "copy")["alone"] == pytest.approx(1.0)


@pytest.mark.parametrize("classes", [2, 3])
def test_the_univariate_score_of_an_unbalanced_target_is_that_of_scikit_learn(prepared: Prepare, classes: int) -> None:
    """A majority vote explains nothing of a target of 3 %, whatever the column."""
    draw = np.random.default_rng(4)
    y = np.where(draw.random(6000) < 0.03, draw.integers(1, classes, 6000), 0)
    columns = {"weak": draw.normal(size=6000) - y, "outcome": np.array(["due", "paid", "lost"])[y], "copy": 7.5 * y}
    middle = {"middle": np.abs(draw.normal(size=6000)) * (y == 0) * draw.choice([-1, 1], 6000)}
    data = prepared(pa.table({**columns, **middle, "noise": draw.normal(size=6000), "y": y}))
    score = {name: column(data, name)["alone"] for name in (*columns, *middle, "noise")}
    assert score["outcome"] == score["copy"] == 1.0 and score["middle"] > 0.85 and score["noise"] < 0.15
    names = [each["name"] for each in data.artifact.read_json("statistics.json")["numeric"]]
    held_out = np.concatenate([data.split(split) for split in ("validation", "test")])
    weak = held_out["numeric"][:, names.index("weak")]
    if classes == 2:
        assert score["weak"] == pytest.approx(2 * roc_auc_score(held_out["target"], -weak) - 1, abs=1e-6)
    else:
        assert 0.3 < score["weak"] < 0.9
    leaks = {warning.split("'")[1] for warning in data.card["warnings"] if "univariate" in warning}
    assert leaks == {"outcome", "copy"}


def test_a_class_of_hardly_any_held_out_row_gives_no_univariate_score(prepared: Prepare) -> None:
    draw = np.random.default_rng(5)
    y = np.isin(np.arange(1000), (7, 300, 501, 902)).astype(int)
    data = prepared(pa.table({"copy": y, "x": draw.normal(size=1000), "y": y}))
    assert "alone" not in column(data, "copy") and "alone" not in column(data, "x")


def test_quantiles_are_exact_and_the_histogram_counts_the_training_rows(prepared: Prepare) -> None:
    x = np.random.default_rng(2).exponential(size=3000)
    data = prepared(pa.table({"x": x, "z": np.arange(3000) % 7, "y": np.arange(3000) % 2}))
    result = column(data, "x")
    mean, std = result["mean"], result["std"]
    transform = data.artifact.read_json("statistics.json")["numeric"][0]
    assert transform["curve"] == "linear"
    train = data.split("train")["numeric"][:, 0].astype(float) * std + mean
    assert result["median"] == pytest.approx(np.median(train), rel=1e-5)
    assert sum(result["histogram"]["counts"]) == pytest.approx(0.99 * len(train), abs=2)
    assert all(drift < 0.1 for drift in result["drift"].values()) and len(result["drift"]) == 2


def test_quantiles_of_a_sample_are_within_the_rank_error_that_the_card_states(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "SAMPLE_ROWS", 2048)
    x = np.random.default_rng(3).exponential(size=50_000)
    data = prepared(pa.table({"x": x, "y": np.arange(50_000) % 2}))
    error, result = data.card["rank_error"], column(data, "x")
    assert 0.02 < error < 0.05 and "median" in data.card["of_sample"]
    for name, share in {"p25": 0.25, "median": 0.5, "p75": 0.75}.items():
        rank = np.mean(x <= result[name])
        assert 0 < abs(rank - share) < error


def test_class_balance_is_reported_by_split(prepared: Prepare) -> None:
    frame = pd.DataFrame({"x": np.arange(900) * 0.7, "y": ["a", "b", "b"] * 300})
    card = prepared(pa.Table.from_pandas(frame)).card
    assert sum(card["classes"]["a"].values()) == 300 and sum(card["classes"]["b"].values()) == 600
    assert {s: card["classes"]["a"][s] + card["classes"]["b"][s] for s in card["classes"]["a"]} == {
        s: card["rows"][s] for s in ("train", "validation", "test")
    }


def test_the_prepared_data_hold_no_page(prepared: Prepare) -> None:
    """Or else a change of its colours would be new data, and models would train again."""
    data = prepared(pa.table({"x": np.arange(300) * 0.5, "y": np.arange(300) % 2}))
    assert "card.json" in data.artifact.files
    assert not [name for name in data.artifact.files if name.endswith(".html")]


def test_rows_that_are_alike_but_for_their_id_are_called_a_leak(prepared: Prepare) -> None:
    draw = np.random.default_rng(5)
    once = pd.DataFrame(
        {"x": draw.normal(size=1000), "c": draw.choice(list("ab"), 1000), "y": draw.integers(0, 2, 1000)}
    )
    twice = pd.concat([once, once[:400]]).assign(id=np.arange(1400))
    result = prepared(pa.Table.from_pandas(twice, preserve_index=False), id="id").card
    # Both of a pair are held out, or one of them is, or none: about 400 * 2 * 0.3 * 0.7 lie on both sides.
    assert result["held_out"]["rows"] == result["rows"]["validation"] + result["rows"]["test"]
    assert 120 < result["held_out"]["duplicates"] < 220
    assert len([w for w in result["warnings"] if "equal a training row" in w]) == 1

    apart = prepared(pa.Table.from_pandas(once.assign(id=np.arange(1000)), preserve_index=False), id="id").card
    assert apart["held_out"]["duplicates"] == 0 and not [w for w in apart["warnings"] if "training row" in w]
    # Without an identifier, equal rows share a split.
    assert (
        prepared(pa.Table.from_pandas(twice.drop(columns="id"), preserve_index=False)).card["held_out"]["duplicates"]
        == 0
    )
