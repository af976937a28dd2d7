"""Limits of the measurements: unsupported operations, single processes, memory.

Operations that a backend lacks are refused in advance: they may fail on some ranks only, give a wrong result, or break
the group. Tests compare :func:`unsupported_reason` with the installed torch.
"""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.operations.cases import (
    ALWAYS_IN_PLACE,
    IN_AND_OUT_OF_PLACE,
    REDUCING,
    OperationKind,
)
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.topology import gather_from_ranks
from slipstream.shared.machine.limits import MEMORY, memory_limit, memory_used, quantity_in_environment, read_or_empty


def unsupported_reason(backend: str, kind: OperationKind) -> str:
    """Return why the backend (as of torch 2.13) cannot run ``kind``; "" if it can."""
    if backend == "gloo" and kind.reduction == "avg" and kind.dtype.startswith("int"):
        return "gloo cannot average integers: it raises when waited for, and the next operation fails, too"
    return ""


def requested_kinds(config: CollectivesConfig) -> list[OperationKind]:
    """Return every requested combination of operation, data type and reduction.

    With ``collectives.in_place``, operations that work in and out of place appear twice.
    """
    found = []
    for operation in config.operations:
        reductions = config.reductions if operation in REDUCING else [""]
        dtypes: Sequence[str] = config.dtypes if operation != "barrier" else [""]
        places = [operation in ALWAYS_IN_PLACE]
        if config.in_place and operation in IN_AND_OUT_OF_PLACE:
            places = [False, True]
        found += [OperationKind(operation, d, r, place) for d in dtypes for r in reductions for place in places]
    return found


def select_kinds(config: CollectivesConfig, backend: str, world: int) -> tuple[list[OperationKind], list[str]]:
    """Return the kinds to measure, and a line about kinds that a single process skips.

    Raises ``UserError`` for kinds that the backend lacks.
    """
    asked = requested_kinds(config)
    for kind in asked:
        if why := unsupported_reason(backend, kind):
            raise UserError(f"collectives.reductions: {kind} cannot be measured: {why}; remove one of the two")
    if world > 1:
        return asked, []
    alone = [kind for kind in asked if kind.operation != "send_recv"]
    left_out = ["send_recv: a single process has no peer to send to"] if len(alone) < len(asked) else []
    return alone, left_out


def memory_needed(config: CollectivesConfig, asked: Iterable[OperationKind]) -> tuple[int, OperationKind]:
    """Return the bytes that a rank needs for the largest case, and that case's kind.

    Counted are the buffers of all operations in flight, and ``collectives.largest`` once more for the backend's copies.
    """
    in_flight = max(config.in_flight)

    def bytes_of(kind: OperationKind) -> int:
        buffers = 1 if kind.in_place else 2
        return config.largest * (buffers * in_flight + 1) if kind.dtype else 0

    return max(((bytes_of(kind), kind) for kind in asked), key=lambda found: found[0])


def refuse_too_large(
    config: CollectivesConfig, asked: Sequence[OperationKind], places: Mapping[int, tuple[str, int]]
) -> None:
    """Raise ``UserError`` unless the largest case fits into the free memory.

    ``places`` has for every rank the name of its memory (a GPU, or a host shared by its ranks) and the free bytes
    there.
    """
    needed, kind = memory_needed(config, asked)
    sharing: dict[str, list[int]] = defaultdict(list)
    for rank, (place, _) in places.items():
        sharing[place].append(rank)
    for place, ranks in sharing.items():
        free = min(places[rank][1] for rank in ranks)
        if needed * len(ranks) > free:
            fits = largest_that_fits(config.largest, needed, free // len(ranks))
            raise UserError(
                f"collectives.largest: {config.largest} bytes of {kind} need {needed >> 20} MiB on each of "
                f"{len(ranks)} ranks of {place}, where {free >> 20} MiB are free; at most {fits} would fit"
            )


def largest_that_fits(largest: int, needed: int, room: int) -> int:
    """Return the largest power of two bytes that fit into ``room``."""
    return 1 << max(6, int(largest * room / needed).bit_length() - 1)


def free_memory_by_rank(device: torch.device) -> dict[int, tuple[str, int]]:
    """Return the name of every rank's memory, and the free bytes there."""
    if device.type == "cuda":
        place = f"{torch.cuda.get_device_name(device)} of {socket.gethostname()}, {device}"
        return dict(enumerate(gather_from_ranks((place, torch.cuda.mem_get_info(device)[0]))))
    return dict(enumerate(gather_from_ranks(free_memory())))


def free_memory() -> tuple[str, int]:
    """Return the name of this host (or pod), and the bytes that its processes may still allocate."""
    available = next(
        (int(line.split()[1]) << 10 for line in read_meminfo() if line.startswith("MemAvailable:")), 1 << 62
    )
    if (limit := memory_limit()) is not None:
        available = min(available, max(0, int(limit) - memory_used()))
    # The placement's memory says nothing about a control group that holds more than the pod.
    if (given := quantity_in_environment(MEMORY)) is not None:
        available = min(available, int(given))
    return socket.gethostname(), available


def read_meminfo() -> list[str]:
    return read_or_empty(Path("/proc/meminfo")).splitlines()
