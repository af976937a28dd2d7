"""Measurements of one launch, executed by the workers in their process group."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.timing import FEWEST, slowest_rank_seconds, time_cases, warm_up
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.operations.cases import OperationKind, prepare_case
from slipstream.pipeline.collectives.operations.feasibility import free_memory_by_rank, refuse_too_large, select_kinds
from slipstream.shared.interconnect.fingerprint import interconnect_fingerprint
from slipstream.shared.interconnect.profile import Measurement, Mode, NetworkProfile, Overlap
from slipstream.shared.interconnect.topology import gather_from_ranks, group_topology
from slipstream.shared.machine.limits import read_or_empty

#: Bytes that a pair of ranks exchanges; less if ``collectives.largest`` is smaller.
PAIR_BYTES = 1 << 20
#: Matrix size n (n x n) of the matmul that overlaps a collective. On a GPU, launching a small matmul takes longer than
#: running it, so it would hide nothing.
CPU_ORDER, GPU_ORDER = 192, 4096
TURNS = 5
ALL_REDUCE = OperationKind("all_reduce", reduction="sum", in_place=True)


def inspect_group(worker: WorkerContext, config: CollectivesConfig) -> NetworkProfile:
    """Return a profile of this process group without measurements.

    Raises ``UserError`` for settings that cannot be measured here.
    """
    world = dist.get_world_size()
    asked, left_out = select_kinds(config, dist.get_backend(), world)
    refuse_too_large(config, asked, free_memory_by_rank(worker.device))
    topology = group_topology(worker.device)
    fingerprint = interconnect_fingerprint(topology, worker.device)
    if world == 1:
        left_out += [f"{what}: a single process has no link" for what in ("pairs", "overlap") if getattr(config, what)]
    left_out += [f"worlds {n}: not fewer than all {world}" for n in config.worlds if n >= world]
    return NetworkProfile(fingerprint, 0.0, (), topology, left_out=tuple(left_out), settings=config.measuring)


def measure_group(worker: WorkerContext, config: CollectivesConfig) -> NetworkProfile:
    several = dist.get_world_size() > 1
    warm_up(prepare_case(ALL_REDUCE, config.smallest, worker.device), worker.device)
    measurements = tuple(measure_all_cases(worker, config))
    overlaps = (measure_overlap(worker, config),) if several and config.overlap else ()
    pairs = tuple(measure_pairs(worker, config)) if several and config.pairs else ()
    products = (measure_matrix_products(worker),)
    return replace(
        # Only now the backend has connections to inspect.
        inspect_group(worker, config),
        measured_at=round(time.time(), 3),
        measurements=measurements,
        overlaps=overlaps,
        pairs=pairs,
        products=products,
    )


def measure_subgroup(worker: WorkerContext, config: CollectivesConfig) -> tuple[Measurement, ...]:
    """Measure, in a group of some of the ranks, the cases to which the communication models are fitted."""
    warm_up(prepare_case(ALL_REDUCE, config.smallest, worker.device), worker.device)
    return tuple(measure_all_cases(worker, config.plain))


def measure_all_cases(worker: WorkerContext, config: CollectivesConfig) -> Iterator[Measurement]:
    asked, _ = select_kinds(config, dist.get_backend(), dist.get_world_size())
    for kind in asked:
        sizes = config.sizes if kind.dtype else [0]
        modes: list[Mode] = config.modes if kind.dtype else ["loop"]
        for size in sizes:
            for in_flight in config.in_flight:
                for mode in modes:
                    yield measure_case(worker, kind, size, mode, config.budget, in_flight)


def measure_case(
    worker: WorkerContext, kind: OperationKind, size: int, mode: Mode, budget: float, in_flight: int = 1
) -> Measurement:
    worker.set_activity(f"{kind} of {size} bytes" if size else str(kind))
    cases = [prepare_case(kind, size, worker.device) for _ in range(in_flight)]
    launch = time_cases(cases, mode, budget, worker.device)
    world = len(kind.members) or dist.get_world_size()
    return Measurement(
        operation=kind.operation,
        dtype=kind.dtype,
        reduction=kind.reduction,
        bytes=cases[0].bytes,
        world=world,
        mode=mode,
        in_place=kind.in_place,
        launches=(launch,),
        in_flight=in_flight,
        ranks=kind.members,
    )


def measure_pairs(worker: WorkerContext, config: CollectivesConfig) -> Iterator[Measurement]:
    """Measure every pair of ranks in turn, while the other ranks wait."""
    for pair in combinations(range(dist.get_world_size()), 2):
        kind = OperationKind("send_recv", members=pair)
        yield measure_case(worker, kind, min(PAIR_BYTES, config.largest), "loop", config.budget)


class MatrixProduct:
    """Repeated matmul, calibrated to last for a given time on the slowest rank.

    Its dtype is float32 on a CPU and bfloat16 (or float16) on a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        order, dtype = CPU_ORDER, torch.float32
        if device.type == "cuda":
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
            order, dtype = GPU_ORDER, torch.bfloat16 if bf16 else torch.float16
        self._left = torch.full((order, order), 1 / order, device=device, dtype=dtype)
        self._right, self._out = self._left.clone(), self._left.clone()
        self._device = device
        self.times = 1

    def run(self) -> None:
        for _ in range(self.times):
            torch.mm(self._left, self._right, out=self._out)

    def calibrate(self, seconds: float) -> None:
        """Set the number of repetitions so that they last ``seconds``; equal on all ranks."""
        self.times = 20
        once = (
            float(np.median(slowest_rank_seconds(np.array([self.seconds() for _ in range(FEWEST)]), self._device)))
            / self.times
        )
        self.times = max(1, round(seconds / once))

    def seconds(self) -> float:
        synchronise_device(self._device)
        started = time.perf_counter()
        self.run()
        synchronise_device(self._device)
        return time.perf_counter() - started


def measure_overlap(worker: WorkerContext, config: CollectivesConfig) -> Overlap:
    """Measure the largest all_reduce, an equally long matmul, and both at once, alternately."""
    worker.set_activity(f"all_reduce of {config.largest} bytes during a matmul")
    case = prepare_case(ALL_REDUCE, config.largest, worker.device)
    case.clear()
    product = MatrixProduct(worker.device)

    def seconds_of_both(communicate: bool, multiply: bool) -> float:
        dist.barrier()
        synchronise_device(worker.device)
        started = time.perf_counter()
        pending = list(case.start()) if communicate else []
        if multiply:
            product.run()
        for each in pending:
            if each is not None:
                each.wait()
        synchronise_device(worker.device)
        return time.perf_counter() - started

    seconds_of_both(True, True)
    alone = np.array([seconds_of_both(True, False) for _ in range(FEWEST)])
    product.calibrate(float(np.median(slowest_rank_seconds(alone, worker.device))))
    mine = np.array(
        [[seconds_of_both(*what) for what in ((True, False), (False, True), (True, True))] for _ in range(TURNS)]
    )
    turns = slowest_rank_seconds(mine.ravel(), worker.device).reshape(mine.shape)
    rounded = tuple((round(float(a), 9), round(float(b), 9), round(float(c), 9)) for a, b, c in turns)
    return Overlap("all_reduce", "float32", case.bytes, dist.get_world_size(), rounded)


def measure_matrix_products(worker: WorkerContext) -> tuple[float, ...]:
    """Return the mean seconds of the same matmul on every rank, to find ranks short of processor time.

    The ranks of a host run in turn, since they may share cores. A minimum or median would hide delays.
    """
    worker.set_activity("the same matmul on every rank")
    product = MatrixProduct(worker.device)
    product.times = 20
    mine = []
    rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    for turn in range(3 * FEWEST * ranks):
        dist.barrier()
        if turn % ranks == rank:
            mine.append(product.seconds())
    return tuple(round(seconds, 9) for seconds in gather_from_ranks(float(np.mean(mine))))


def synchronise_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure_launch(
    workers: WorkerGroup,
    config: CollectivesConfig,
    groups: Sequence[Sequence[Sequence[int]]],
    environment: Mapping[str, str],
) -> NetworkProfile | None:
    """Measure one launch of all ranks and one of each smaller group.

    Returns None outside rank 0's process.
    """
    whole = workers.launch(measure_group, config, environment=environment)
    smaller = [
        workers.launch(measure_subgroup, config, environment=environment, ranks_by_host=hosts) for hosts in groups
    ]
    if not workers.is_leader:
        return None
    return replace(whole, measurements=(*whole.measurements, *chain.from_iterable(smaller)))


def subgroups_to_measure(empty: NetworkProfile, config: CollectivesConfig) -> list[list[list[int]]]:
    """Return the ranks to measure, by host, for every number in ``collectives.worlds`` below the world of ``empty``."""
    hosts = [host.ranks for host in empty.topology.hosts]
    return [subgroup_ranks(hosts, world) for world in config.worlds if world < empty.fingerprint.world]


def subgroup_ranks(hosts: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """Return ``world`` of the ranks, grouped by host.

    They are taken from all hosts in turn, to include the slowest link.
    """
    turns = max(map(len, hosts))
    taken = set([host[turn] for turn in range(turns) for host in hosts if turn < len(host)][:world])
    found = [[rank for rank in host if rank in taken] for host in hosts]
    return [ranks for ranks in found if ranks]


# The largest all_reduce is timed in fresh processes, alternately without and with binding. Skipped unless every machine
# has at least two NUMA nodes.
NODES = Path("/sys/devices/system/node")
PCI = Path("/sys/bus/pci/devices")


def reason_to_skip(profile: NetworkProfile) -> str:
    """Return why NUMA binding cannot be measured; "" if it can."""
    if profile.fingerprint.world == 1:
        return "NUMA binding: a single process has no link"
    single = [host.ranks[0] for host in profile.topology.hosts if host.numa_nodes < 2]
    return f"NUMA binding: the machine of rank {single[0]} has one NUMA node" if single else ""


def all_reduce_bound(worker: WorkerContext, config: CollectivesConfig, bind: bool, nodes: str) -> float:
    """Return the median seconds of the largest all_reduce.

    With ``bind``, this rank is bound to a NUMA node from the directory ``nodes``.
    """
    if bind:
        bind_threads(cpus_near_gpu(worker.device, node_cpus(Path(nodes))))
    return measure_case(worker, ALL_REDUCE, config.largest, "loop", config.budget).p50


def node_cpus(root: Path) -> list[set[int]]:
    """Return this process's CPUs on every NUMA node that has any.

    Reads Linux's directory ``root``, which other systems lack.
    """
    allowed = os.sched_getaffinity(0)
    nodes = sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node")))
    return [mine for path in nodes if (mine := parse_cpu_list(read_or_empty(path / "cpulist")) & allowed)]


def parse_cpu_list(ranges: str) -> set[int]:
    """Parse a CPU list of the kernel, such as ``0-3,8``."""
    pairs = [part.partition("-") for part in ranges.split(",") if part]
    return {number for first, _, last in pairs for number in range(int(first), int(last or first) + 1)}


def cpus_near_gpu(device: torch.device, nodes: Sequence[set[int]]) -> set[int]:
    """Return the CPUs of the NUMA node of this rank's GPU; if unknown, local ranks take nodes in turn."""
    if device.type == "cuda":
        its: Any = torch.cuda.get_device_properties(device)  # torch's type stubs lack the PCI address
        address = f"{its.pci_domain_id:04x}:{its.pci_bus_id:02x}:{its.pci_device_id:02x}.0"
        known = read_or_empty(PCI / address / "numa_node")
        if known.isdigit() and int(known) < len(nodes):
            return nodes[int(known)]
    return nodes[int(os.environ.get("LOCAL_RANK", "0")) % len(nodes)]


def bind_threads(cpus: set[int]) -> None:
    """Bind every thread of this process, because the backend's threads are already running."""
    for task in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(task.name), cpus)
