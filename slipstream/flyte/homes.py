"""Addresses of checkpoint directories, which outlive pods and executions; the identity that leases one."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping

from flytekit import current_context

from slipstream.flyte.stage import describe_inputs, runs_locally
from slipstream.shared.artifacts.workspaces import HOMES, STORE, Holder, content_key, home_below
from slipstream.shared.profiles.placement import Placement


def checkpoint_address(stage: str, inputs: Mapping[str, object], placement: Placement, among: str = HOMES) -> str:
    """Return the address of a stage's checkpoint directory, the same for every attempt, recovery and relaunch.

    ``inputs`` are all inputs that decide the result; artifacts among them must be on this machine. The code version is
    not part of it: work resumes after a change of code, which is logged.
    """
    key = content_key(stage, "", describe_inputs(inputs))
    if runs_locally():
        return home_below(placement.checkpoints or str(STORE.absolute()), key, among=among)
    context = current_context()
    base = placement.checkpoints or raw_output_base(context.raw_output_prefix)
    return home_below(base, key, context.execution_id.project, context.execution_id.domain, among=among)


def raw_output_base(raw_output_prefix: str) -> str:
    """Return the prefix of Flyte's raw output shared by all attempts.

    Propeller appends a shard and the attempt's name to it (``taskexec_context.go: ComputeRawOutputPrefix``).
    """
    return raw_output_prefix.rstrip("/").rsplit("/", 2)[0]


def shared_address(name: str) -> str:
    """Return an address for ``name`` that all executions of a project and domain share; for pods only."""
    context = current_context()
    execution = context.execution_id
    return "/".join([raw_output_base(context.raw_output_prefix), name, execution.project, execution.domain])


def this_attempt() -> Holder:
    """Return this attempt as the holder of a checkpoint directory.

    Flyte gives local runs one name, so each counts as a separate execution.
    """
    if runs_locally():
        return Holder(f"local-{uuid.uuid4().hex[:12]}")
    context = current_context()
    return Holder(
        context.execution_id.name,
        int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")),
        context.raw_output_prefix.rstrip("/"),
    )
