"""Time of a training's work on a GPU: measured there, else predicted from other hardware.

A prediction scales by the ratio of two rooflines (Williams, Waterman and Patterson 2009). A step's roofline is the
longer of computing its operations at peak rate and of moving parameters and optimiser state through memory once. It
omits constant costs per step: Python, and kernels too small to fill a device. With enough trainings on the same
hardware these costs are fitted too, and leave-one-out validation gives the prediction error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from slipstream.operations.plan.measured import MeasuredTraining
from slipstream.shared.artifacts.results.ledger import UNKNOWN_GPU
from slipstream.shared.interconnect.model.hockney import Compute, predict_step_time
from slipstream.shared.interconnect.model.predictions import all_reduce_model
from slipstream.shared.interconnect.profile import NetworkProfile
from slipstream.shared.machine.gpus import PART, data_sheet_peak
from slipstream.shared.settings import Settings, settings

FILE = Path(__file__).with_name("gpus.toml")
#: Bytes moved per step and fp32 parameter: weight read in forward and backward, gradient written, and Adam's reads and
#: writes of weight, gradient and two moments.
BYTES_PER_PARAMETER = 40
#: Bytes moved per step and frozen parameter: read in forward and backward.
BYTES_PER_FROZEN = 8
#: Largest relative errors seen when predicting between models and batch sizes on one CPU, with the full roofline and by
#: operations only; the medians were 24 and 35 %.
LARGEST_ERROR, LARGEST_BY_OPERATIONS = 0.66, 0.85
#: Minimum trainings for an empirical error, and the fraction of errors that its interval covers.
ENOUGH, HELD = 9, 0.9
#: Half width of a 90 % interval in standard deviations.
HALF_WIDTH = 1.645
#: Relative half width of the 90 % interval between equal runs, assumed if there was only one.
ONE_RUN = 0.05
#: Usable fraction of a GPU's memory; driver and fragmentation take the remainder.
USABLE = 0.9
#: Minimum seconds of a step on a GPU, for launching its kernels: an assumption that the output notes where it matters.
LEAST_STEP_S = 1e-3
PIECE = 1 << 20
#: Forward fraction of a step, since the backward pass computes twice as much.
FORWARD = 1 / 3
MEASURED = "measured"
UNKNOWN_EXCHANGE = ", exchange unknown"


@dataclass(frozen=True)
class GpuModel:
    """GPU model: memory in bytes, bandwidth in bytes per second, and ``words`` of its device name."""

    name: str
    words: tuple[str, ...]
    memory: float
    bandwidth: float

    def peak(self, kind: str) -> float:
        """Return the peak FLOP/s in "fp32", "bf16" or "fp16"; 0 if unsupported."""
        return data_sheet_peak(self.name, kind) or 0.0

    def precision(self) -> str:
        """Return the precision that training.precision "auto" selects."""
        return "bf16" if self.peak("bf16") else "fp16"

    def fits(self, memory_bytes: float) -> bool:
        return memory_bytes <= USABLE * self.memory


@dataclass(frozen=True)
class WorkTime:
    """Seconds of training steps, without starts and saves, with uncertainty and source.

    ``spread`` is the standard deviation of the logarithm. ``exchange_known`` is False if the gradient exchange was
    never measured and is not included.
    """

    seconds: float
    spread: float
    how: str
    exchange_known: bool = True

    def factors(self, random: np.random.Generator, runs: int) -> np.ndarray:
        """Draw factors by which the work may take longer than ``seconds``; float64 ``[runs]``."""
        return np.exp(random.normal(0, self.spread, runs))


@settings
class KnownGpu(Settings):
    """Entry of ``gpus.toml``, in 1e9 bytes and 1e9 bytes per second."""

    words: list[str]
    gb: float
    gb_per_s: float


@settings
class GpuFile(Settings):
    gpus: dict[str, KnownGpu]


@cache
def known_gpus() -> dict[str, GpuModel]:
    """Return the known GPUs by name, more specific ones first."""
    entries = GpuFile.from_toml(FILE).gpus.items()
    order = sorted(entries, key=lambda entry: -len(entry[1].words))
    return {name: GpuModel(name, tuple(gpu.words), gpu.gb * 1e9, gpu.gb_per_s * 1e9) for name, gpu in order}


def find_gpu_model(device: str) -> GpuModel | None:
    """Return the GPU with the driver's device name; None if unknown, or a MIG partition."""
    if PART in device:
        return None
    words = device.replace("-", " ").split()
    return next((gpu for gpu in known_gpus().values() if set(gpu.words) <= set(words)), None)


def roofline_seconds(run: MeasuredTraining, rows: float, peak: float, bandwidth: float | None) -> float:
    """Return the roofline seconds of a step of ``rows`` rows in one process."""
    figures = run.figures
    moved = BYTES_PER_PARAMETER * (figures.parameters - figures.frozen) + BYTES_PER_FROZEN * figures.frozen
    return max(rows * run.flops_per_row / peak, moved / bandwidth if bandwidth else 0.0)


def own_roof(run: MeasuredTraining, bandwidth: bool) -> float:
    """Return the roofline seconds of the run's step on its own hardware."""
    gpu = find_gpu_model(run.figures.gpu)
    rows = run.figures.batch_size / run.processes
    return roofline_seconds(run, rows, run.peak_flops / run.processes, gpu.bandwidth if gpu and bandwidth else None)


def compute_seconds_per_step(run: MeasuredTraining) -> float:
    return run.computing_s / run.figures.ledger.kept


@dataclass(frozen=True)
class StepTimeFit:
    """Linear model of the step time on some hardware: ``per_roof`` x roofline seconds + ``launch`` seconds."""

    per_roof: float
    launch: float

    def step(self, its_roof: float) -> float:
        return self.per_roof * its_roof + self.launch


def fit_step_times(roofs: Sequence[float], steps: Sequence[float]) -> StepTimeFit:
    """Fit by least squares of relative errors, with non-negative coefficients."""
    from scipy.optimize import nnls

    measured_steps = np.asarray(steps)
    columns = np.stack([np.asarray(roofs), np.ones(len(roofs))], axis=1) / measured_steps[:, None]
    per_roof, launch = nnls(columns, np.ones(len(roofs)))[0]
    return StepTimeFit(float(per_roof), float(launch))


def left_out_errors(roofs: Sequence[float], steps: Sequence[float]) -> list[float]:
    """Return every step's leave-one-out error: log(measured / fitted time)."""
    errors = []
    for out in range(len(steps)):
        others = [index for index in range(len(steps)) if index != out]
        others_fit = fit_step_times([roofs[index] for index in others], [steps[index] for index in others])
        errors.append(math.log(steps[out] / others_fit.step(roofs[out])))
    return errors


def further_error_deviation(errors: Sequence[float], otherwise: float) -> float:
    """Return the standard deviation whose 90 % interval covers a further error with 90 % probability.

    With fewer than ``ENOUGH`` errors, the interval covers all of them and ``otherwise`` (relative).
    """
    if len(errors) < ENOUGH:
        half = max([math.log(1 + otherwise), *map(abs, errors)])
    else:
        half = sorted(map(abs, errors))[min(len(errors), math.ceil(HELD * (len(errors) + 1))) - 1]
    return half / HALF_WIDTH


def measured_time(
    planned: MeasuredTraining, runs: Sequence[MeasuredTraining], gpu: GpuModel | None, processes: int
) -> WorkTime | None:
    """Return the planned training's time from runs of the same work on the same hardware; None without any."""
    alike = [
        run
        for run in runs
        if run.processes == processes and find_gpu_model(run.figures.gpu) == gpu and planned.same_work(run)
    ]
    return estimate_work_time(planned, alike) if alike and gpu else None


def estimate_work_time(planned: MeasuredTraining, alike: Sequence[MeasuredTraining]) -> WorkTime:
    """Return the planned training's time from ``alike`` runs, which do the same work on the same hardware."""
    logs = np.log([(run.computing_s + run.waiting_s) / run.figures.ledger.kept for run in alike])
    spread = math.log(1 + ONE_RUN) / HALF_WIDTH
    if len(logs) > 1:
        spread = float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(logs))
    return WorkTime(float(np.exp(logs.mean())) * planned.figures.ledger.kept, spread, MEASURED)


def work_time(
    planned: MeasuredTraining,
    runs: Sequence[MeasuredTraining],
    gpu: GpuModel,
    processes: int,
    networks: Sequence[NetworkProfile] = (),
) -> WorkTime:
    """Return the time of the planned training's work in ``processes`` processes on ``gpu``."""
    if known := measured_time(planned, runs, gpu, processes):
        return known
    computing, spread, how = predict_compute(planned, runs, gpu, processes)
    if computing < LEAST_STEP_S:
        computing, how = LEAST_STEP_S, f"{how}, {LEAST_STEP_S * 1e3:g} ms a step assumed for launching"
    step, exchange = predict_with_exchange(planned, computing, gpu, processes, networks)
    seconds = step * planned.figures.ledger.kept + planned.waiting_s
    return WorkTime(seconds, spread, how + exchange, exchange != UNKNOWN_EXCHANGE)


def predict_compute(
    planned: MeasuredTraining, runs: Sequence[MeasuredTraining], gpu: GpuModel, processes: int
) -> tuple[float, float, str]:
    """Return a step's computing seconds, the standard deviation of their logarithm, and their source."""
    on_gpus = find_gpu_model(planned.figures.gpu) is not None
    peak = gpu.peak(planned.figures.world.precision if on_gpus else gpu.precision()) or gpu.peak(gpu.precision())
    target = roofline_seconds(planned, planned.figures.batch_size / processes, peak, gpu.bandwidth if on_gpus else None)
    alike = [run for run in runs if run.figures.gpu == planned.figures.gpu != UNKNOWN_GPU]
    where = f"{planned.figures.gpu or 'a CPU'}{'' if on_gpus else ', by operations alone'}"
    if len(alike) < ENOUGH:
        spread = further_error_deviation([], LARGEST_ERROR if on_gpus else LARGEST_BY_OPERATIONS)
        return (
            compute_seconds_per_step(planned) * target / own_roof(planned, bandwidth=on_gpus),
            spread,
            f"predicted from {where}",
        )
    roofs, steps = [own_roof(run, bandwidth=on_gpus) for run in alike], [compute_seconds_per_step(run) for run in alike]
    launch = min(fit_step_times(roofs, steps).launch, compute_seconds_per_step(planned))
    # The constant cost of a step belongs to the host and stays.
    scaled = (compute_seconds_per_step(planned) - launch) * target / own_roof(planned, bandwidth=on_gpus)
    spread = further_error_deviation(left_out_errors(roofs, steps), LARGEST_ERROR)
    return scaled + launch, spread, f"predicted from {len(alike)} trainings on {where}"


def predict_with_exchange(
    planned: MeasuredTraining, computing: float, gpu: GpuModel, processes: int, networks: Sequence[NetworkProfile]
) -> tuple[float, str]:
    """Return a step's seconds including its gradient exchange, and a note on the exchange's source."""
    if processes == 1:
        return computing, ""
    figures = planned.figures
    for network in networks:
        model = (
            all_reduce_model(network) if find_gpu_model(network.fingerprint.devices[0]) == gpu else "of other hardware"
        )
        if not isinstance(model, str):
            pieces = (PIECE,) * max(1, round(4 * (figures.parameters - figures.frozen) / PIECE))
            compute = Compute(FORWARD * computing, (1 - FORWARD) * computing, 0.0, pieces)
            return predict_step_time(
                compute, partial(model.seconds, processes)
            ).step.seconds, ", exchange by the network profile"
    return computing, UNKNOWN_EXCHANGE
