"""Real steps of 16 models and batches on this machine's CPU, every one predicted from the others."""

import math
import time
from itertools import pairwise, product

import pytest
import torch

from slipstream.operations.plan.estimate import (
    HALF_WIDTH,
    LARGEST_ERROR,
    compute_seconds_per_step,
    further_error_deviation,
    left_out_errors,
    roofline_seconds,
)
from slipstream.operations.plan.measured import MeasuredTraining, measured_training
from slipstream.pipeline.train.device_clock import measured_peak
from tests.support.measured_trainings import FIGURES, LEDGER, SECONDS, figures

WIDTHS, BATCHES = (128, 256, 512, 1024), (64, 256, 1024, 4096)
INPUTS = 64


def step_seconds(width: int, batch: int) -> float:
    """The best of some steps of a perceptron with two hidden layers, and Adam."""
    torch.manual_seed(0)
    sizes = (INPUTS, width, width, 1)
    layers = [layer for a, b in pairwise(sizes) for layer in (torch.nn.Linear(a, b), torch.nn.ReLU())]
    model, rows = torch.nn.Sequential(*layers[:-1]), torch.randn(batch, INPUTS)
    optimizer = torch.optim.Adam(model.parameters())
    best = math.inf
    for _ in range(8):
        started = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        optimizer.step()
        best = min(best, time.perf_counter() - started)
    return best


def bandwidth() -> float:
    """Bytes a second of a copy in memory, read and written: the best of some."""
    source = torch.ones(1 << 24)
    target, best = torch.empty_like(source), math.inf
    for _ in range(8):
        started = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - started)
    return 8 * source.numel() / best


def run_of(width: int, batch: int, peak: float) -> MeasuredTraining:
    weights = INPUTS * width + width * width + width
    slower = step_seconds(width, batch) * LEDGER.kept / SECONDS["steps"]
    speed = {"flops_per_row": 6.0 * weights, "peak_flops": peak}
    return measured_training(
        f"{width}, {batch}",
        figures(slower=slower, speed=speed, gpu="", parameters=weights, batch_size=batch, world=FIGURES.world),
    )


@pytest.mark.prove
@pytest.mark.alone
def test_the_interval_of_the_others_holds_most_of_16_models_and_batches() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peak, moved = measured_peak(torch.device("cpu"), "fp32"), bandwidth()
        runs = [run_of(width, batch, peak) for width, batch in product(WIDTHS, BATCHES)]
    finally:
        torch.set_num_threads(threads)
    roofs = [roofline_seconds(run, run.figures.batch_size, peak, moved) for run in runs]
    steps, held = [compute_seconds_per_step(run) for run in runs], 0
    errors = left_out_errors(roofs, steps)
    for out, error in enumerate(errors):
        others = [index for index in range(len(runs)) if index != out]
        known = left_out_errors([roofs[index] for index in others], [steps[index] for index in others])
        held += abs(error) <= further_error_deviation(known, LARGEST_ERROR) * HALF_WIDTH
    off = sorted(abs(math.expm1(error)) for error in errors)
    print(f"{held} of {len(runs)} held; errors {off[len(off) // 2]:.0%} in the median, {off[-1]:.0%} at most")
    assert held >= 13, [f"{run.name}: {math.expm1(error):+.0%}" for run, error in zip(runs, errors, strict=True)]
