"""What-if analysis of training bottlenecks.

A cause's share is the fraction of time that training would save without it (Lin et al., "Understanding Stragglers in
Large Model Training Using What-if Analysis", OSDI 2025). A step takes the slowest rank's local work plus the gradient
exchange of the rank that waited least for others. Durations are measured on one rank's clock; clocks are not compared.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.shared.artifacts.results.devices import (
    CAUSES,
    CHECKPOINT,
    COMMUNICATION,
    CONTENDED,
    DATA,
    EVALUATION,
    LATE_PODS,
    LAUNCH,
    STRAGGLER,
    THROTTLED,
    AttemptLosses,
    Bottleneck,
)
from slipstream.shared.telemetry.records import COMPUTE, EXCHANGE, OPTIMIZER, PHASES, REST
from slipstream.shared.telemetry.records import DATA as DATA_PHASE
from slipstream.shared.telemetry.step_blocks import LOADER, PER_EXCHANGE, PER_STEP, StepBlock, StepBlocks

#: Minimum fractions of the training's time: of the diagnosed cause, and of other causes that are reported.
DECISIVE, WORTH_A_LOOK = 0.2, 0.1
#: A rank is a straggler only if the lower 95 % limit of its extra time exceeds this fraction of a step; ``LIMIT`` is
#: the normal quantile.
SIGNIFICANT, LIMIT = 0.05, 1.645
#: Minimum number of blocks for a confidence limit.
LEAST_BLOCKS = 4
#: Fraction of periods that a CPU quota must throttle to count as a cause.
THROTTLED_PERIODS = 0.25
#: Bytes of gradients below which compression saves nothing, as their exchange takes the network's latency.
SMALL_GRADIENTS = 10_000_000

REMEDIES = {
    DATA: {
        "store": "room for the data on the node's disk (the profile's data_cache_gib)",
        "verification": "more cpu for each process (the profile's cpu)",
        "gathering": "more cpu for each process (the profile's cpu), or fewer and wider rows",
        "copy": "a larger training.batch_size, or fewer columns",
        "augmentation": "more cpu for each process (the profile's cpu), or fewer transforms in training.augment",
    },
    COMMUNICATION: "training.gradients.hook fp16 or powersgd, a larger training.batch_size, or the settings "
    "that slipstream collectives tune finds",
    STRAGGLER: "another machine: slipstream doctor --node shows the differences",
    LAUNCH: "a larger training.batch_size, or training.compile",
    THROTTLED: {
        "periods": "a larger cpu in the profile",
        "clocked down": "another machine, or better cooling and power for this one",
    },
    CHECKPOINT: "a longer training.checkpoint_interval, or one by mean_time_between_failures",
    EVALUATION: "a larger training.evaluate_every",
    LATE_PODS: "a scheduler that starts all pods of a job or none",
}


@dataclass(frozen=True)
class AttemptMeasurements:
    """Measurements of one attempt beyond its step times."""

    #: Seconds of evaluations, of steps blocked by checkpoints, and of rank 0's pod waiting for other pods.
    evaluation: float = 0.0
    checkpoint: float = 0.0
    late_pods: float = 0.0
    #: Seconds of a forward and backward pass that do not depend on its rows (processor time on a CPU); 0 if unknown.
    overhead: float = 0.0
    #: Micro-batches per step.
    pieces: int = 1
    #: True if passes are timed in processor time, since wall-clock time on a CPU includes other processes.
    on_cpu: bool = True
    #: Bytes of gradients that each rank exchanges.
    exchanged_bytes: int = 0
    divided: bool = False
    #: Threads of all ranks of a pod, which a quota throttles together.
    threads: int = 1


def measure_losses(blocks: StepBlocks, around: AttemptMeasurements) -> AttemptLosses | None:
    """Return the seconds lost to every cause in one attempt, with evidence; None if it finished no step."""
    total = blocks.total
    if total is None:
        return None
    columns = {name: total.sums[:, number] for number, name in enumerate(PER_STEP)}
    phases = {name: float(columns[name].mean()) for name in PHASES if name in columns}
    steps_s = sum(phases.values())
    lost = {
        DATA: total.slowest - total.slowest_without_data,
        EVALUATION: around.evaluation,
        CHECKPOINT: around.checkpoint,
        LATE_PODS: around.late_pods,
    }
    step_ms = 1e3 * steps_s / total.steps
    waited = columns[DATA_PHASE]
    longest = 1e3 * float(waited.max()) / total.steps
    evidence = {
        DATA: f"{who_waits(waited)} waited {longest:.3g} of {step_ms:.3g} ms a step for its batch, the loader spent "
        f"most time on {largest_of_loader(blocks.beside[int(waited.argmax())])}",
        EVALUATION: f"{around.evaluation:.3g} s of evaluations",
        CHECKPOINT: f"checkpoints stopped the steps for {around.checkpoint:.3g} s",
        LATE_PODS: f"the pod of rank 0 waited {around.late_pods:.3g} s for the others",
    }
    least = total.least_exchange
    if len(columns[EXCHANGE]) > 1:
        each = f" for {around.exchanged_bytes / 1e6:.3g} MB of gradients" if around.exchanged_bytes else ""
        lost[COMMUNICATION] = least
        evidence[COMMUNICATION] = (
            f"after the last gradient every rank waits at least {1e3 * least / total.steps:.3g} of {step_ms:.3g} ms a "
            f"step for the all_reduce{each}"
        )
    if not around.divided:
        lost[STRAGGLER], evidence[STRAGGLER] = straggler_loss(blocks.blocks, steps_s / total.steps)
    lost[LAUNCH], evidence[LAUNCH] = launch_overhead(total, columns, around)
    lost[THROTTLED], evidence[THROTTLED] = throttling_loss(blocks.beside, columns["processor_wait"], around.threads)
    whole = steps_s + around.evaluation + around.checkpoint
    most = dict.fromkeys(lost, whole) | {LATE_PODS: around.late_pods}
    return AttemptLosses(
        seconds=whole,
        steps=total.steps,
        phases=phases,
        lost={cause: max(0.0, min(seconds, most[cause])) for cause, seconds in lost.items()},
        evidence=evidence,
        waited_for_processor=float((columns["processor_wait"] / max(steps_s, 1e-12)).max()),
        exchanged_bytes=around.exchanged_bytes if len(columns[EXCHANGE]) > 1 else 0,
        least_exchange_s=total.least_exchange / total.steps,
        divided=around.divided,
    )


def who_waits(waited: np.ndarray) -> str:
    """Name the ranks that waited at least half as long as the longest-waiting rank."""
    ranks = np.flatnonzero(waited >= waited.max() / 2)
    if len(ranks) == len(waited):
        return "every rank" if len(waited) > 1 else "the process"
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:8]))}"


def largest_of_loader(beside: np.ndarray) -> str:
    """Return the data loader activity that took longest."""
    seconds = dict(zip(PER_EXCHANGE, beside.tolist(), strict=True))
    return max(LOADER, key=lambda name: seconds[name])


def straggler_loss(blocks: Sequence[StepBlock], step_s: float) -> tuple[float, str]:
    """Return the seconds that the slowest rank delayed the others, and a sentence about it.

    A rank's extra time is its own work less the median of the others, without waits for data or a processor. The result
    is (0, "") unless it is significant; blocks are assumed independent. The first block, with cold caches, is skipped.
    """
    counted = blocks[1:]
    if len(counted) < LEAST_BLOCKS or len(counted[0].sums) < 2:
        return 0.0, ""
    numbers = {name: number for number, name in enumerate(PER_STEP)}
    works = [numbers[name] for name in (COMPUTE, OPTIMIZER, REST)]
    # Seconds of a rank's own work per step; [blocks, ranks].
    own = np.stack([(b.sums[:, works].sum(axis=1) - b.sums[:, numbers["processor_wait"]]) / b.steps for b in counted])
    ranks = own.shape[1]
    longer = np.stack([own[:, r] - np.median(np.delete(own, r, axis=1), axis=1) for r in range(ranks)], axis=1)
    slowest = int(longer.mean(axis=0).argmax())
    mean = float(longer[:, slowest].mean())
    error = float(longer[:, slowest].std(ddof=1)) / math.sqrt(len(counted))
    if mean - LIMIT * error <= SIGNIFICANT * step_s:
        return 0.0, ""
    steps = sum(b.steps for b in blocks)
    return mean * steps, f"rank {slowest} works {1e3 * mean:.3g} ms longer on each step than the others"


def launch_overhead(
    total: StepBlock, columns: Mapping[str, np.ndarray], around: AttemptMeasurements
) -> tuple[float, str]:
    """Return the seconds of passes that do not depend on their rows, and a sentence about them.

    The host spends this time on launching kernels.
    """
    passes = total.steps * around.pieces
    each = float(columns["compute_cpu" if around.on_cpu else COMPUTE][0]) / passes
    if not around.overhead or not each:
        return 0.0, ""
    share = min(1.0, around.overhead / each)
    return (
        float(statistics.median(columns[COMPUTE])) * share,
        f"of the {1e3 * each:.3g} ms of a pass over a micro-batch, {1e3 * share * each:.3g} do not depend on its rows",
    )


def throttling_loss(beside: np.ndarray, waited: np.ndarray, threads: int) -> tuple[float, str]:
    """Return the seconds lost to the pod's CPU quota or lower GPU clocks, and a sentence about them.

    The kernel counts throttled seconds per thread, and since Linux 6.18 misses some. ``waited``, the ranks' time ready
    to run without a processor, includes all of them, but also the time that other processes took.
    """
    numbers = {name: number for number, name in enumerate(PER_EXCHANGE)}
    periods = beside[:, numbers["periods"]]
    stopped = np.divide(beside[:, numbers["throttled_periods"]], periods, out=np.zeros_like(periods), where=periods > 0)
    clocked_down = float(beside[:, numbers["clocked_down"]].max())
    rank = int(stopped.argmax())
    if stopped[rank] < THROTTLED_PERIODS or clocked_down > float(waited.min()):
        return clocked_down, f"heat or power limits cost {clocked_down:.3g} s, in which its GPUs were clocked down"
    counted = float(beside[rank, numbers["throttled_seconds"]]) / max(1, threads)
    return max(
        counted, float(waited.min())
    ), f"the CPU quota throttled the pod in {100 * stopped[rank]:.0f} % of its periods"


def diagnose_training(attempts: Sequence[AttemptLosses]) -> Bottleneck | None:
    """Return the diagnosis over all attempts of a training; None if no attempt finished a step."""
    seconds = sum(each.seconds for each in attempts)
    if not attempts or seconds <= 0:
        return None
    lost = {cause: sum(each.lost.get(cause, 0.0) for each in attempts) for cause in CAUSES}
    # The training does not run while pods are missing, so its own seconds exclude that time.
    whole = {cause: seconds + (lost[cause] if cause == LATE_PODS else 0.0) for cause in CAUSES}
    shares = {cause: lost[cause] / whole[cause] for cause in CAUSES if lost[cause] > 0}
    longest = max(attempts, key=lambda each: each.seconds)
    phases = {name: sum(each.phases.get(name, 0.0) for each in attempts) for name in longest.phases}
    verdict, also = decisive_causes(shares)
    steps = sum(each.steps for each in attempts)
    gain = 1 / (1 - min(shares[verdict], 0.99)) if verdict else 1.0
    waited = max(each.waited_for_processor for each in attempts)
    if verdict:
        its = max(attempts, key=lambda each: each.lost.get(verdict, 0.0))
        sentence = describe_cause(verdict, shares[verdict], gain, its)
    elif waited >= DECISIVE:
        verdict = CONTENDED
        sentence = (
            f"CPU contention: a rank waited {100 * waited:.0f} % of its step time for a core that other processes "
            "used; use a dedicated machine, or fewer processes than cores"
        )
    else:
        sentence = "no bottleneck: no cause took a fifth of the training's time"
    if also:
        sentence += f"; next {', '.join(f'{cause} ({100 * shares[cause]:.0f} %)' for cause in also)}"
    kept = phases.get(COMPUTE, 0.0) - lost[LAUNCH] - shares.get(THROTTLED, 0.0) * phases.get(COMPUTE, 0.0)
    return Bottleneck(
        verdict=verdict,
        sentence=sentence,
        shares=shares,
        useful=max(0.0, min(1.0, kept / seconds)),
        gain=gain,
        also=also,
        seconds=seconds,
        steps=steps,
        phases=phases,
        exchanged_bytes=longest.exchanged_bytes,
        least_exchange_s=longest.least_exchange_s,
    )


def decisive_causes(shares: Mapping[str, float]) -> tuple[str, list[str]]:
    """Return the diagnosed cause ("" if no share is decisive) and other notable causes, largest first."""
    ordered = sorted(shares, key=lambda cause: -shares[cause])
    verdict = ordered[0] if ordered and shares[ordered[0]] >= DECISIVE else ""
    return verdict, [cause for cause in ordered if cause != verdict and shares[cause] >= WORTH_A_LOOK]


def describe_cause(cause: str, share: float, gain: float, its: AttemptLosses) -> str:
    remedy = REMEDIES[cause]
    if cause == COMMUNICATION and 0 < its.exchanged_bytes < SMALL_GRADIENTS:
        remedy = "a larger training.batch_size, or fewer processes"
    if isinstance(remedy, dict):
        remedy = next(what for part, what in remedy.items() if its.evidence[cause].endswith(part))
    beside = ""
    if its.divided and cause == COMMUNICATION:
        beside = ", slow ranks included, as the model is divided"
    return (
        f"{cause}: {100 * share:.0f} % of the training's time ({its.evidence[cause]}{beside}); without it training "
        f"would be {gain:.2f} times as fast; try {remedy}"
    )
