"""Tracing of steps in child processes.

Every trace has its own process, which simulates a process group and fills torch's caches. Results travel as pickles,
only between a process and its own children.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from slipstream.pipeline.train.memory.trace import Footprint, TracedStep, trace_footprint
from slipstream.shared.distributed import fork_server
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.one_line import one_line

ENGINE = "slipstream.pipeline.train.memory.trace"


@dataclass(frozen=True)
class TraceFailure:
    """One-line reason why a step could not be traced."""

    reason: str


def trace_footprints(steps: Sequence[TracedStep]) -> list[Footprint | TraceFailure]:
    """Return the memory footprint of every step, or why it could not be traced.

    Runs as many processes at once as there are cores.
    """
    fork_server.start_fork_server((ENGINE,))
    found: list[Footprint | TraceFailure] = [TraceFailure("its process ended before it was traced")] * len(steps)
    waiting, running = list(enumerate(steps)), dict[Connection, tuple[int, BaseProcess]]()
    while waiting or running:
        while waiting and len(running) < usable_cores():
            number, step = waiting.pop(0)
            ours, theirs = fork_server.CONTEXT.Pipe(duplex=False)
            running[ours] = number, fork_server.start_process(trace_into, (theirs, step))
            theirs.close()
        ready = wait(list(running))
        for ours in [connection for connection in running if connection in ready]:
            number, process = running.pop(ours)
            with suppress(EOFError):  # killed, for lack of memory or by a user
                found[number] = ours.recv()
            process.join()
            ours.close()
    return found


def trace_into(connection: Connection, step: TracedStep) -> None:
    """Trace the step, in a child process, and send the result through ``connection``."""
    import torch

    torch.set_num_threads(1)
    found: Footprint | TraceFailure
    try:
        found = trace_footprint(step)
    except UserError as error:
        found = TraceFailure(error.message)
    except Exception as error:
        found = TraceFailure(one_line(f"{type(error).__name__}: {error}"))
    connection.send(found)


def largest_footprints(steps: Sequence[TracedStep]) -> list[Footprint | TraceFailure]:
    """Return, for every step, the footprint of the rank with the highest peak.

    ``steps`` describe rank 0; other ranks of a pipeline may need more memory.
    """
    ranks = [(n, rank) for n, step in enumerate(steps) for rank in ranks_to_trace(step)]
    each = trace_footprints([steps[number].of_rank(rank) for number, rank in ranks])
    found: list[Footprint | TraceFailure | None] = [None] * len(steps)
    for (number, _), one in zip(ranks, each, strict=True):
        best = found[number]
        if best is None or isinstance(one, TraceFailure) or (isinstance(best, Footprint) and one.peak > best.peak):
            found[number] = best if isinstance(best, TraceFailure) else one
    return [one for one in found if one is not None]


def ranks_to_trace(step: TracedStep) -> range:
    """Return the first rank of every pipeline position; other ranks of a position need no more memory."""
    return range(0, step.world, step.world // step.training.parallel.pipeline)
