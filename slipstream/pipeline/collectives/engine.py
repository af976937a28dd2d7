"""Interconnect benchmark: reuses a profile from the history or measures one in fresh process groups."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.findings import slow_ranks_and_links
from slipstream.pipeline.collectives.launch.measurements import (
    NODES,
    all_reduce_bound,
    inspect_group,
    measure_launch,
    reason_to_skip,
    subgroups_to_measure,
)
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.other_benchmarks import compare_with_installed
from slipstream.pipeline.collectives.output import write_results
from slipstream.pipeline.collectives.tune.decision import FEWEST_TURNS
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect import topology as nccl_log
from slipstream.shared.interconnect.fingerprint import refuse_unknown_interfaces
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import METHOD, Fingerprint, NetworkProfile, merge_profiles
from slipstream.shared.logs import logger
from slipstream.shared.settings import to_dict

LOG = logger("collectives")


def always(profile: NetworkProfile) -> bool:
    return True


def no_answer() -> str:
    return ""


def benchmark_interconnect(
    workers: WorkerGroup,
    config: CollectivesConfig,
    directory: Path,
    *,
    reuse: bool,
    enough: Callable[[NetworkProfile], bool] = always,
    answer: Callable[[], str] = no_answer,
    doubtful: Callable[[], bool] = bool,
) -> bool:
    """Measure the interconnect between the ranks of ``workers``; all its processes call this.

    Writes the artifact to the fresh ``directory`` of rank 0's process and to the history. With ``reuse``, a profile of
    the same fingerprint and settings, younger than ``collectives.reuse_days``, is copied instead and the result is
    True. After ``collectives.launches`` launches, more follow until ``enough(profile)``. ``answer()`` is written above
    the table, and ``doubtful()`` into the profile. Raises the same error on all ranks: ``UserError``, or
    ``Interrupted`` naming a rank that is missing, died or does not answer.
    """
    with workers.exit_barrier(), tempfile.TemporaryDirectory(prefix="nccl-") as logs:
        rendezvous_and_check(workers)
        environment = nccl_log.nccl_log_environment(logs, os.environ)
        empty = workers.launch(inspect_group, config, environment=environment)
        if workers.broadcast("reused", lambda: reuse and take_earlier(empty.fingerprint, config, directory)):
            return True
        workers.broadcast("writable", lambda: ProfileHistory(config.history, empty.fingerprint).check_writable())
        if workers.is_leader and config.is_short:
            LOG.info(
                "a short benchmark runs: the collectives of training at few sizes; slipstream collectives measures all"
            )
        groups = workers.broadcast("groups", lambda: subgroups_to_measure(empty, config))
        launches: list[Any] = []
        while len(launches) < config.launches or not workers.broadcast(
            f"enough/{len(launches)}", lambda: enough(merge_profiles(launches))
        ):
            if workers.is_leader:
                LOG.info("launch %d of %d starts", len(launches) + 1, config.launches)
            launches.append(measure_launch(workers, config, groups, environment))
        bound = numa_turns(workers, config, empty)
    if not workers.is_leader:
        return False
    profile = replace(merge_profiles(launches), short=config.is_short, doubtful=doubtful())
    topology = replace(profile.topology, findings=(*profile.topology.findings, *slow_ranks_and_links(profile)))
    profile = replace(profile, topology=topology, beside=compare_with_installed(profile, config), numa=tuple(bound))
    if reason := reason_to_skip(empty):
        profile = replace(profile, left_out=(*profile.left_out, reason))
    history = ProfileHistory(config.history, profile.fingerprint)
    write_results(directory, profile, history.course(), made_by(config), answer())
    LOG.info("the network profile was published at %s", history.add(directory, profile.measured_at))
    return False


def numa_turns(workers: WorkerGroup, config: CollectivesConfig, empty: NetworkProfile) -> list[tuple[float, float]]:
    """Return (unbound, bound to a NUMA node) seconds of the largest all_reduce for every turn.

    Every measurement uses fresh processes. Empty outside rank 0's process, and if a machine has only one NUMA node.
    """
    if workers.broadcast("numa", lambda: reason_to_skip(empty)):
        return []
    found: tuple[list[float], list[float]] = ([], [])
    for turn in range(FEWEST_TURNS):
        for bind in (False, True) if turn % 2 == 0 else (True, False):
            found[bind].append(workers.launch(all_reduce_bound, config, bind, str(NODES)))
    return list(zip(*found, strict=True)) if workers.is_leader else []


def rendezvous_and_check(workers: WorkerGroup) -> None:
    """Wait for all ranks and check that they can measure together.

    Raises the same error on all ranks: ``Interrupted`` naming missing ranks, ``UserError`` naming a rank with other
    versions or invalid settings.
    """
    workers.rendezvous(
        {"torch": version("torch"), "Python": platform.python_version(), "way of measuring": str(METHOD)}
    )
    refused = workers.gather("refused", dict.fromkeys(workers.ranks, preflight_error()), workers.timeout)
    for rank, message in refused.items():
        if message:
            raise UserError(f"rank {rank}: {message}")


def preflight_error() -> str:
    """Return the error in this process's environment, before any worker starts; "" without an error."""
    try:
        refuse_unknown_interfaces(os.environ)
    except UserError as error:
        return error.message
    return ""


def take_earlier(fingerprint: Fingerprint, config: CollectivesConfig, directory: Path) -> bool:
    """Copy a recent profile with this fingerprint and these settings to the fresh ``directory``.

    Returns False if the history has none.
    """
    address = ProfileHistory(config.history, fingerprint).take(config.measuring, config.reuse_days, directory)
    if address:
        LOG.info("the network profile in %s is reused", address)
    return bool(address)


def made_by(config: CollectivesConfig) -> dict[str, object]:
    return {"config": to_dict(config), "code": code_version("collectives")}
