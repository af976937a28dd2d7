"""What may be tried, one coordinate after the other, and which of it can change numbers.

Never forced: LL128, which can corrupt data where it is not supported. Values that make the same buckets of a model as
an earlier one are left out, as they are the same setting.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slipstream.collectives.model.step_time import buckets_of
from slipstream.interconnect.tuning import DdpSettings, changes_numbers

BUCKETS_MB = (5, 10, 50, 100, 250)
#: Variables that are set together, and what else than their default is sane. NCCL and RCCL read them once.
NCCL: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("NCCL_ALGO",), ("Ring", "Tree", "NVLS")),
    (("NCCL_PROTO",), ("Simple", "LL")),
    (("NCCL_MIN_CTAS", "NCCL_MAX_CTAS"), ("4", "8", "16", "32")),
    (("NCCL_BUFFSIZE",), ("2097152", "8388608")),
    (("NCCL_NTHREADS",), ("256",)),
    (("NCCL_P2P_NET_CHUNKSIZE",), ("262144", "524288")),
    (("NCCL_IB_QPS_PER_CONNECTION",), ("2", "4", "8")),
)


@dataclass(frozen=True)
class TuningCandidate:
    """A value of one coordinate, to be tried on top of what is in use."""

    name: str
    #: Fields of :class:`~slipstream.interconnect.tuning.DdpSettings`.
    ddp: dict[str, Any] = field(default_factory=dict)
    #: Variables for fresh processes; empty for what a running process can change.
    environment: dict[str, str] = field(default_factory=dict)

    def may_change_numbers(self, world: int) -> bool:
        return any(changes_numbers(name, world) for name in (*self.ddp, *self.environment))

    def applied(self, to: DdpSettings) -> DdpSettings:
        return replace(to, **self.ddp)


def candidates(
    backend: str, gradients: Sequence[int], interfaces: Iterable[str], used: Container[str]
) -> tuple[TuningCandidate, ...]:
    """In the order in which they are tried: first what can gain most, before the time is over.

    ``gradients`` are the bytes of each, ``interfaces`` those that all hosts have, ``used`` those that gloo uses by
    itself.
    """
    found = [
        TuningCandidate("fp16 compression hook", {"hook": "fp16"}),
        *bucket_candidates(gradients),
        TuningCandidate("gradient_as_bucket_view", {"gradient_as_bucket_view": True}),
        TuningCandidate("static_graph", {"static_graph": True}),
    ]
    if backend == "gloo":
        others = [name for name in interfaces if name not in used]
        found += [TuningCandidate(f"GLOO_SOCKET_IFNAME={name}", {}, {"GLOO_SOCKET_IFNAME": name}) for name in others]
    if backend == "nccl":
        found += [nccl_candidate(names, value) for names, values in NCCL for value in values]
    return tuple(found)


def bucket_candidates(gradients: Sequence[int]) -> list[TuningCandidate]:
    known, found = [buckets_of(gradients)], []
    for megabytes in BUCKETS_MB:
        buckets = buckets_of(gradients, megabytes << 20, megabytes << 20)
        if buckets not in known:
            known.append(buckets)
            found.append(TuningCandidate(f"bucket_cap_mb={megabytes}", {"bucket_cap_mb": megabytes}))
    return found


def nccl_candidate(names: Sequence[str], value: str) -> TuningCandidate:
    return TuningCandidate(", ".join(f"{name}={value}" for name in names), {}, dict.fromkeys(names, value))
