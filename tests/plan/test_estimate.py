"""How long work takes on other GPUs: measured, or by the ratio of rooflines."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from slipstream.machine.peaks import PEAKS
from slipstream.plan.estimate import (
    HALF_WIDTH,
    LARGEST_BY_OPERATIONS,
    LARGEST_ERROR,
    gpu_of,
    gpus,
    left_out_errors,
    spread_of,
    work_time,
)
from slipstream.plan.measured import Measured, measured
from slipstream.telemetry.prices import built_in_prices
from tests.support.measured_trainings import FIGURES, figures

RUN = measured("run", FIGURES)
#: Seconds of steps, evaluations, and waits for rows.
WORK = 18_000 + 360 + 180


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA L4", "L4"),
        ("Tesla T4", "T4"),
        ("NVIDIA L40S", None),
        ("", None),
    ],
)
def test_gpus_are_known_by_the_words_of_their_driver(device: str, name: str | None) -> None:
    found = gpu_of(device)
    assert (found.name if found else None) == name


def test_every_gpu_computes_and_every_price_names_a_known_one() -> None:
    assert all(gpu.peak(gpu.precision()) > 0 for gpu in gpus().values())
    assert {each.gpu for each in built_in_prices().instances.values()} <= set(gpus())
    assert {gpu.name.split("-")[0] for gpu in gpus().values()} <= set(PEAKS)


def test_work_on_the_same_hardware_is_measured() -> None:
    found = work_time(RUN, [RUN], gpus()["A100-80GB"], 1)
    assert found.seconds == pytest.approx(WORK) and found.how == "measured"
    again = measured("again", figures(slower=1.1))
    both = work_time(RUN, [RUN, again], gpus()["A100-80GB"], 1)
    assert both.seconds == pytest.approx(math.sqrt(WORK * (WORK + 1800)), rel=1e-6)
    assert both.spread == pytest.approx(np.log((WORK + 1800) / WORK) / math.sqrt(2) * math.sqrt(1.5), rel=1e-6)
    other = measured("other", figures(slower=9, parameters=7))
    assert work_time(RUN, [RUN, other], gpus()["A100-80GB"], 1).seconds == pytest.approx(WORK), "of other work"


def test_on_another_gpu_it_is_predicted_by_the_ratio_of_rooflines() -> None:
    """512 rows of 1e11 operations are computed, not moved: 989 of 312 TFLOPS."""
    found = work_time(RUN, [RUN], gpus()["H100"], 1)
    assert found.seconds == pytest.approx((18_000 + 360) * 312 / 989 + 180, rel=1e-6)
    assert found.how.startswith("predicted from NVIDIA A100")
    assert found.spread == pytest.approx(math.log(1 + LARGEST_ERROR) / HALF_WIDTH)


def test_a_step_that_moves_its_parameters_goes_with_the_bandwidth() -> None:
    moving = measured("moving", figures(speed={"flops_per_row": 1e6}))
    found = work_time(moving, [moving], gpus()["H200"], 1)
    assert found.seconds == pytest.approx((18_000 + 360) * 2039 / 4800 + 180, rel=1e-6)


def test_from_a_cpu_it_is_less_sure_and_has_a_least_step() -> None:
    world = replace(FIGURES.world, device="cpu", precision="fp32", size=2)
    cpu = measured("cpu", figures(gpu="", world=world, speed={"peak_flops": 1e12}))
    found = work_time(cpu, [cpu], gpus()["L4"], 2)
    assert found.seconds == pytest.approx((18_000 + 360) / 242 + 180, rel=1e-6)
    assert found.spread == pytest.approx(math.log(1 + LARGEST_BY_OPERATIONS) / HALF_WIDTH)
    assert "exchange unknown" in found.how and "launching" not in found.how
    small = measured("small", figures(gpu="", world=world, speed={"peak_flops": 1e9}))
    fast = work_time(small, [small], gpus()["H100"], 1)
    assert fast.seconds == pytest.approx(36_000 * 1e-3 + 180) and "1 ms a step assumed" in fast.how


def many(random: np.random.Generator, spread: float) -> list[Measured]:
    """Runs of 17 sizes of models whose steps are off their roofline by some chance."""
    sizes = np.geomspace(1e9, 1e12, 17)
    return [
        measured(
            str(size),
            figures(slower=size / 1e11 * float(np.exp(random.normal(0, spread))), speed={"flops_per_row": float(size)}),
        )
        for size in sizes
    ]


def test_what_is_left_out_says_how_far_predictions_are_off() -> None:
    """Over 40 sets of runs: 90 % of the errors of one more are within the interval, or nearly."""
    random, held = np.random.default_rng(3), 0
    for _ in range(40):
        *known, one = many(random, 0.3)
        errors = left_out_errors(known)
        half = spread_of(errors, LARGEST_ERROR) * HALF_WIDTH
        held += abs(left_out_errors([*known, one])[-1]) <= half
    assert held >= 32


def test_few_errors_are_not_believed() -> None:
    assert spread_of([0.01] * 8, 0.66) == pytest.approx(math.log(1.66) / HALF_WIDTH)
    assert spread_of([0.01] * 9, 0.66) == pytest.approx(0.01 / HALF_WIDTH)
    assert spread_of([2.0], 0.66) == pytest.approx(2.0 / HALF_WIDTH)


def test_several_processes_share_the_rows_of_a_batch() -> None:
    found = work_time(RUN, [RUN], gpus()["A100-80GB"], 8)
    assert found.seconds == pytest.approx((18_000 + 360) / 8 + 180, rel=1e-6)
    assert found.how.endswith("exchange unknown") and not found.exchange_known
