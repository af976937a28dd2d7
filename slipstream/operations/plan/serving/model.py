"""Exported model as input of a plan: variants, request times, and the measuring machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slipstream.operations.plan.estimate import FORWARD, GpuModel, find_gpu_model
from slipstream.operations.plan.measured import SUMMARY, figures_of_run
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.shared.artifacts.results.export import (
    REPORT,
    ExportReport,
    LatencyFigures,
    VariantFigures,
    read_export,
    without_onnx,
)
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import VNNI
from slipstream.shared.settings import Settings, settings

CPUS = Path(__file__).with_name("cpus.toml")
EXPECTED = "expected an exported model: runs/…, its directory model, or a version of a registry"
MODEL = "model"
#: Reference variant, present in every export.
FP32 = "onnx-fp32"
#: Batch size of a request: one row.
ONE = "1"
#: p99 / median of a single request above which the measurement was probably disturbed.
DISTURBED = 10
#: Standard normal quantiles of 90 and 99 %.
AT_90, AT_99 = 1.2816, 2.3263


@dataclass(frozen=True)
class MeasuredModel:
    name: str
    report: ExportReport
    #: FLOPs per row, and peak FLOP/s of a CPU core; None if unknown.
    flops: float | None
    core_peak: float | None
    #: Why the run's training figures cannot be read; "" if they can or the model has no run.
    untold: str = ""

    @property
    def cpu(self) -> str:
        """CPU of the measurements; "" if they ran on a GPU."""
        return "" if self.report.machine.gpu else self.report.machine.cpu

    @property
    def gpu(self) -> GpuModel | None:
        return find_gpu_model(self.report.machine.gpu) if self.report.machine.gpu else None

    @property
    def sums_exactly(self) -> bool:
        """True if the CPU has VNNI, like the price file's CPUs, so that INT8 variants compute the same there."""
        return bool(set(VNNI) & set(self.report.machine.flags))


def read_model(place: str) -> MeasuredModel:
    """Read an exported model.

    Raises ``UserError`` if it is missing or incomplete, or its latency was not measured.
    """
    directory = Path(place)
    if (directory / MODEL / REPORT).is_file():
        directory = directory / MODEL
    if not (directory / REPORT).is_file():
        raise UserError(
            f"{place}: {'no exported model is there' if directory.exists() else 'is not there'}; {EXPECTED}"
        )
    report = read_export(directory)
    if not report.variants:
        raise without_onnx(place, f"{report.why}; its latency was not measured")
    run, untold = figures_beside(directory)
    speed = run.throughput if run else None
    peak = cpu_peak(report.machine.cpu)
    if peak is None and run and speed and run.world.device == "cpu":
        peak = speed.peak_flops / (run.world.size * run.world.threads)
    return MeasuredModel(place, report, FORWARD * speed.flops_per_row if speed else None, peak, untold)


def figures_beside(directory: Path) -> tuple[TrainingFigures | None, str]:
    """Return the training figures of the model's run and "", or None and the reason.

    The reason is "" if the model is not in a run. If another version wrote the run, measured times can still be
    planned.
    """
    summary = directory.parent / SUMMARY
    if directory.name != MODEL or not summary.is_file():
        return None, ""
    try:
        return figures_of_run(summary), ""
    except UserError as error:
        return None, error.message


@settings
class KnownCpu(Settings):
    """Entry of ``cpus.toml``."""

    called: str
    gflops: float


@settings
class CpuFile(Settings):
    """Contents of ``cpus.toml``; the keys are words of Linux's CPU names."""

    cpus: dict[str, KnownCpu]


@cache
def cpu_peak_flops() -> dict[str, float]:
    """Return the peak FLOP/s of a core, by the word that names the CPU."""
    return {word: entry.gflops * 1e9 for word, entry in CpuFile.from_toml(CPUS).cpus.items()}


def cpu_peak(name: str) -> float | None:
    """Return the peak FLOP/s of a core for Linux's CPU name; None if unknown."""
    words = name.split()
    return next((peak for word, peak in cpu_peak_flops().items() if word in words), None)


def servable_variants(report: ExportReport) -> list[VariantFigures]:
    """Return the timed variants that the export did not reject."""
    return [each for each in report.timed if each.file and may_serve(each) and service_times(each.latency_ms.get(ONE))]


def may_serve(variant: VariantFigures) -> bool:
    return variant.chosen or variant.name == FP32 or variant.verdict == "passed"


def not_served(report: ExportReport) -> Iterator[str]:
    """Yield a line for every other timed variant, with the reason."""
    for variant in report.timed:
        if variant.file and not may_serve(variant):
            yield f"{variant.name}: skipped, as the export rejected it ({variant.verdict})"
        elif variant.file and not service_times(variant.latency_ms.get(ONE)):
            yield f"{variant.name}: skipped, as too few single rows were timed; raise export.seconds"


def contention_warnings(report: ExportReport) -> Iterator[str]:
    """Yield a line about variants whose tail latency suggests CPU contention."""
    services = {each.name: service_times(each.latency_ms.get(ONE)) for each in servable_variants(report)}
    tails = {name: service.p99 / service.median for name, service in services.items() if service}
    if long := [f"{name} ({tail:.0f})" for name, tail in tails.items() if tail > DISTURBED]:
        yield (
            f"p99 over median of a request alone: {', '.join(long)}: other processes may have used the CPU while it "
            "was timed; exported on a quiet machine it may take fewer replicas"
        )


def service_times(figures: LatencyFigures | None) -> ServiceTimes | None:
    """Return the distribution of request times from percentiles; None without p90.

    Logarithms are interpolated linearly between percentiles. Times below the median are set to it, times above p99 to
    p99. A missing p99 is that of a lognormal distribution. Mean and variation are those of all calls, if recorded.
    """
    if figures is None or figures.p50 is None or figures.p90 is None:
        return None
    p50, p90 = figures.p50.value / 1e3, figures.p90.value / 1e3
    p99 = figures.p99.value / 1e3 if figures.p99 else p50 * (p90 / p50) ** (AT_99 / AT_90)
    times = [p50, *between(p50, p90, 8), *between(p90, p99, 9), p99]
    service = ServiceTimes.weighted(times, (0.5, *[0.4 / 8] * 8, *[0.09 / 9] * 9, 0.01))
    if figures.mean is None or figures.variation is None:
        return service
    return replace(service, mean=figures.mean / 1e3, cv2=figures.variation**2)


def between(low: float, high: float, steps: int) -> list[float]:
    """Return ``steps`` geometric values from above ``low`` to ``high``."""
    return [min(high, low * (high / low) ** (step / steps)) for step in range(1, steps + 1)]
