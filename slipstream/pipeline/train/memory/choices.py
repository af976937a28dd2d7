"""Search space for layouts that fit: sharding, recomputation and micro-batch count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import BUFFERS
from slipstream.pipeline.train.loop.step import padded_rows
from slipstream.pipeline.train.memory.processes import TraceFailure, largest_footprints
from slipstream.pipeline.train.memory.trace import Footprint, TracedStep
from slipstream.pipeline.train.parallel.config import Shard
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import size_text
from slipstream.shared.models.config import ModelConfig

Recompute = Literal["none", "full"]
SHARDS: tuple[Shard, ...] = get_args(Shard)
#: How many micro-batch counts to try per layout, and the largest count for a pipeline, whose micro-batches are all
#: traced.
NUMBERS, MOST_IN_PIPELINE = 3, 1024


def with_precision(training: TrainingConfig, precision: str) -> TrainingConfig:
    """Return ``training`` with the resolved ``precision``."""
    return replace(training, precision=precision)  # type: ignore[arg-type]  # checked where it is set


@dataclass(frozen=True)
class TraceJob:
    """Training to trace, with resolved ``precision``, on a number of devices of type ``device``."""

    model: ModelConfig
    signature: Signature
    training: TrainingConfig
    devices: int
    nodes: int = 1
    device: str = "cuda"

    @property
    def share(self) -> int:
        """Maximum number of rows per process and step."""
        _, replicas, shards, _ = self.training.parallel.sizes(self.devices, self.nodes)
        return -(-self.training.rows_per_step // (replicas * shards))

    @property
    def fewest(self) -> int:
        """Smallest micro-batch count that the layout allows."""
        parallel = self.training.parallel
        return parallel.pipeline * parallel.stages_per_rank

    @property
    def step(self) -> TracedStep:
        """Step of this job on rank 0; the micro-batch count must not be "auto"."""
        number = self.training.micro_batches
        share = padded_rows(self.share, number)
        rows = -(-share // number)  # as in `micro_batches`, whose list may be too long
        plain = replace(self.training, compile=False)
        return TracedStep(
            self.model,
            self.signature,
            plain,
            -(-share // rows),
            rows,
            self.devices,
            self.nodes,
            device=self.device,
        )

    def with_(
        self, *, shard: Shard | None = None, recompute: Recompute | None = None, number: int | None = None
    ) -> TraceJob:
        """Return a copy with other settings; None keeps a setting.

        Raises ``UserError`` if settings conflict.
        """
        training = self.training
        if shard is not None and shard != training.parallel.shard:
            parallel = training.parallel
            if shard == "none":
                parallel = replace(parallel, replicas=0, offload=False, shard="none")
            training = replace(training, parallel=replace(parallel, shard=shard))
        if recompute is not None:
            training = replace(training, recompute=recompute)
        if number is not None:
            training = replace(training, accumulation=number)
        return replace(self, training=training)


@dataclass(frozen=True)
class TracedJob:
    """Job with the memory footprint of its largest process, or the reason why it could not be traced."""

    job: TraceJob
    found: Footprint | TraceFailure

    @property
    def peak(self) -> int | None:
        """Peak bytes of the largest process, including prefetched batches; None if untraced."""
        if isinstance(self.found, TraceFailure):
            return None
        step = self.job.step
        return self.found.peak + (BUFFERS - 1) * step.micro_batches * step.rows * step.signature.record.itemsize

    def fits(self, memory: float) -> bool:
        return self.peak is not None and self.peak <= memory


def trace_all(jobs: Sequence[TraceJob]) -> list[TracedJob]:
    return [
        TracedJob(job, found) for job, found in zip(jobs, largest_footprints([job.step for job in jobs]), strict=True)
    ]


def numbers_to_try(job: TraceJob) -> list[int]:
    """Return micro-batch counts, from the smallest that the layout allows to one row per micro-batch."""
    doubled = [job.fewest]
    rounds = job.training.parallel.pipeline
    most = job.share if rounds == 1 else min(job.share, MOST_IN_PIPELINE)
    while doubled[-1] * 2 < most:
        doubled.append(doubled[-1] * 2)
    doubled.append(max(most // rounds * rounds, job.fewest))
    places = {round(place * (len(doubled) - 1) / (NUMBERS - 1)) for place in range(NUMBERS)}
    asked = {job.training.accumulation} if isinstance(job.training.accumulation, int) else set[int]()
    return sorted({doubled[place] for place in places} | {number for number in asked if number <= job.share})


def layout_choices(job: TraceJob) -> Iterator[TraceJob | str]:
    """Yield the job with every sharding, recomputation and micro-batch count.

    Yields a message for a sharding that cannot be traced.
    """
    for shard in SHARDS if job.devices > 1 else (job.training.parallel.shard,):
        try:
            sharded = job.with_(shard=shard)
            numbers = numbers_to_try(sharded)
        except UserError as error:
            yield f"shard {shard} was not traced: {error.message}"
            continue
        for recompute in get_args(Recompute):
            for number in numbers:
                yield sharded.with_(recompute=recompute, number=number)


#: Fraction of a device's memory that a step may take. The remainder is for the driver's context, libraries and
#: fragmentation: an assumption, not measured here.
USABLE = 0.9
REMEDIES = 3
#: Factors by which to increase the number of devices.
MORE_DEVICES = (2, 4, 8)


def time_cost_key(traced: TracedJob) -> tuple[int, int, int]:
    """Return a sort key for the time that a layout costs.

    First comes recomputation, an additional forward pass; then traffic, which grows with the micro-batches if gradients
    or weights are sharded; then their count.
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
