"""An exported model as a plan reads it: its variants, how long a request took, and what it was measured on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from slipstream.artifacts.results.export import (
    REPORT,
    ExportReport,
    LatencyFigures,
    VariantFigures,
    read_export,
    without_onnx,
)
from slipstream.artifacts.results.training_figures import TrainingFigures
from slipstream.errors import UserError
from slipstream.machine.description import VNNI
from slipstream.plan.estimate import FORWARD, Gpu, gpu_of
from slipstream.plan.measured import SUMMARY, figures_of_run
from slipstream.plan.serving.queueing import Service
from slipstream.toml_file import read_toml

CPUS = Path(__file__).with_name("cpus.toml")
EXPECTED = "expected an exported model: runs/…, its directory model, or a version of a registry"
MODEL = "model"
#: The variant without which nothing is exported, with which the others are compared.
FP32 = "onnx-fp32"
#: The batch of a request: one row.
ONE = "1"
#: A p99 of a request alone that is so many times its median is no property of most models.
DISTURBED = 10
#: Standard deviations of a normal distribution at which it reaches 90 and 99 %.
AT_90, AT_99 = 1.2816, 2.3263


@dataclass(frozen=True)
class Exported:
    """A model and what is known of the machine that it was exported on."""

    name: str
    report: ExportReport
    #: Floating-point operations of a row; and those that a core of the CPU does in a second at most. None if nobody
    #: knows.
    flops: float | None
    core_peak: float | None
    #: Why nothing is known of the training of its run; "" if it is, or if the model lies alone.
    untold: str = ""

    @property
    def cpu(self) -> str:
        """What it was measured on; "" if that was a GPU."""
        return "" if self.report.machine.gpu else self.report.machine.cpu

    @property
    def gpu(self) -> Gpu | None:
        return gpu_of(self.report.machine.gpu) if self.report.machine.gpu else None

    @property
    def sums_exactly(self) -> bool:
        """Whether its CPU sums 8-bit products as those of the price file do, so that quantised variants compare."""
        return bool(set(VNNI) & set(self.report.machine.flags))


def read_model(place: str) -> Exported:
    """Raises ``UserError`` if none lies there, whole, or one whose requests were not timed."""
    directory = Path(place)
    if (directory / MODEL / REPORT).is_file():
        directory = directory / MODEL
    if not (directory / REPORT).is_file():
        raise UserError(
            f"{place}: {'no exported model is there' if directory.exists() else 'is not there'}; {EXPECTED}"
        )
    report = read_export(directory)
    if not report.variants:
        raise without_onnx(place, f"{report.why}; how long its requests take was not measured")
    run, untold = figures_beside(directory)
    speed = run.throughput if run else None
    peak = cpu_peak(report.machine.cpu)
    if peak is None and run and speed and run.world.device == "cpu":
        peak = speed.peak_flops / (run.world.size * run.world.threads)
    return Exported(place, report, FORWARD * speed.flops_per_row if speed else None, peak, untold)


def figures_beside(directory: Path) -> tuple[TrainingFigures | None, str]:
    """Of the training of the same run; None if the model lies alone, or if the run is of another version, which is then
    said: what was measured can be planned without."""
    summary = directory.parent / SUMMARY
    if directory.name != MODEL or not summary.is_file():
        return None, ""
    try:
        return figures_of_run(summary), ""
    except UserError as error:
        return None, error.message


@cache
def cpus() -> dict[str, float]:
    """Operations a second of a core, by the word that names the CPU."""
    data = read_toml(CPUS)
    return {word: entry["gflops"] * 1e9 for word, entry in data.items()}


def cpu_peak(name: str) -> float | None:
    """Of a core of the CPU that Linux calls so; None if it is not known."""
    words = name.split()
    return next((peak for word, peak in cpus().items() if word in words), None)


def served(report: ExportReport) -> list[VariantFigures]:
    """The variants that may be served: files that lose no more than was allowed, and whose requests were timed."""
    return [each for each in report.timed if each.file and may_serve(each) and service_of(each.latency_ms.get(ONE))]


def may_serve(variant: VariantFigures) -> bool:
    return (
        variant.chosen or variant.name == FP32 or (variant.quality is not None and variant.quality.answer == "passed")
    )


def not_served(report: ExportReport) -> Iterator[str]:
    """Why others that were timed are left out, a line each."""
    for variant in report.timed:
        if variant.file and not may_serve(variant):
            answer = variant.quality.answer if variant.quality else "not compared"
            yield f"{variant.name}: left out, as it was not shown to be good enough ({answer})"
        elif variant.file and not service_of(variant.latency_ms.get(ONE)):
            yield f"{variant.name}: left out, as too few single rows were timed; raise export.seconds"


def disturbed(report: ExportReport) -> Iterator[str]:
    """Variants some of whose requests took so long that other work may have had the processor, in a line."""
    services = {each.name: service_of(each.latency_ms.get(ONE)) for each in served(report)}
    tails = {name: service.p99 / service.median for name, service in services.items() if service}
    if long := [f"{name} ({tail:.0f})" for name, tail in tails.items() if tail > DISTURBED]:
        yield (
            f"p99 over median of a request alone: {', '.join(long)}: other work may have had the processor when it was "
            "timed; exported on a quiet machine it may take fewer replicas"
        )


def service_of(figures: LatencyFigures | None) -> Service | None:
    """The distribution of a request's time from its percentiles: their logarithms linear between them, all below the
    median as long as that, and all beyond the 99th percentile as long as that. None if the 90th is not known; the 99th
    is then that of a lognormal distribution. Mean and variation are those of all calls, if they were recorded."""
    if figures is None or figures.p50 is None or figures.p90 is None:
        return None
    p50, p90 = figures.p50.value / 1e3, figures.p90.value / 1e3
    p99 = figures.p99.value / 1e3 if figures.p99 else p50 * (p90 / p50) ** (AT_99 / AT_90)
    times = [p50, *between(p50, p90, 8), *between(p90, p99, 9), p99]
    service = Service.weighted(times, (0.5, *[0.4 / 8] * 8, *[0.09 / 9] * 9, 0.01))
    if figures.mean is None or figures.variation is None:
        return service
    return replace(service, mean=figures.mean / 1e3, cv2=figures.variation**2)


def between(low: float, high: float, steps: int) -> list[float]:
    """From above ``low`` to ``high``, each as many times as long as the one before."""
    return [min(high, low * (high / low) ** (step / steps)) for step in range(1, steps + 1)]
