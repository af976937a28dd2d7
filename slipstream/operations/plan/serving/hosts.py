"""Cloud instances for serving, from the price file, and request times on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.operations.plan.estimate import (
    LARGEST_BY_OPERATIONS,
    LARGEST_ERROR,
    LEAST_STEP_S,
    MEASURED,
    ONE_RUN,
    GpuModel,
    known_gpus,
)
from slipstream.operations.plan.serving.model import FP32, ONE, MeasuredModel, cpu_peak, service_times
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.shared.artifacts.results.export import VariantFigures
from slipstream.shared.errors import UserError
from slipstream.shared.telemetry.prices import PriceList


@dataclass(frozen=True)
class ServingInstance:
    """Instance type for serving, with its GPU or a word of its CPU's name.

    ``holds`` is the number of replicas that fit: one per GPU, or cores divided by the threads of a measured call.
    """

    name: str
    region: str
    per_hour: float
    dated: str
    holds: int
    gpu: GpuModel | None
    cpu: str
    #: As :class:`.CpuInstance`.
    cpus: int = 0
    memory_gib: float = 0.0

    @property
    def computes_on(self) -> str:
        return self.gpu.name if self.gpu else self.cpu


@dataclass(frozen=True)
class ServingTime:
    """Time of a variant on one replica.

    ``service`` is the time of a request, ``how`` its source. ``rows_per_second`` is for batch scoring. ``error`` is the
    fraction by which a prediction may be too short (0 if measured).
    """

    service: ServiceTimes
    rows_per_second: float
    how: str
    error: float

    @property
    def planned(self) -> ServiceTimes:
        """Request time with a margin for the usual difference between equal runs."""
        return self.service.times_as_long(1 + ONE_RUN)

    @property
    def at_worst(self) -> ServiceTimes:
        return self.service.times_as_long(1 + max(self.error, ONE_RUN))


def serving_instances(prices: PriceList, threads: int, only: Sequence[str]) -> list[ServingInstance]:
    """Return the instances of the price file, or only those named in ``only``.

    Raises ``UserError`` if the file lacks a name.
    """
    known = {
        **{
            each.name: ServingInstance(
                each.name,
                each.region,
                float(each.on_demand),
                each.dated,
                each.cores // threads,
                None,
                each.cpu,
                each.cpus,
                each.memory_gib,
            )
            for each in prices.cpu_instances.values()
        },
        **{
            each.name: ServingInstance(
                each.name, each.region, float(each.on_demand), each.dated, each.gpus, known_gpus()[each.gpu], ""
            )
            for each in prices.instances.values()
            if each.gpu in known_gpus()
        },
    }
    for name in only:
        if name not in known:
            raise UserError(
                f"--instance {name}: no such instance among the prices; expected one of {', '.join(known)}, or a file "
                "with its price: --prices"
            )
    return [known[name] for name in dict.fromkeys(only)] if only else list(known.values())


def serving_time(model: MeasuredModel, variant: VariantFigures, host: ServingInstance) -> ServingTime | str:
    """Return the time of the variant on the host, or why it is unknown."""
    service = service_times(variant.latency_ms.get(ONE))
    assert service is not None, "only variants that were timed are served"
    if not host.holds:
        return f"has fewer cores than a call has threads, {model.report.machine.threads}"
    batch, rate = max(variant.rows_per_second.items(), key=lambda each: each[1])
    if is_measured(model, host):
        return ServingTime(service, rate, MEASURED, 0.0)
    if variant.name != FP32 and (host.gpu or not model.sums_exactly):
        return "quantised variants are for CPUs like that on which they were made"
    factors = [roofline_slowdown(model, variant, host, int(rows)) for rows in (ONE, batch)]
    if factors[0] is None or factors[1] is None:
        return unknown(model, host)
    how = f"predicted from {model.report.machine.device}"
    if model.cpu:
        how += ", by operations alone"
    service, seconds = service.times_as_long(factors[0]), factors[1] * int(batch) / rate
    if host.gpu and model.cpu and service.median < LEAST_STEP_S:
        how += f", {LEAST_STEP_S * 1e3:g} ms a call assumed for launching"
        service = service.times_as_long(LEAST_STEP_S / service.median)
        seconds = max(seconds, LEAST_STEP_S)
    return ServingTime(service, int(batch) / seconds, how, LARGEST_BY_OPERATIONS if model.cpu else LARGEST_ERROR)


def is_measured(model: MeasuredModel, host: ServingInstance) -> bool:
    """Return True if the host has the CPU or GPU on which the model was measured."""
    return host.gpu == model.gpu if host.gpu else host.cpu in model.cpu.split()


def unknown(model: MeasuredModel, host: ServingInstance) -> str:
    if host.gpu is None and model.cpu and cpu_peak(host.cpu) is None:
        return f"its CPU {host.cpu} is unknown"
    if host.gpu is None and not model.cpu:
        return "a CPU cannot be predicted from a GPU"
    if model.untold:
        return model.untold
    return (
        f"{model.name} does not record the throughput of {model.report.machine.device}; give its run, runs/…, whose "
        "training does"
    )


def roofline_slowdown(model: MeasuredModel, variant: VariantFigures, host: ServingInstance, rows: int) -> float | None:
    """Return the host's roofline time for ``rows`` rows relative to the measuring machine's; None if unknown.

    For a model measured on a CPU, only FLOPs are compared; memory bandwidth is ignored.
    """
    if model.cpu:
        own = model.core_peak and model.core_peak * model.report.machine.threads
    else:
        own = model.gpu.peak("fp32") if model.gpu else None
    if not own:
        return None
    if host.gpu is None:
        peak = cpu_peak(host.cpu) if model.cpu else None
        return own / (peak * model.report.machine.threads) if peak else None
    if model.flops is None or not variant.bytes:
        return None
    here = roof(rows * model.flops, variant.bytes, own, model.gpu)
    return roof(rows * model.flops, variant.bytes, host.gpu.peak("fp32"), host.gpu if model.gpu else None) / here


def roof(flops: float, moved: float, peak: float, gpu: GpuModel | None) -> float:
    """Return the roofline seconds: computing, and on a GPU reading the weights once."""
    return max(flops / peak, moved / gpu.bandwidth if gpu else 0.0)


def why_not(
    model: MeasuredModel, variants: Sequence[VariantFigures], found: Sequence[ServingInstance]
) -> Iterator[str]:
    """Yield one line per variant and reason for not planning it, with the instances' processors."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for variant in variants:
        for host in found:
            time = serving_time(model, variant, host)
            if isinstance(time, str):
                reasons.setdefault((time, variant.name), []).append(host.computes_on)
    for (reason, name), where in reasons.items():
        yield f"{name}: not planned on {', '.join(dict.fromkeys(where))}: {reason}"
