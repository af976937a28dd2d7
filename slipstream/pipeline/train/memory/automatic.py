"""Micro-batch count for ``training.accumulation: auto``, from memory traces of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from slipstream.pipeline.train.data_loader import stored_blocks
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.step import micro_batches, padded_rows
from slipstream.pipeline.train.memory.choices import (
    USABLE,
    TracedJob,
    TraceJob,
    find_remedies,
    layout_choices,
    trace_all,
    with_precision,
)
from slipstream.pipeline.train.memory.processes import TraceFailure
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.layout import count_nodes
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import size_text
from slipstream.shared.models.base.shape import shaped_for


def job_of(request: TrainingRequest, precision: str, processes: int, device: str) -> TraceJob:
    """Return the job to trace for a training.

    Raises ``UserError`` for a training with a teacher, which cannot be traced.
    """
    if request.start or request.teacher:
        raise UserError(
            "training.accumulation: auto is not possible if a model is compressed, as the trace has no teacher; "
            "expected a number"
        )
    data, training = open_prepared(request.prepared), with_precision(request.training, precision)
    largest = GlobalOrder(stored_blocks(data, "train"), training.rows_per_step, training.seed).largest
    model = shaped_for(request.model, data.signature, request.origin)
    asked = replace(training, batch_size=largest)
    return TraceJob(model, data.signature, asked, processes, count_nodes(processes), device)


def found_by_trace(request: TrainingRequest, precision: str, processes: int, memory: int, device: str) -> TracedJob:
    """Return the trace of a training with the fewest micro-batches that fit into ``memory`` bytes.

    Raises like :func:`fewest_that_fit`.
    """
    return fewest_that_fit(job_of(request, precision, processes, device), memory)


def fewest_that_fit(job: TraceJob, memory: float) -> TracedJob:
    """Return the trace with the fewest micro-batches that fit on a device of ``memory`` bytes.

    Raises ``UserError`` with remedies if no number fits, or if the step cannot be traced.
    """
    numbers = legal_numbers(job.share, job.training.parallel)

    def traced(number: int) -> TracedJob:
        (one,) = trace_all([job.with_(number=number)])
        if isinstance(one.found, TraceFailure):
            reason = one.found.reason
            raise UserError(
                f"training.accumulation: auto is not possible, as the step cannot be traced ({reason}); expected a "
                "number"
            )
        return one

    first = traced(numbers[0])
    if first.fits(USABLE * memory):
        return first
    best = traced(numbers[-1])
    if not best.fits(USABLE * memory):
        raise UserError(memory_refusal(best, memory))
    low, high = 0, len(numbers) - 1  # numbers[low] does not fit, numbers[high] does
    while high - low > 1:
        middle = (low + high) // 2
        one = traced(numbers[middle])
        low, high, best = (low, middle, one) if one.fits(USABLE * memory) else (middle, high, best)
    return best


def suggest_remedies(request: TrainingRequest, precision: str, processes: int, memory: float, device: str) -> str:
    """Return remedies for a training that ran out of memory, as the end of a line.

    All take less memory than the traced step of the training, even if that step should fit. Raises ``UserError`` if the
    step cannot be traced.
    """
    (now,) = trace_all([job_of(request, precision, processes, device)])
    if isinstance(now.found, TraceFailure):
        raise UserError(now.found.reason)
    peak, held = now.peak or 0, ""
    if now.fits(USABLE * memory):
        held = (
            f"by its trace a step takes {size_text(peak)} of a device's {size_text(memory)}, so other processes hold "
            "the rest; "
        )
    return held + cheapest_first(now.job, min(memory, peak))


def memory_refusal(leanest: TracedJob, memory: float) -> str:
    """Return an error message with the memory needed and the cheapest remedies."""
    number = leanest.job.training.micro_batches
    peak = size_text(leanest.peak or 0)
    return (
        f"training.accumulation: no number of micro-batches fits: with {number} a step takes {peak}, "
        f"and {size_text(USABLE * memory)} of a device's {size_text(memory)} may be used; "
        f"{cheapest_first(leanest.job, memory)}"
    )


def cheapest_first(job: TraceJob, memory: float) -> str:
    """Return the remedies for a job that exceeds ``memory`` bytes per device, as the end of a line."""
    others: dict[tuple[str, str], TraceJob] = {}
    for one in layout_choices(job):
        if isinstance(one, TraceJob):  # the last per shard and recompute has the most micro-batches
            others[one.training.parallel.shard, one.training.recompute] = one
    found = find_remedies(job, trace_all(list(others.values())), memory)
    if not found:
        return "no other layout can be traced; expected more processes, or devices with more memory"
    return f"cheapest first: {'; '.join(f'{place}) {remedy}' for place, remedy in enumerate(found, start=1))}"


def legal_numbers(share: int, parallel: ParallelConfig, least_rows: int = 1) -> list[int]:
    """Return the possible counts for a batch of ``share`` rows, one per micro-batch size.

    Every micro-batch has at least ``least_rows`` rows. Counts start from the smallest that the layout allows, and are
    multiples of the pipeline's size.
    """
    rounds = parallel.pipeline
    fewest = rounds * parallel.stages_per_rank
    most = max(share // least_rows, fewest)
    numbers, rows = list[int](), 0
    for number in range(fewest, most + 1, rounds):
        each = -(-share // number)
        pieces = len(micro_batches(padded_rows(share, number), number))
        # There may be fewer slices than requested, and an interleaved schedule takes whole rounds only.
        whole = pieces >= fewest and (parallel.schedule != "interleaved" or pieces % rounds == 0)
        if each != rows and whole:
            numbers.append(number)
            rows = each
    return numbers or [fewest]


def at_least_doubled(number: int, legal: Sequence[int]) -> int:
    """Return the first of the sorted ``legal`` counts that is at least twice ``number``.

    Without such a count, returns the largest if it exceeds ``number``, else 0.
    """
    more = [other for other in legal if other > number]
    return next((other for other in more if other >= 2 * number), more[-1] if more else 0)
