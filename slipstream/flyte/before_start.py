"""Checks of a pod's shape and GPUs before a process group starts there."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from slipstream.shared.distributed.user_errors import check_gpus
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.gpus import check_asked_gpus, visible_gpus
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import CHOICE
from slipstream.shared.telemetry.preflight import check_gpu_memory

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
