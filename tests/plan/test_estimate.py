"""Training time on other GPUs: measured, or by the ratio of rooflines."""

import math
from dataclasses import replace

import numpy as np
import pytest

from slipstream.operations.plan.estimate import (
    HALF_WIDTH,
    LARGEST_BY_OPERATIONS,
    LARGEST_ERROR,
    find_gpu_model,
    fit_step_times,
    further_error_deviation,
    known_gpus,
    left_out_errors,
    roofline_seconds,
    work_time,
)
from slipstream.operations.plan.measured import MeasuredTraining, measured_training
from slipstream.shared.artifacts.results.ledger import EVALUATION, STEPS
from slipstream.shared.interconnect.profile import Fingerprint, Host, Launch, Measurement, NetworkProfile, Topology
from slipstream.shared.machine.gpus import PEAKS
from slipstream.shared.telemetry.prices import built_in_prices
from tests.support.measured_trainings import FIGURES, LEDGER, SECONDS, figures
from tests.support.wording import same_wording

RUN = measured_training("run", FIGURES)
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
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", None),
        ("", None),
    ],
)
def test_gpus_are_known_by_the_words_of_their_driver(device: str, name: str | None) -> None:
    found = find_gpu_model(device)
    assert (found.name if found else None) == name


def test_every_gpu_computes_and_every_price_names_a_known_one() -> None:
    assert all(gpu.peak(gpu.precision()) > 0 for gpu in known_gpus().values())
    assert {each.gpu for each in built_in_prices().instances.values()} <= set(known_gpus())
    assert {gpu.name.split("-")[0] for gpu in known_gpus().values()} <= set(PEAKS)


def test_work_on_the_same_hardware_is_measured() -> None:
    found = work_time(RUN, [RUN], known_gpus()["A100-80GB"], 1)
    assert found.seconds == pytest.approx(WORK) and found.how == "measured"
    again = measured_training("again", figures(slower=1.1))
    both = work_time(RUN, [RUN, again], known_gpus()["A100-80GB"], 1)
    assert both.seconds == pytest.approx(math.sqrt(WORK * (WORK + 1800)), rel=1e-6)
    assert both.spread == pytest.approx(np.log((WORK + 1800) / WORK) / math.sqrt(2) * math.sqrt(1.5), rel=1e-6)
    other = measured_training("other", figures(slower=9, parameters=7))
    assert work_time(RUN, [RUN, other], known_gpus()["A100-80GB"], 1).seconds == pytest.approx(WORK), "of other work"


def test_on_another_gpu_it_is_predicted_by_the_ratio_of_rooflines() -> None:
    """512 rows of 1e11 operations are computed, not moved: 989 of 312 TFLOPS."""
    found = work_time(RUN, [RUN], known_gpus()["H100"], 1)
    assert found.seconds == pytest.approx((18_000 + 360) * 312 / 989 + 180, rel=1e-6)
    assert found.how.startswith("predicted from NVIDIA A100")
    assert found.spread == pytest.approx(math.log(1 + LARGEST_ERROR) / HALF_WIDTH)


def test_a_step_that_moves_its_parameters_goes_with_the_bandwidth() -> None:
    moving = measured_training("moving", figures(speed={"flops_per_row": 1e6}))
    found = work_time(moving, [moving], known_gpus()["H200"], 1)
    assert found.seconds == pytest.approx((18_000 + 360) * 2039 / 4800 + 180, rel=1e-6)


def test_frozen_parameters_are_read_alone() -> None:
    """Of 100 million parameters one million is trained: 40 bytes of each of these are moved, 8 of each other."""
    few, all_of_them = (figures(speed={"flops_per_row": 1.0, "peak_flops": 1e30}, trained=n) for n in (10**6, 10**8))
    bandwidth, share = 2039e9, (40 + 99 * 8) / 4000
    times = [roofline_seconds(measured_training("moving", each), 512, 1e30, bandwidth) for each in (few, all_of_them)]
    assert times[0] == pytest.approx(times[1] * share)
    assert times[1] == roofline_seconds(
        measured_training("older", figures(speed={"flops_per_row": 1.0})), 512, 1e30, bandwidth
    )


def test_from_a_cpu_it_is_less_sure_and_has_a_least_step() -> None:
    world = replace(FIGURES.world, device="cpu", precision="fp32", size=2)
    cpu = measured_training("cpu", figures(gpu="", world=world, speed={"peak_flops": 1e12}))
    found = work_time(cpu, [cpu], known_gpus()["L4"], 2)
    assert found.seconds == pytest.approx((18_000 + 360) / 242 + 180, rel=1e-6)
    assert found.spread == pytest.approx(math.log(1 + LARGEST_BY_OPERATIONS) / HALF_WIDTH)
    assert "exchange unknown" in found.how and "launching" not in found.how
    small = measured_training("small", figures(gpu="", world=world, speed={"peak_flops": 1e9}))
    fast = work_time(small, [small], known_gpus()["H100"], 1)
    assert fast.seconds == pytest.approx(36_000 * 1e-3 + 180)
    same_wording(fast.how)


def test_a_fit_finds_what_any_step_takes() -> None:
    roofs = np.geomspace(1e-4, 1, 12)
    found = fit_step_times(roofs.tolist(), (1.25 * roofs + 0.01).tolist())
    assert found.per_roof == pytest.approx(1.25) and found.launch == pytest.approx(0.01)
    assert left_out_errors(roofs.tolist(), (1.25 * roofs + 0.01).tolist()) == pytest.approx([0.0] * 12, abs=1e-6)


def test_what_is_left_out_says_how_far_predictions_are_off() -> None:
    """Over 200 sets of 17 steps: 90 % of the errors of one more are within the interval, or nearly."""
    random, held = np.random.default_rng(3), 0
    for _ in range(200):
        roofs = random.permutation(np.geomspace(1e-3, 1, 17)).tolist()
        steps = ((1.25 * np.array(roofs) + 0.01) * np.exp(random.normal(0, 0.3, 17))).tolist()
        half = further_error_deviation(left_out_errors(roofs[:-1], steps[:-1]), LARGEST_ERROR) * HALF_WIDTH
        held += abs(math.log(steps[-1] / fit_step_times(roofs[:-1], steps[:-1]).step(roofs[-1]))) <= half
    assert 165 <= held <= 197


def test_with_many_runs_what_any_step_takes_stays() -> None:
    """Steps of 0.5 s for each 1e11 operations of a row, and 0.1 s for themselves."""

    def run(size: int) -> MeasuredTraining:
        slower = (0.5 * size + 0.1) * LEDGER.kept / SECONDS[STEPS]
        its = figures(slower=slower, speed={"flops_per_row": size * 1e11})
        its.ledger.seconds[EVALUATION] = 0.0
        return measured_training(str(size), its)

    runs = [run(size) for size in range(1, 11)]
    found = work_time(runs[0], runs, known_gpus()["H100"], 1)
    assert found.seconds == pytest.approx(36_000 * (0.5 * 312 / 989 + 0.1) + 180, rel=1e-6)
    assert found.how.startswith("predicted from 10 trainings on NVIDIA A100") and found.spread < 0.01


def test_few_errors_are_not_believed() -> None:
    assert further_error_deviation([0.01] * 8, 0.66) == pytest.approx(math.log(1.66) / HALF_WIDTH)
    assert further_error_deviation([0.01] * 9, 0.66) == pytest.approx(0.01 / HALF_WIDTH)
    assert further_error_deviation([2.0], 0.66) == pytest.approx(2.0 / HALF_WIDTH)


def test_several_processes_share_the_rows_of_a_batch() -> None:
    found = work_time(RUN, [RUN], known_gpus()["A100-80GB"], 8)
    assert found.seconds == pytest.approx((18_000 + 360) / 8 + 180, rel=1e-6)
    assert found.how.endswith("exchange unknown") and not found.exchange_known


def network(device: str, latency: float, bandwidth: float) -> NetworkProfile:
    """All-reduces of two processes that are rings: two messages of half the size."""
    measurements = tuple(
        Measurement("all_reduce", "float32", "sum", size, 2, "loop", True, (Launch((seconds,)),) * 3)
        for size in (1 << 16, 1 << 20, 1 << 24)
        for seconds in [2 * (latency + size / 2 / bandwidth)]
    )
    fingerprint = Fingerprint(2, 1, "nccl", (device,) * 2, (), "", {})
    return NetworkProfile(fingerprint, 0.0, measurements, Topology((Host((0, 1), "cpu", 64, 1),)))


def test_a_network_profile_adds_what_no_backward_pass_hides() -> None:
    """400 MB of gradients are 14 messages of 50 MB to 8 processes: at 1 GB/s 0.7 s, where the pass takes 0.06 s."""
    slow, fast = network(FIGURES.gpu, 1e-5, 1e9), network(FIGURES.gpu, 1e-6, 1e12)
    gpu, hidden = known_gpus()["A100-80GB"], (18_000 + 360) / 8 + 180
    exposed = work_time(RUN, [RUN], gpu, 8, [slow])
    assert exposed.seconds == pytest.approx(36_000 * 0.7 + 180, rel=0.1) and exposed.exchange_known
    assert work_time(RUN, [RUN], gpu, 8, [fast]).seconds == pytest.approx(hidden, rel=0.02)
    same_wording(exposed.how)
    other = work_time(RUN, [RUN], gpu, 8, [network("NVIDIA L4", 1e-5, 1e9)])
    assert not other.exchange_known and other.seconds == pytest.approx(hidden)
