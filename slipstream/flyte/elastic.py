"""Elastic task for production runs, based on flytekit's plugin.

- Flyte creates the pods at registration; the task reads its profile again in the pod. A pod of another shape is
  refused; the plugin would silently train with fewer processes.
- The agent (the parent process) checks the store, downloads the inputs once and publishes the result. The workers get a
  :class:`Workspace` and only compute.
- If all workers agree on a user's mistake, they *return* it and the agent raises it once, so torch logs no tracebacks.
- The pods of a job shut down together with one result (:mod:`slipstream.flyte.departure`).
- Preemptions with and without a notice use the same retry budget. For a single pod this is the platform's, whose last
  attempt runs on demand. For a job it is the task's own ``retries``, with which it stays on spot
  (:mod:`slipstream.shared.profiles.profile`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from flytekit import FlyteContext, current_context
from flytekit.exceptions.user import FlyteRecoverableException, FlyteUserRuntimeException
from flytekit.extend import IgnoreOutputs, TaskPlugins
from flytekit.models.literals import LiteralMap
from flytekit.types.directory import FlyteDirectory
from flytekitplugins.kfpytorch import CleanPodPolicy, Elastic, RunPolicy
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask
from torch.distributed.elastic.rendezvous import RendezvousError

from slipstream.flyte.artifact_types import Made
from slipstream.flyte.before_start import (
    PATIENCE_S,
    WaitingForPods,
    attempt_patience,
    check_pod,
    given_up,
    rendezvous_timeouts,
    waiting_for_pods,
)
from slipstream.flyte.departure import OutputPrefix, one_verdict, outlive_sigterm
from slipstream.flyte.failures import (
    GROUP_ENDED,
    FailureReport,
    PodPreempted,
    SmallerMicroBatches,
    WorkerExit,
    agent_error,
    as_seen_by_flyte,
    clear_report,
    collect_reports,
    quiet_ctrl_c,
    ran_out_of_memory,
    read_reports,
    this_rank,
)
from slipstream.flyte.forked_workers import LOOK, forked_workers, start_server
from slipstream.flyte.homes import checkpoint_address, this_attempt
from slipstream.flyte.memory_notes import noted_memory
from slipstream.flyte.metadata import deadline_s
from slipstream.flyte.stage import importable, local_path, map_errors, run_stage, runs_locally
from slipstream.flyte.watching.live_deck import live_deck
from slipstream.flyte.watching.telemetry import sampled_directory
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.names import names_of_this_machine
from slipstream.shared.distributed.process_group import group_stands
from slipstream.shared.errors import Interrupted, Preempted, UserError
from slipstream.shared.logs import logger
from slipstream.shared.machine.gpus import bf16_gpus, visible_gpus
from slipstream.shared.machine.limits import usable_cores
from slipstream.shared.profiles.profile import Placement, Profile, current_profile
from slipstream.shared.stages import StageRun
from slipstream.shared.storage import StorageUnavailable

LOG = logger("flyte")
#: Inputs of a Flyte task by name.
TaskInputs: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class AgreedRefusal:
    """User's mistake on which all workers agreed, as a return value."""

    message: str


@dataclass(frozen=True)
class Workspace:
    """Directories and settings that the agent passes to the workers of one attempt.

    It is an argument of the task function, but no input of the Flyte task.
    """

    stage: str
    #: New directory in this pod, into which rank 0 writes the artifact.
    directory: str
    #: Source of preemption notices (``notices`` of the profile).
    notices: str
    #: Checkpoint directory (path or URI; "" if the stage has none), and this attempt as its holder.
    home: str
    holder: Holder
    #: Number of processes to start if the agent itself runs the task function; 0 in a worker.
    processes: int = 0
    #: File for rank 0's live progress, read by the agent; "" without a live deck.
    so_far: str = ""
    #: Directory of this pod's telemetry samples; "" without a sampler.
    sampled: str = ""

    def work(self, body: Callable[[], bool | None]) -> Any:
        """Run ``body`` in a worker and write a report of how it ended.

        Returns :class:`Made`, marked as reused if ``body`` returns True, or the :class:`AgreedRefusal` on which all
        workers agreed. The agent uses this return value.
        """
        clear_report(self.directory)
        try:
            reused = bool(body())
        except Exception as error:
            seen = as_seen_by_flyte(error)
            report = FailureReport.of(seen)
            report.leave(self.directory)
            if isinstance(error, UserError) and not group_stands():
                return AgreedRefusal(error.message)
            if isinstance(seen, Interrupted):
                if not isinstance(seen, Preempted):
                    # The agent blames the first worker that it sees fail. This delay lets it see the lost peer first.
                    time.sleep(5 * LOOK)
                raise FlyteRecoverableException(report.message) from error
            # Only this rank failed and the others wait for it: the agent ends them and uses the report.
            raise
        FailureReport(this_rank(), WorkerExit.FINISHED).leave(self.directory)
        return Made(FlyteDirectory(self.directory), StageRun(self.stage, 0.0, reused=reused))


#: Downloads an input to the given new path unless it is on this machine; returns the local path.
Fetch = Callable[[FlyteDirectory, Placement, Path], Path]


def fetch_all(directory: FlyteDirectory, placement: Placement, fresh: Path) -> Path:
    """Download the complete directory and return its path."""
    return local_path(directory)


#: Returns the number of processes without GPUs, from the downloaded inputs, if the profile leaves it open.
Processes = Callable[[TaskInputs, Placement], int]


def as_placed(inputs: TaskInputs, placement: Placement) -> int:
    """Return the placement's number of processes: the default :data:`Processes`."""
    return placement.processes


#: Raises ``UserError`` if the downloaded inputs do not fit the placement.
Check = Callable[[TaskInputs, Placement], None]


def nothing_to_check(inputs: TaskInputs, placement: Placement) -> None:
    """Accept all inputs: the default :data:`Check`."""


#: Returns the timeout in seconds of an optional stage for the job's other pods; 0 for a required stage, which uses
#: torch's default.
Patience = Callable[[TaskInputs], float]


def as_long_as_torch_does(inputs: TaskInputs) -> float:
    """Return 0: the default :data:`Patience`."""
    return 0.0


def as_made(made: Made) -> Made:
    """Return the result unchanged: the default ``returns``."""
    return made


#: Returns the HTML of a live deck for a workspace and the task's inputs, or "" if there is nothing to show. The last
#: argument is True while the task runs.
Watch = Callable[[Workspace, TaskInputs, bool], str]


class UnfinishedStage(Protocol):
    """Handling of a stage's checkpoints, which later attempts and executions resume from; used by the agent."""

    def settled(self, inputs: TaskInputs) -> TaskInputs:
        """Return the inputs with those settings decided that depend on artifacts, if these are on this machine."""

    def lasting(self, inputs: TaskInputs) -> TaskInputs:
        """Return the inputs that decide the result and thus the checkpoint directory; all are on this machine."""

    def address(self, home: str, inputs: TaskInputs) -> str:
        """Return the checkpoint directory that the user configured, or else the default ``home``."""

    def take(self, home: str, holder: Holder, inputs: TaskInputs, directory: Path) -> bool:
        """Acquire the lease on ``home``, waiting while another attempt holds it.

        Returns True if the work is already finished; its result is then in ``directory``.
        """

    def progress(self, home: str) -> str:
        """Return the checkpoint from which a later attempt would resume, or ""."""

    def deliver(self, home: str, holder: Holder, inputs: TaskInputs) -> Callable[[str], None]:
        """Keep the lease on ``home`` after the workers have finished.

        Returns a function to call with the result's address once Flyte can find it; it records the result and releases
        the lease.
        """


@dataclass
class Distributed(Elastic):
    """Configuration of :class:`DistributedTask`, made by :func:`distributed`."""

    stage: str = ""
    profile: Profile = field(default_factory=current_profile)
    fetch: Fetch = fetch_all
    check: Check = nothing_to_check
    processes: Processes = as_placed
    returns: Callable[[Made], object] = as_made
    unfinished: UnfinishedStage | None = None
    starts_processes: bool = False
    watch: Watch | None = None
    patience: Patience = as_long_as_torch_does


def distributed(
    stage: str,
    fetch: Fetch = fetch_all,
    check: Check = nothing_to_check,
    returns: Callable[[Made], object] = as_made,
    unfinished: UnfinishedStage | None = None,
    *,
    starts_processes: bool = False,
    watch: Watch | None = None,
) -> Distributed:
    """Return the task configuration for a stage that runs in a process group, placed by the current profile.

    ``fetch`` downloads the inputs to a pod, where ``check`` checks them before any process starts. ``returns`` converts
    the result to the task's output. ``unfinished`` handles checkpoints. With ``starts_processes`` the workers only
    start other processes and wait; on one machine the agent does so. ``watch`` renders a live deck.
    """
    profile = current_profile()
    placement = profile.placement(stage)
    return Distributed(
        stage=stage,
        profile=profile,
        fetch=fetch,
        check=check,
        returns=returns,
        unfinished=unfinished,
        starts_processes=starts_processes,
        watch=watch,
        # The plugin creates a PyTorchJob for the string "2" and a plain pod for the number 1.
        nnodes=1 if placement.nodes == 1 else str(placement.nodes),
        nproc_per_node=placement.processes,
        max_restarts=placement.restarts,
        increase_shared_mem=False,
        rdzv_configs=rendezvous_timeouts(PATIENCE_S),
        # Ended pods keep their logs until Flyte deletes the job.
        run_policy=RunPolicy(CleanPodPolicy.RUNNING, active_deadline_seconds=deadline_s(stage) or None),
    )


class DistributedTask(PytorchElasticFunctionTask):
    """Flyte task that runs a stage in a process group of torch elastic."""

    def __init__(self, task_config: Distributed, task_function: Callable[..., Made], **kwargs: Any) -> None:
        super().__init__(task_config, task_function, ignore_input_vars=["workspace"], **kwargs)
        #: Releases the lease on the checkpoint directory; to be called with the address of this process's result.
        self._delivered: Callable[[str], None] | None = None

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        self._delivered = None
        try:
            outputs = super().dispatch_execute(ctx, input_literal_map)
            self._let_go(outputs)
            return outputs
        except FlyteUserRuntimeException as error:
            if self.task_config.nnodes == 1 and isinstance(error.value, PodPreempted):
                # flytekit turns every error of ``execute`` into a user failure, but this one into a system failure, as
                # which Flyte counts the preemption of a single pod without a notice.
                raise error.value from None
            raise

    def _let_go(self, outputs: LiteralMap) -> None:
        """Pass the address of the uploaded result to the function that releases the lease.

        :meth:`UnfinishedStage.deliver` returned this function; ``outputs`` has the address.
        """
        if self._delivered is None:
            return
        try:
            self._delivered(outputs.literals["artifact"].scalar.blob.uri)
        except (UserError, StorageUnavailable) as error:
            LOG.warning("the checkpoint directory could not be released (%s); its checkpoints stay", error)

    @map_errors
    def execute(self, **inputs: Any) -> object:
        alone = runs_locally() or self.task_config.nnodes == 1
        verdict = nullcontext() if alone else one_verdict(OutputPrefix(current_context().output_metadata_prefix))
        with importable(self._task_function.__module__), verdict:
            return self._attempt(**inputs)

    @map_errors
    def _attempt(self, **inputs: Any) -> object:
        """Run this pod's part of the attempt. Raises ``IgnoreOutputs`` in pods without rank 0."""
        config = self.task_config
        placement = config.profile.placement(config.stage)
        local = runs_locally()
        check_pod(config.profile.name, placement, local=local)
        # Otherwise restarted workers share the old store of torch elastic and read stale addresses.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // placement.processes)))

        agent_starts = config.starts_processes and placement.nodes == 1

        def make(directory: Path, key: str) -> bool:
            if not agent_starts:
                start_server(config.stage)
            # The agent fetches the inputs once, so that not every worker of the pod downloads them.
            here: Mapping[str, Any] = {
                name: FlyteDirectory(str(config.fetch(value, placement, Path(f"{directory}.{name}"))))
                if isinstance(value, FlyteDirectory)
                else value
                for name, value in inputs.items()
            }
            here = self._settled(here)
            placed = self._placed(here, placement)
            config.check(here, placed)
            home, holder, reused = self._take(self._deciding(here), placed, directory)
            if not reused:
                started_by_agent = placement.processes if agent_starts else 0
                so_far = f"{directory.absolute()}.so_far.json" if config.watch and not local else ""
                sampled = sampled_directory.get()
                workspace = Workspace(
                    stage=config.stage,
                    directory=str(directory.absolute()),
                    notices=placement.notices,
                    home=home,
                    holder=holder,
                    processes=started_by_agent,
                    so_far=so_far,
                    sampled=str(sampled.absolute()) if sampled else "",
                )
                noted = nullcontext() if local else noted_memory(config.stage, lambda: self._progress(home))
                met = waiting_for_pods(config.stage, placement.nodes)
                with noted, met as waiting, self._watched(workspace, here, waiting):
                    reused = self._run_group(workspace, placed.processes, here, waiting, local=local)
                self._hold(home, holder, here)
            Artifact.open(directory, config.stage)
            return reused

        from slipstream.shared.models.arithmetic import choose_precision

        surroundings = {
            "world": [placement.nodes, placement.processes],
            "auto_precision": choose_precision("auto", gpu=visible_gpus() > 0, bf16=bf16_gpus()),
        }
        # On this machine the key has the settled inputs; in a pod, Flyte's cache has the inputs as they are.
        deciding = self._deciding(self._settled(inputs) if local else inputs)
        made = run_stage(config.stage, {**deciding, **surroundings}, make)
        return config.returns(made)

    def _placed(self, inputs: TaskInputs, placement: Placement) -> Placement:
        """Return the placement with the processes of this attempt, which the profile may leave open."""
        config = self.task_config
        if config.profile.asked(config.stage).processes or int(placement.gpu) or visible_gpus():
            return placement
        return replace(placement, processes=config.processes(inputs, placement))

    def _deciding(self, inputs: TaskInputs) -> dict[str, Any]:
        """Return the inputs that decide the result: those in Flyte's cache key."""
        ignored = self.metadata.cache_ignore_input_vars
        return {name: value for name, value in inputs.items() if name not in ignored}

    def _settled(self, inputs: TaskInputs) -> TaskInputs:
        unfinished = self.task_config.unfinished
        return unfinished.settled(inputs) if unfinished else inputs

    def _progress(self, home: str) -> str:
        unfinished = self.task_config.unfinished
        return unfinished.progress(home) if unfinished else ""

    def _watched(
        self, workspace: Workspace, inputs: TaskInputs, waiting: WaitingForPods
    ) -> AbstractContextManager[None]:
        watch = self.task_config.watch
        if watch is None or not workspace.so_far:
            return nullcontext()

        def page(running: bool) -> str:
            waits = str(waiting) if running else ""
            return f"<p>{escape(waits)}</p>" if waits else watch(workspace, inputs, running)

        return live_deck(workspace.stage.capitalize(), page)

    def _hold(self, home: str, holder: Holder, inputs: TaskInputs) -> None:
        """Keep the lease on the checkpoint directory from the workers' end until Flyte can find the result."""
        if self.task_config.unfinished is not None:
            try:
                self._delivered = self.task_config.unfinished.deliver(home, holder, inputs)
            except (UserError, StorageUnavailable) as error:
                LOG.warning("the lease on %s could not be kept until the result is delivered (%s)", home, error)

    def _take(self, inputs: TaskInputs, placement: Placement, directory: Path) -> tuple[str, Holder, bool]:
        """Acquire the checkpoint directory of this attempt.

        Returns its address, the holder, and True if the work is already finished, with the result in ``directory``.
        """
        unfinished, holder = self.task_config.unfinished, this_attempt()
        if unfinished is None:
            return "", holder, False
        home = unfinished.address(
            checkpoint_address(self.task_config.stage, unfinished.lasting(inputs), placement), inputs
        )
        return home, holder, unfinished.take(home, holder, inputs, directory)

    def _run_group(
        self, workspace: Workspace, processes: int, inputs: TaskInputs, waiting: WaitingForPods, *, local: bool
    ) -> bool:
        """Run this machine's workers. Returns True if rank 0 reused an earlier result.

        Raises ``IgnoreOutputs`` if they finished but rank 0 is in another pod.
        """
        outcome, ended, patience = None, None, self.task_config.patience(inputs)
        self.task_config.nproc_per_node = processes
        try:
            names = names_of_this_machine("localhost") if self.task_config.nnodes == 1 else nullcontext()
            if workspace.processes:
                outcome = self._task_function(workspace=workspace, **inputs)
            else:
                with names, forked_workers(self.task_config.stage, patience or attempt_patience(), waiting.all_met):
                    outcome = self._run_workers(workspace, inputs)
        except GROUP_ENDED as error:
            if patience and isinstance(error, RendezvousError) and not waiting.met.is_set():
                raise given_up(workspace.stage, waiting.nodes, patience) from error
            ended = error
        finally:
            if not local:
                outlive_sigterm()
            reports = collect_reports(workspace.directory)
        if isinstance(outcome, AgreedRefusal):
            raise UserError(outcome.message)
        if ended is None:
            assert outcome is not None, "the plugin returns what rank 0 returned, or raises"
            return bool(outcome.run.reused)
        if len(reports) == processes and reports[0].outcome is WorkerExit.FINISHED:
            # The work is done; only the shutdown of the agents failed.
            if all(report.rank for report in reports):
                raise IgnoreOutputs("rank 0's pod returns the result")
            return False
        failure = agent_error(ended, reports)
        if local and isinstance(failure, FlyteRecoverableException):
            # Local runs have no retries. ``str(failure)`` would start with Flyte's name of the error class.
            why = failure.args[0]
            raise UserError(f"{workspace.stage}: interrupted ({why}); start it again to resume from there") from None
        if failure is ended:
            raise ended
        raise failure from (None if isinstance(failure, (UserError, SmallerMicroBatches)) else ended)

    def _run_workers(self, workspace: Workspace, inputs: TaskInputs) -> Any:
        """Run a process group; rerun it with smaller micro-batches if a step ran out of memory.

        Only a single machine or pod reruns. This uses no retry, since a pod may have none. If the same number of
        micro-batches fails twice, the attempt ends.
        """
        ran_out = set[int]()
        while True:
            try:
                return self._execute(workspace=workspace, **inputs)
            except GROUP_ENDED as error:
                reports = read_reports(workspace.directory)
                again = self.task_config.nnodes == 1 and ran_out_of_memory(error, reports)
                if not again or reports[0].micro_batches in ran_out:
                    raise
                ran_out.add(reports[0].micro_batches)
                LOG.warning("%s", reports[0].message)
                collect_reports(workspace.directory)  # remove the old group's reports


quiet_ctrl_c()
TaskPlugins.register_pythontask_plugin(Distributed, DistributedTask)
