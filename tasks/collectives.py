"""Flyte tasks of the collective benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flytekit import task

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import MadeByElement, Prepared
from slipstream.flyte.elastic import Distributed, TaskInputs, Workspace, distributed
from slipstream.flyte.metadata import stage_metadata
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.profiles.profile import current_profile
from tasks.config import with_lasting_history

if TYPE_CHECKING:
    from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup


def worker_parents() -> Distributed:
    """Return the task configuration of processes that start worker groups.

    These processes join no process group. Every launch starts further processes, which form a new group.
    """
    return replace(
        distributed("collectives", returns=MadeByElement.of, starts_processes=True), patience=rendezvous_timeout
    )


def rendezvous_timeout(inputs: TaskInputs) -> float:
    """Return the rendezvous timeout of the benchmark's pods in seconds.

    It is limited, as a main job does not need its benchmark, but may wait for its nodes.
    """
    config: CollectivesConfig | RunConfig = inputs["config"]
    return (config.collectives if isinstance(config, RunConfig) else config).timeout


@task(task_config=worker_parents(), **stage_metadata("collectives"))
def benchmark_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """Measure the interconnect between the processes of a training, or reuse a recent profile.

    A profile is reused if it was measured on the same hardware within ``collectives.reuse_days``. With the profile
    ``local`` the benchmark is short, unless the user configured it.
    """
    if config.is_default and current_profile().name == "local":
        return measure_in_workspace(workspace, config.short, reuse=True)
    return measure_in_workspace(workspace, config, reuse=True)


@task(task_config=worker_parents(), **stage_metadata("collectives"))
def measure_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """Measure the interconnect between the processes of a training; never reuse a profile."""
    return measure_in_workspace(workspace, config, reuse=False)


@task(task_config=worker_parents(), **stage_metadata("collectives"))
def compare_collectives(workspace: Workspace, config: CollectivesConfig) -> MadeByElement:
    """Repeat measurements of the interconnect until it is clear whether it is slower than its history.

    The answer is shown above the table of measurements.
    """
    config = with_lasting_history(config)

    def body() -> None:
        from slipstream.pipeline.collectives.compare import compare_with_history

        compare_with_history(worker_group(workspace, config), config, Path(workspace.directory))

    return workspace.work(body)


@task(task_config=worker_parents(), **stage_metadata("collectives"))
def tune_collectives(workspace: Workspace, prepared: Prepared, config: RunConfig) -> MadeByElement:
    """Search for interconnect settings that shorten the training step of the configured model on the prepared data."""
    config = replace(config, collectives=with_lasting_history(config.collectives))

    def body() -> None:
        from slipstream.pipeline.collectives.engine import made_by
        from slipstream.pipeline.collectives.tune.steps import ConfiguredModel
        from slipstream.pipeline.collectives.tune.tuner import tune_settings
        from slipstream.shared.artifacts.prepared.streamed import open_prepared
        from slipstream.shared.interconnect.tuning import write_tuning
        from slipstream.shared.models.arithmetic import Arithmetic

        data = open_prepared(Path(prepared.path))
        # Until the ranks have met, names are resolved on this machine only.
        workers = worker_group(workspace, config.collectives)
        resolved = config.for_data(data)
        rows = max(1, resolved.training.rows_per_step // workers.world)
        arithmetic = Arithmetic(config.training.precision, config.training.tf32)
        model = ConfiguredModel(resolved.model, data.signature, rows, config.training.seed, arithmetic)
        tuning = tune_settings(workers, config.collectives, model)
        if tuning:
            write_tuning(Path(workspace.directory), tuning, made_by(config.collectives))

    return workspace.work(body)


def measure_in_workspace(workspace: Workspace, config: CollectivesConfig, *, reuse: bool) -> MadeByElement:
    config = with_lasting_history(config)

    def body() -> bool:
        from slipstream.pipeline.collectives.engine import benchmark_interconnect, take_earlier
        from slipstream.shared.interconnect.fingerprint import fingerprint_on_cpu

        directory = Path(workspace.directory)
        # Without GPUs the hardware is known before any process starts.
        known = reuse and workspace.processes and not visible_gpus()
        if known and take_earlier(fingerprint_on_cpu(workspace.processes), config, directory):
            return True
        return benchmark_interconnect(worker_group(workspace, config), config, directory, reuse=reuse and not known)

    return workspace.work(body)


def worker_group(workspace: Workspace, config: CollectivesConfig) -> WorkerGroup:
    import os

    from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup

    if workspace.processes:
        return WorkerGroup.local(workspace.processes, config.timeout)
    return WorkerGroup.from_environment(os.environ, config.timeout)
