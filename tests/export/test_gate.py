"""The gate: arithmetic on measured figures."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tasks.export.config import ExportConfig
from tasks.export.gate import Candidate, decide, loss, significance

FP32 = Candidate("onnx-fp32", 1.0, 0.90)


def chosen(p50: float, accuracy: float, config: ExportConfig | None = None) -> str:
    return decide("classification", FP32, [Candidate("onnx-int8", p50, accuracy)], config or ExportConfig()).chosen


def test_faster_and_good_enough_is_chosen() -> None:
    assert chosen(0.5, 0.895) == "onnx-int8"


def test_exactly_the_allowed_loss_passes_and_a_hair_more_does_not() -> None:
    assert chosen(0.5, 0.89) == "onnx-int8"
    assert chosen(0.5, 0.8899) == "onnx-fp32"


def test_as_fast_is_not_faster() -> None:
    assert chosen(1.0, 0.90) == "onnx-fp32"
    assert chosen(0.999, 0.90) == "onnx-int8"


def test_slower_is_rejected_even_if_better() -> None:
    decision = decide("classification", FP32, [Candidate("onnx-int8", 2.0, 0.95)], ExportConfig())
    assert decision.chosen == "onnx-fp32"
    assert "0.50 times as fast as onnx-fp32 at batch 1 (2 against 1 ms)" in decision.verdicts["onnx-int8"]
    assert "gains 5.00 points of accuracy: rejected, it must be faster" in decision.verdicts["onnx-int8"]


def test_speedup_asked_for_is_speedup_needed() -> None:
    config = ExportConfig(min_speedup=2.0)
    assert chosen(0.5, 0.90, config) == "onnx-int8"
    assert chosen(0.51, 0.90, config) == "onnx-fp32"
    assert chosen(1.5, 0.90, ExportConfig(min_speedup=0.5)) == "onnx-fp32"


def test_the_fastest_of_those_that_pass() -> None:
    others = [Candidate("a", 0.5, 0.90), Candidate("b", 0.4, 0.90), Candidate("c", 0.1, 0.50)]
    decision = decide("classification", FP32, others, ExportConfig())
    assert decision.chosen == "b"
    assert "rejected" in decision.verdicts["c"]
    assert "rejected" not in decision.verdicts["a"]


def test_nothing_else_to_choose_from() -> None:
    decision = decide("classification", FP32, [], ExportConfig())
    assert (decision.chosen, decision.why) == ("onnx-fp32", "onnx-fp32 stays: no other variant could be made")


def test_regression_loses_percent_of_rmse() -> None:
    assert loss("regression", 200.0, 202.0) == pytest.approx(1.0)
    fp32 = Candidate("onnx-fp32", 1.0, 200.0)
    for rmse, expected in ((202.0, "onnx-int8"), (202.1, "onnx-fp32"), (150.0, "onnx-int8")):
        assert decide("regression", fp32, [Candidate("onnx-int8", 0.5, rmse)], ExportConfig()).chosen == expected


def test_a_loss_that_is_not_a_number_never_passes() -> None:
    assert chosen(0.5, math.nan) == "onnx-fp32"


def test_mcnemar_by_hand() -> None:
    """Of five rows on which they disagree FP32 is right on all: p = 2 / 2^5."""
    truth = np.zeros(20, int)
    fp32 = np.tile([1.0, 0.0], (20, 1))
    int8 = fp32.copy()
    int8[:5] = [0.0, 1.0]
    assert significance("classification", truth, fp32, int8) == {
        "only_fp32_right": 5,
        "only_variant_right": 0,
        "p": pytest.approx(2 / 2**5),
    }
    assert significance("classification", truth, fp32, fp32)["p"] == 1.0


def test_regression_significance_tells_a_shift_from_nothing() -> None:
    truth = np.linspace(0, 1, 50)
    assert significance("regression", truth, truth[:, None], truth[:, None] + 0.1)["p"] < 1e-6
    assert significance("regression", truth, truth[:, None], truth[:, None])["p"] == 1.0
