"""Smaller process groups of the same ranks: what tells how an operation grows with the number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from slipstream.collectives.config import CollectivesConfig
from slipstream.collectives.launch.measurements import measure_group, measure_subgroup
from slipstream.collectives.launch.worker_group import WorkerGroup
from slipstream.interconnect.profile import NetworkProfile


def measure_launch(
    workers: WorkerGroup,
    config: CollectivesConfig,
    groups: Sequence[Sequence[Sequence[int]]],
    environment: Mapping[str, str],
) -> NetworkProfile | None:
    """One launch of all ranks, and one of each smaller group; in the process of rank 0, and None in the others."""
    whole = workers.launch(measure_group, config, environment=environment)
    smaller = [
        workers.launch(measure_subgroup, config, environment=environment, ranks_by_host=hosts) for hosts in groups
    ]
    if not workers.is_leader:
        return None
    return replace(whole, measurements=(*whole.measurements, *chain.from_iterable(smaller)))


def subgroups_of(empty: NetworkProfile, config: CollectivesConfig) -> list[list[list[int]]]:
    """For each of ``collectives.worlds`` that is smaller than the group of ``empty``, the ranks by host."""
    hosts = [host.ranks for host in empty.topology.hosts]
    return [subgroup_ranks(hosts, world) for world in config.worlds if world < empty.fingerprint.world]


def subgroup_ranks(hosts: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """So many ranks, by host: of each host in turn, so that the slowest link is between them as it is between all."""
    turns = max(map(len, hosts))
    taken = set([host[turn] for turn in range(turns) for host in hosts if turn < len(host)][:world])
    found = [[rank for rank in host if rank in taken] for host in hosts]
    return [ranks for ranks in found if ranks]
