"""Remedies for a training that does not fit, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from slipstream.pipeline.train.memory.choices import SHARDS, TracedJob, TraceJob, trace_all
from slipstream.shared.artifacts.prepared.data import TensorSpec
from slipstream.shared.text_table import size_text

#: Fraction of a device's memory that a step may take. The remainder is for the driver's context, libraries and
#: fragmentation: an assumption, not measured here.
USABLE = 0.9
REMEDIES = 3
#: Factors by which to increase the number of devices.
MORE_DEVICES = (2, 4, 8)


def time_cost_key(traced: TracedJob) -> tuple[int, int, int]:
    """Return a sort key for the time that a layout costs.

    First comes recomputation, an additional forward pass. Then comes traffic, which grows with the micro-batches if
    gradients or weights are sharded; then the micro-batch count.
    """
    training = traced.job.training
    number, exchanges = training.micro_batches, {"none": 2, "optimizer": 2, "gradients": 2, "weights": 3}
    each = number if training.parallel.shard in ("gradients", "weights") else 1
    return int(training.recompute == "full"), exchanges[training.parallel.shard] * each, number


def cheapest_fitting(traced: Iterable[TracedJob], memory: float) -> list[TracedJob]:
    """Return the layouts that fit on a device of ``memory`` bytes, cheapest first.

    Every combination of sharding and recomputation appears once, with its fewest micro-batches.
    """
    best: dict[tuple[str, str], TracedJob] = {}
    for one in traced:
        training = one.job.training
        key = (training.parallel.shard, training.recompute)
        if one.fits(USABLE * memory) and (
            key not in best or training.micro_batches < best[key].job.training.micro_batches
        ):
            best[key] = one
    return sorted(best.values(), key=time_cost_key)


def find_remedies(job: TraceJob, traced: Sequence[TracedJob], memory: float) -> list[str]:
    """Return at most three remedies, cheapest first.

    They are settings from ``traced`` that fit; if none does, more devices, shorter rows and more memory.
    """
    fitting = cheapest_fitting(traced, memory)
    if fitting:
        return [f"{changed_settings(job, one.job)} ({size_text(one.peak or 0)})" for one in fitting[:REMEDIES]]
    known = [one for one in traced if one.peak is not None]
    if not known:
        return []
    leanest = min(known, key=lambda one: one.peak or 0)
    return [*more_devices(leanest.job, memory), *shorter_rows(leanest.job, memory), more_memory(job, leanest)]


def changed_settings(job: TraceJob, other: TraceJob) -> str:
    """Return the settings of ``other`` that differ from those of ``job``, as text."""
    then, now = job.training, other.training
    changed = []
    if now.accumulation != then.accumulation:
        changed.append(f"training.accumulation {now.accumulation}")
    if now.parallel.shard != then.parallel.shard:
        changed.append(f"training.parallel.shard {now.parallel.shard}")
    if now.recompute != then.recompute:
        changed.append(f"training.recompute {now.recompute}")
    return ", ".join(changed) or "the current settings"


def more_devices(leanest: TraceJob, memory: float) -> list[str]:
    """Return the smallest number of devices on which the fully sharded ``leanest`` layout fits; [] if none."""
    sharded = leanest.with_(shard=SHARDS[-1])
    for times in MORE_DEVICES:
        more = replace(sharded, devices=times * leanest.devices)
        number = min(more.training.micro_batches, more.share)
        (found,) = trace_all([more.with_(number=max(number, more.fewest))])
        if found.fits(USABLE * memory):
            return [
                f"{more.devices} devices with {changed_settings(leanest, found.job)} ({size_text(found.peak or 0)} "
                "each)"
            ]
    return []


def shorter_rows(leanest: TraceJob, memory: float) -> list[str]:
    """Return the remedy of half as many tokens per row; empty if the step still does not fit."""
    signature = leanest.signature
    if signature.task != "next token":
        return []
    (tokens,) = signature.inputs
    half = replace(signature, inputs=(TensorSpec(tokens.name, tokens.dtype, (tokens.shape[0] // 2,)),))
    (found,) = trace_all([replace(leanest, signature=half)])
    return (
        [f"rows of {tokens.shape[0] // 2} tokens ({size_text(found.peak or 0)})"] if found.fits(USABLE * memory) else []
    )


def more_memory(job: TraceJob, leanest: TracedJob) -> str:
    needed = (leanest.peak or 0) / USABLE
    return f"devices of at least {size_text(needed)} with {changed_settings(job, leanest.job)}"
