"""Communication between processes: collectives and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from slipstream.collectives.config import CollectivesConfig
from slipstream.collectives.launch.measurements import measure_group
from slipstream.collectives.launch.worker_group import WorkerGroup
from slipstream.collectives.other_benchmarks import compare_with_installed
from slipstream.interconnect.profile import merged
from tests.support.gpu_proof.check import Figure, NotHere, Place
from tests.support.layout_runs import Case, distance, divided

SMALL_SIZES = {"largest": 1 << 20, "launches": 1, "factor": 32, "budget": 0.01, "operations": ["all_reduce"]}
#: Between a GPU's and a CPU's kernels in float64.
TOLERANCE = 1e-9
CASES = {
    "weights": Case(2, {"shard": "weights"}),
    "optimizer": Case(2, {"shard": "optimizer"}),
    "tensor": Case(2, {"tensor": 2}),
    "1f1b": Case(2, {"pipeline": 2}),
    "weights x tensor": Case(4, {"shard": "weights", "tensor": 2}),
    "1f1b x weights": Case(4, {"pipeline": 2, "shard": "weights"}),
    "2 x 2 x 2": Case(8, {"pipeline": 2, "shard": "weights", "tensor": 2}),
}


def collectives(place: Place) -> Iterator[Figure]:
    """By a process for each device; of a single one collectives are copies."""
    config = CollectivesConfig(**(SMALL_SIZES if place.small else {"largest": 64 << 20, "launches": 2}))
    # What a machine of one GPU runs is rehearsed, too.
    for processes in (1, place.devices) if place.small else (place.devices,):
        group = WorkerGroup.local(processes, timeout=60)
        profile = merged([group.launch(measure_group, config) for _ in range(config.launches)])
        assert profile.measurements, "nothing was measured"
        yield Figure("backend", profile.fingerprint.backend)
        yield Figure("processes", float(processes))
        for operation in config.operations:
            if sizes := [each for each in profile.of(operation) if each.bytes]:
                yield Figure(f"{operation}, {sizes[-1].bytes >> 10} KiB", 1e6 * sizes[-1].p50, "µs")
                if processes > 1:
                    yield Figure(f"{operation}, bus bandwidth", sizes[-1].busbw(), "GB/s")
        for line in compare_with_installed(profile, config):
            yield Figure("comparison", line)


def layouts(place: Place) -> Sequence[Figure]:
    """Compare losses, gradients' norms and weights after a dozen steps with the CPU's, in float64."""
    cases = {name: case for name, case in CASES.items() if case.world <= place.devices}
    if place.small:
        cases = {name: replace(case, steps=4) for name, case in list(cases.items())[:1]}
    if not cases:
        raise NotHere("needs 2 GPUs")
    found = []
    for name, case in cases.items():
        case = replace(case, device=place.device.type)
        apart = distance(divided(case, place.directory / name.replace(" ", ""))[0], case)
        assert apart < TOLERANCE, f"{name}: losses, norms or weights are {apart:g} apart"
        found.append(Figure(f"{name}: apart by", apart))
    return found
