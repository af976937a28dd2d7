"""The largest gain of quantisation follows from a profile by operator, or is not stated."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.pipeline.export.session import CALLS, figures_by_operator
from slipstream.shared.artifacts.results.export import ExportReport, ProfileFigures
from tests.support.report_runs import export

#: Microseconds of every node in a quiet call.
NODES = {"first": ("Gemm", 60), "second": ("MatMul", 20), "third": ("Relu", 15), "fourth": ("Relu", 5)}


def calls_of(noise: float = 0.0, preempted: dict[int, int] | None = None) -> list[tuple[str, str, int]]:
    """Executions call by call; calls in ``preempted`` lose that many microseconds in the third node."""
    draw, found = np.random.default_rng(0), []
    for call in range(CALLS):
        for name, (operator, duration) in NODES.items():
            lost = (preempted or {}).get(call, 0) if name == "third" else 0
            slower = duration * float(np.exp(noise * draw.normal())) if noise else duration
            found.append((name, operator, int(slower * (10 if call == 0 else 1)) + lost))
    return found


@pytest.mark.parametrize("preempted", [{}, {5: 4000}, {2: 90, 9: 4000, 15: 300}])
def test_a_call_that_waited_for_a_core_moves_no_share(preempted: dict[int, int]) -> None:
    figures = figures_by_operator(1, calls_of(preempted=preempted))
    assert figures.products == pytest.approx(0.8, abs=0.01) and figures.at_most == pytest.approx(5, rel=0.05)
    assert figures.operators == pytest.approx({"Gemm": 0.6, "MatMul": 0.2, "Relu": 0.2}, abs=0.01)
    low, high = figures.at_most_limits or (0.0, 0.0)
    assert low <= figures.at_most <= high and not figures.wide


def test_the_profile_of_a_busy_machine_is_wide() -> None:
    assert figures_by_operator(1, calls_of(noise=1.5)).wide


def said(profile: ProfileFigures, report: ExportReport) -> str:
    return replace(report, profile=[profile, *report.profile[1:]]).ceiling


def test_the_gain_is_not_stated_if_it_is_uncertain_or_refuted() -> None:
    report = export("accuracy")
    known = ProfileFigures(1, {"FusedGemm": 0.7, "Sin": 0.3}, 0.7, 1 / 0.3, (3.2, 3.5))
    assert "3.33 times" in said(known, report) and "(3.20 to 3.50)" in said(known, report)
    uncertain = replace(known, at_most_limits=(2.5, 3.6)), replace(known, at_most_limits=None)
    # The measured INT8 variant is 1.93 times as fast.
    refuted = replace(known, products=0.4, at_most=1 / 0.6, at_most_limits=(1.6, 1.7))
    assert not any("times as fast" in said(each, report) for each in (*uncertain, refuted))
