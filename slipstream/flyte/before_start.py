"""Checks of a pod's shape and GPUs, and the wait for other pods, before a process group starts."""

from __future__ import annotations

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from slipstream.shared.distributed.user_errors import check_gpus
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.gpus import check_asked_gpus, visible_gpus
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import CHOICE
from slipstream.shared.telemetry.preflight import check_gpu_memory
from slipstream.shared.telemetry.records import WAITED_FOR_PODS

LOG = logger("flyte")


def check_pod(profile: str, placement: Placement, *, local: bool) -> None:
    """Raise ``UserError`` unless this machine or pod fits the ``placement`` in the profile called ``profile``.

    Findings about GPU memory are logged as warnings.
    """
    refuse_other_shape(profile, placement, os.environ, local=local)
    seen = visible_gpus()
    check_gpus(placement.processes, seen)
    if not local:
        check_asked_gpus(int(placement.gpu), seen, torch.version.cuda or torch.version.hip, os.environ)
    for remark in check_gpu_memory(shared_gpu=placement.shared_gpu) if seen else ():
        LOG.warning("%s", remark)


def refuse_other_shape(name: str, placement: Placement, environment: Mapping[str, str], *, local: bool) -> None:
    """Raise ``UserError`` if this pod was started with other numbers of nodes or processes than ``placement`` has.

    Kubeflow's training operator writes ``PET_NNODES`` as ``2`` or, with an elastic policy, as ``2:2``.
    """
    nodes, processes = environment.get("PET_NNODES"), environment.get("PET_NPROC_PER_NODE")
    if nodes is None:
        if placement.nodes > 1:
            where = "on one machine" if local else "outside a PyTorchJob"
            raise UserError(
                f"profile {name!r} spreads this stage over {placement.nodes} nodes, but it was started {where}; "
                f"run it on the cluster, or choose a profile of one node with {CHOICE} (local)"
            )
        return
    expected = {"PET_NNODES": str(placement.nodes), "PET_NPROC_PER_NODE": str(placement.processes)}
    found = {"PET_NNODES": nodes.split(":")[-1], "PET_NPROC_PER_NODE": processes or expected["PET_NPROC_PER_NODE"]}
    for variable, value in expected.items():
        if found[variable] not in (value, "auto"):
            raise UserError(
                f"this pod was started with {variable}={environment[variable]}, but profile {name!r} says {value}; "
                f"package or register the workflow again with the {CHOICE} that it is to run with"
            )


# Without a gang scheduler, pods of a job that does not fit the free nodes start one by one. Two jobs can then hold half
# of their pods each and wait for the other half, until the first gives up and its pods leave room for the other's.
#: Seconds until the first log message, and between later messages.
SAY_AFTER_S, SAY_EVERY_S = 30.0, 300.0
#: Rendezvous timeout in seconds of a first attempt: a pod may wait for a node, and the node for its image.
PATIENCE_S = 900.0


class WaitingForPods:
    """Wait for the rendezvous of a job's ``nodes`` pods."""

    def __init__(self, nodes: int) -> None:
        self.nodes, self.met, self._since = nodes, threading.Event(), time.monotonic()

    def all_met(self) -> None:
        """Record that all pods have met, and pass the waiting time to the workers in the environment."""
        if not self.met.is_set():
            os.environ[WAITED_FOR_PODS] = f"{time.monotonic() - self._since:.3f}"
            self.met.set()

    def __str__(self) -> str:
        """Return a message with the missing pods; "" once all have met."""
        if self.met.is_set():
            return ""
        absent = names_without_address(self.nodes)
        who = f"{', '.join(absent)} (no room on the cluster, or still starting)" if absent else "their agents to meet"
        waited = time.monotonic() - self._since
        return f"this pod has waited {waited:.0f} s for the {self.nodes} pods of this job: {who}"


def names_without_address(nodes: int) -> list[str]:
    """Return the names of this job's pods that cannot be resolved yet.

    The training operator names them ``JOB-worker-NUMBER`` and creates a service of the same name.
    """
    own = re.fullmatch(r"(.+-worker)-\d+", os.environ.get("HOSTNAME", ""))
    return [name for number in range(nodes) if own and not has_address(name := f"{own[1]}-{number}")]


def has_address(name: str) -> bool:
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


@contextmanager
def waiting_for_pods(stage: str, nodes: int) -> Iterator[WaitingForPods]:
    """Log the missing pods periodically until ``all_met`` is called or the block ends."""
    waiting = WaitingForPods(nodes)

    def say() -> None:
        pause = SAY_AFTER_S
        while not waiting.met.wait(pause):
            logger(stage).info("%s", waiting)
            pause = SAY_EVERY_S

    if nodes > 1:
        threading.Thread(target=say, name="waiting", daemon=True).start()
    else:
        os.environ.pop(WAITED_FOR_PODS, None)
        waiting.met.set()
    try:
        yield waiting
    finally:
        waiting.met.set()


def attempt_patience() -> float:
    """Return the rendezvous timeout of this attempt in seconds, the same for all pods of a job.

    Later attempts wait up to twice as long as the first, by their job's name. Otherwise two
    jobs that gave up together would block each other again.
    """
    job, attempt = os.environ.get("HOSTNAME", "").rpartition("-worker-")[0], os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")
    if attempt == "0":
        return PATIENCE_S
    return PATIENCE_S * (1 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") / 2**32)


def rendezvous_timeouts(seconds: float) -> dict[str, int]:
    """Return torch elastic's rendezvous timeouts."""
    return dict.fromkeys(("timeout", "join_timeout", "read_timeout"), max(1, round(seconds)))


def given_up(stage: str, nodes: int, seconds: float) -> UserError:
    """Return the error for an optional stage whose pods did not meet in time."""
    return UserError(
        f"{stage}: its {nodes} pods did not meet within {seconds:g} s ({stage}.timeout), so it is skipped; free some "
        "room, or have a gang scheduler start all pods of a job or none"
    )


def with_timeouts(rdzv_configs: Mapping[str, object], seconds: float) -> dict[str, object]:
    return {**rdzv_configs, **rendezvous_timeouts(seconds)}
