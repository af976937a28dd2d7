"""The first line of the report: better, worse, or not significant."""

from dataclasses import replace
from typing import Literal

import pytest

from slipstream.shared.artifacts.results.evaluation import (
    BaselineScores,
    Evaluation,
    Gain,
    Headline,
    LanguageFigures,
    Reference,
    Scores,
)
from slipstream.shared.comparison.baseline import against_baseline, references

TASKS = {"accuracy": "classification", "rmse": "regression", "bits_per_byte": "next token"}
Metric = Literal["accuracy", "rmse", "bits_per_byte"]


def evaluation(metric: Metric, gain: Gain) -> Evaluation:
    scores = {metric: 0.9}
    beside = BaselineScores(name="HistGradientBoosting", rows_trained=10, **scores)
    return Evaluation(
        task=TASKS[metric],
        rows=265,
        metric=Headline(metric, 1.0),
        model=Scores(**scores),
        baseline=beside,
        gain=gain,
        classes=[],
        language=LanguageFigures(20, 3000, 900, []) if metric == "bits_per_byte" else None,
    )


@pytest.mark.parametrize(
    ("metric", "gain", "shown", "sentence"),
    [
        ("accuracy", Gain(1.51, 0.2, 3.8), 1, "1.51 points above, 0.20 to 3.80 with 95 % confidence"),
        (
            "accuracy",
            Gain(1.51, -0.2, 3.8),
            0,
            "not significant: 1.51 points above, -0.20 to 3.80 with 95 % confidence",
        ),
        ("accuracy", Gain(-1.51, -3.8, -0.2), -1, "1.51 points below, 0.20 to 3.80 with 95 % confidence"),
        ("rmse", Gain(3.0, 1.0, 5.0), 1, "3.0 % below, 1.0 to 5.0 with 95 % confidence"),
        ("rmse", Gain(-3.0, -5.0, 1.0), 0, "not significant: 3.0 % above, -1.0 to 5.0 with 95 % confidence"),
        ("rmse", Gain(-3.0, -1e6, 1.0), 0, "not significant: 3.0 % above, -1.0 to no limit with 95 % confidence"),
        ("bits_per_byte", Gain(0.21, 0.1, 0.3), 1, "0.210 bits per byte below, 0.100 to 0.300 with 95 % confidence"),
        (
            "bits_per_byte",
            Gain(-0.1, -0.2, -0.05),
            -1,
            "0.100 bits per byte above, 0.050 to 0.200 with 95 % confidence",
        ),
        ("accuracy", Gain(0.0, -1.0, 1.0), 0, "not significant: equal, -1.00 to 1.00 with 95 % confidence"),
    ],
)
def test_what_is_said_is_what_is_shown(metric: Metric, gain: Gain, shown: int, sentence: str) -> None:
    found = against_baseline(evaluation(metric, gain))
    assert found and (found.shown, found.sentence) == (shown, sentence)


def test_without_a_baseline_there_is_nothing_to_compare_with() -> None:
    none = evaluation("accuracy", Gain(0.0, -1.0, 1.0))
    assert against_baseline(replace(none, baseline=BaselineScores(name="", rows_trained=0))) is None


def test_methods_without_weights_are_listed_in_one_line() -> None:
    found = evaluation("bits_per_byte", Gain(0.21, 0.1, 0.3))
    assert found.language and references(found) == references(evaluation("rmse", Gain(0.0, -1.0, 1.0))) == ""
    language = replace(found.language, references=[Reference("counts", 1.8784), Reference("lzma", 1.2)])
    assert references(replace(found, language=language)) == "counts: 1.878; lzma: 1.200"
