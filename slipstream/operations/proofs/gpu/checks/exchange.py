"""Communication between processes: collectives and layouts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch.distributed as dist

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.layouts import PATIENCE_S, LayoutCase, distance, train_divided
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.measurements import measure_group
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.other_benchmarks import compare_with_installed
from slipstream.shared.interconnect.profile import merge_profiles

SMALL_SIZES = {"largest": 1 << 20, "launches": 1, "factor": 32, "budget": 0.01, "operations": ["all_reduce"]}
#: Maximum difference between a GPU's and a CPU's kernels in float64.
TOLERANCE = 1e-9
CASES = {
    "weights": LayoutCase(2, {"shard": "weights"}),
    "optimizer": LayoutCase(2, {"shard": "optimizer"}),
    "tensor": LayoutCase(2, {"tensor": 2}),
    "1f1b": LayoutCase(2, {"pipeline": 2}),
    "weights x tensor": LayoutCase(4, {"shard": "weights", "tensor": 2}),
    "1f1b x weights": LayoutCase(4, {"pipeline": 2, "shard": "weights"}),
    "2 x 2 x 2": LayoutCase(8, {"pipeline": 2, "shard": "weights", "tensor": 2}),
}


def collectives(context: CheckContext) -> Iterator[CheckFigure]:
    """Measure collectives with one process per device; with one process they are copies."""
    config = CollectivesConfig(**(SMALL_SIZES if context.small else {"largest": 64 << 20, "launches": 2}))
    # The CPU also runs what a machine with one GPU would.
    for processes in (1, context.devices) if context.small else (context.devices,):
        group = WorkerGroup.local(processes, timeout=60)
        profile = merge_profiles([group.launch(measure_group, config) for _ in range(config.launches)])
        assert profile.measurements, "nothing was measured"
        yield CheckFigure("backend", profile.fingerprint.backend)
        yield CheckFigure("processes", float(processes))
        for operation in config.operations:
            if sizes := [each for each in profile.of(operation) if each.bytes]:
                yield CheckFigure(f"{operation}, {sizes[-1].bytes >> 10} KiB", 1e6 * sizes[-1].p50, "µs")
                if processes > 1:
                    yield CheckFigure(f"{operation}, bus bandwidth", sizes[-1].busbw(), "GB/s")
        for line in compare_with_installed(profile, config):
            yield CheckFigure("comparison", line)


def distance_on_ranks(worker: WorkerContext, case: LayoutCase) -> float:
    """Train one rank's part of a case, and return the distance of the result from one process's."""
    found = train_divided(case)
    return distance(found, case) if dist.get_rank() == 0 else 0.0


def layouts(context: CheckContext) -> Sequence[CheckFigure]:
    """Compare losses, gradient norms and weights after a dozen steps with one process on the CPU, in float64."""
    cases = {name: case for name, case in CASES.items() if case.world <= context.devices}
    if context.small:
        cases = {name: replace(case, steps=4) for name, case in list(cases.items())[:1]}
    if not cases:
        raise CannotRun("needs 2 GPUs")
    found = []
    for name, case in cases.items():
        case = replace(case, device=context.device.type)
        # Hidden GPUs, or the workers of a rehearsal would use them.
        environment = {"CUDA_VISIBLE_DEVICES": ""} if context.small else {}
        group = WorkerGroup.local(case.world, timeout=PATIENCE_S)
        apart = group.launch(distance_on_ranks, case, environment=environment)
        assert apart < TOLERANCE, f"{name}: losses, norms or weights are {apart:g} apart"
        found.append(CheckFigure(f"{name}: apart by", apart))
    return found
