"""Network profiles of made-up times."""

import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np

from slipstream.pipeline.collectives.output import write_results
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import (
    Fingerprint,
    Host,
    Launch,
    Measurement,
    NetworkProfile,
    Overlap,
    Topology,
)

SIZES = tuple(1024 * 4**power for power in range(8))


def launch(median: float, iterations: int = 100, by_rank: Sequence[float] = ()) -> Launch:
    """Iterations that lie evenly around ``median`` seconds, from 0.8 to 1.2 times as long."""
    return Launch(tuple(float(median * share) for share in np.linspace(0.8, 1.2, iterations)), True, tuple(by_rank))


def measured(operation: str, size: int, world: int, medians: Sequence[float], **more: object) -> Measurement:
    reduction = "sum" if operation in ("all_reduce", "reduce_scatter", "reduce") else ""
    case = {"dtype": "float32", "reduction": reduction, "mode": "loop", "in_place": operation == "all_reduce", **more}
    launches = tuple(launch(median) for median in medians)
    return Measurement(operation=operation, bytes=size, world=world, launches=launches, **case)  # type: ignore[arg-type]


def network_profile(
    world: int = 2,
    operations: Sequence[str] = ("all_reduce", "all_gather", "broadcast"),
    measured_at: float = 1_790_000_000.0,
    pair_seconds: dict[tuple[int, int], float] | None = None,
) -> NetworkProfile:
    """Three launches. ``pair_seconds`` are those of pairs that are not like the others (2 ms)."""
    measurements = tuple(
        measured(operation, size, world, [seconds * (1 + 0.01 * turn) for turn in (-1, 0, 1)])
        for index, operation in enumerate(operations)
        for size in SIZES
        for seconds in [300e-6 / (1 + 0.25 * index) + size / (1.2e9 + 4e8 * index)]
    )
    pairs = tuple(
        measured("send_recv", 1 << 20, 2, [(pair_seconds or {}).get(pair, 0.002)] * 3, ranks=pair)
        for pair in combinations(range(world), 2)
    )
    device = "Example CPU 8000"
    return NetworkProfile(
        fingerprint=Fingerprint(
            world=world,
            nodes=1,
            backend="gloo",
            devices=(f"{device}, 2 cores",) * world,
            interfaces=("eth0: 10000 Mbit/s, MTU 1500",),
            driver="Linux 6.1",
            libraries={"torch": "2.13.0"},
        ),
        measured_at=measured_at,
        measurements=measurements,
        topology=Topology(
            (Host(tuple(range(world)), device, 2, 1, (device,) * world, (), ("eth0: 10000 Mbit/s, MTU 1500",)),),
            tuple(f"eth0 (10.0.0.{7 + rank})" for rank in range(world)),
        ),
        pairs=pairs,
        overlaps=(Overlap("all_reduce", "float32", 1 << 20, world, ((2.0, 2.0, 2.2),)),) if world > 1 else (),
        products=((0.01,) * world,) * 3,
        settings={"largest": SIZES[-1]},
    )


def publish(root: Path | str, profile: NetworkProfile) -> str:
    """Put a profile into the history at ``root`` as the benchmark does; returns its address."""
    history = ProfileHistory(str(root), profile.fingerprint)
    with tempfile.TemporaryDirectory() as scratch:
        write_results(Path(scratch) / "profile", profile, history.course(), {})
        return history.add(Path(scratch) / "profile", profile.measured_at)
