"""Smaller process groups of the same ranks: what tells how an operation grows with the number of processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from tasks.artifacts.network.profile import NetworkProfile
from tasks.collectives.config import CollectivesConfig
from tasks.collectives.launch.crew import Crew
from tasks.collectives.launch.one_launch import launch, measure_plain


def launch_all(
    crew: Crew, config: CollectivesConfig, groups: Sequence[Sequence[Sequence[int]]], environment: Mapping[str, str]
) -> NetworkProfile | None:
    """One launch of all ranks, and one of each smaller group; in the process of rank 0, and None in the others."""
    whole = crew.launch(launch, config, environment=environment)
    smaller = [crew.launch(measure_plain, config, environment=environment, among=hosts) for hosts in groups]
    if not crew.leads:
        return None
    return replace(whole, measurements=(*whole.measurements, *chain.from_iterable(smaller)))


def groups_of(empty: NetworkProfile, config: CollectivesConfig) -> list[list[list[int]]]:
    """For each of ``collectives.worlds`` that is smaller than the group of ``empty``, the ranks by host."""
    hosts = [host.ranks for host in empty.topology.hosts]
    return [spread(hosts, world) for world in config.worlds if world < empty.fingerprint.world]


def spread(hosts: Sequence[Sequence[int]], world: int) -> list[list[int]]:
    """So many ranks, by host: of each host in turn, so that the slowest link is between them as it is between all."""
    turns = max(map(len, hosts))
    taken = set([host[turn] for turn in range(turns) for host in hosts if turn < len(host)][:world])
    found = [[rank for rank in host if rank in taken] for host in hosts]
    return [ranks for ranks in found if ranks]
