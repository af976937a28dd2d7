"""What to change in a training that does not fit, cheapest first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from slipstream.artifacts.prepared.data import TensorSpec
from slipstream.text_table import size
from slipstream.train.memory.choices import SHARDS, Job, Traced, trace_all

#: Of a device's memory what a step may take. The rest is for the driver's context, libraries and fragmentation: an
#: assumption, measured nowhere here.
USABLE = 0.9
REMEDIES = 3
#: How many times as many devices are tried.
MORE_DEVICES = (2, 4, 8)


def price(traced: Traced) -> tuple[int, int, int]:
    """In the order of what it costs: another forward pass; what is exchanged, which grows with the micro-batches if
    gradients or weights are sharded; and more and smaller micro-batches."""
    training = traced.job.training
    number, exchanges = training.micro_batches, {"none": 2, "optimizer": 2, "gradients": 2, "weights": 3}
    each = number if training.parallel.shard in ("gradients", "weights") else 1
    return int(training.recompute == "full"), exchanges[training.parallel.shard] * each, number


def cheapest(traced: Iterable[Traced], memory: float) -> list[Traced]:
    """Those that fit into so many bytes of a device: of each way to shard and recompute the fewest micro-batches that
    do, the cheapest first."""
    best: dict[tuple[str, str], Traced] = {}
    for one in traced:
        training = one.job.training
        key = (training.parallel.shard, training.recompute)
        if one.fits(USABLE * memory) and (
            key not in best or training.micro_batches < best[key].job.training.micro_batches
        ):
            best[key] = one
    return sorted(best.values(), key=price)


def remedies(job: Job, traced: Sequence[Traced], memory: float) -> list[str]:
    """At most three things to change, cheapest first: settings that fit, if any of ``traced`` does, else more devices,
    shorter rows and more memory."""
    fitting = cheapest(traced, memory)
    if fitting:
        return [f"{settings(job, one.job)} ({size(one.peak or 0)})" for one in fitting[:REMEDIES]]
    known = [one for one in traced if one.peak is not None]
    if not known:
        return []
    leanest = min(known, key=lambda one: one.peak or 0)
    return [*more_devices(leanest.job, memory), *shorter_rows(leanest.job, memory), more_memory(job, leanest)]


def settings(job: Job, other: Job) -> str:
    """The settings of ``other`` that ``job`` has not."""
    then, now = job.training, other.training
    changed = []
    if now.accumulation != then.accumulation:
        changed.append(f"training.accumulation {now.accumulation}")
    if now.parallel.shard != then.parallel.shard:
        changed.append(f"training.parallel.shard {now.parallel.shard}")
    if now.recompute != then.recompute:
        changed.append(f"training.recompute {now.recompute}")
    return ", ".join(changed) or "the settings as they are"


def more_devices(leanest: Job, memory: float) -> list[str]:
    """The fewest times as many devices on which the leanest layout fits, if any of those tried."""
    sharded = leanest.with_(shard=SHARDS[-1])
    for times in MORE_DEVICES:
        more = replace(sharded, devices=times * leanest.devices)
        number = min(more.training.micro_batches, more.share)
        (found,) = trace_all([more.with_(number=max(number, more.fewest))])
        if found.fits(USABLE * memory):
            return [f"{more.devices} devices with {settings(leanest, found.job)} ({size(found.peak or 0)} each)"]
    return []


def shorter_rows(leanest: Job, memory: float) -> list[str]:
    """Half as many tokens in a row, if that fits."""
    signature = leanest.signature
    if signature.task != "next token":
        return []
    (tokens,) = signature.inputs
    half = replace(signature, inputs=(TensorSpec(tokens.name, tokens.dtype, (tokens.shape[0] // 2,)),))
    (found,) = trace_all([replace(leanest, signature=half)])
    return [f"rows of {tokens.shape[0] // 2} tokens ({size(found.peak or 0)})"] if found.fits(USABLE * memory) else []


def more_memory(job: Job, leanest: Traced) -> str:
    needed = (leanest.peak or 0) / USABLE
    return f"devices of at least {size(needed)} with {settings(job, leanest.job)}"
