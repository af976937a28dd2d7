"""The Elastic task of this project: the plugin's, with what a production run needs and the plugin leaves out.

- Flyte rebuilds the process group from the module as imported in the pod, so a pod that was started for another shape
  than its profile's is refused; by itself it would quietly train in a world of its own.
- The agent (the parent process) looks into the store, fetches the inputs once and publishes the result; the workers
  get a :class:`Workspace` and only compute.
- A user's mistake that all workers agreed on is *returned* by them and raised once, by the agent: torch logs nothing.
- The pods of a job leave together and with one verdict (:mod:`tasks.flyte.departure`).
- A preemption that was noticed spends the same budget of Flyte's as one that was not: of a single pod the platform's,
  whose last attempt runs on demand; of a job the task's own ``retries``, which leave it on spot
  (:mod:`slipstream.profiles.retries`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
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

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.homes import Holder
from slipstream.distributed.leaving import group_stands
from slipstream.distributed.names import names_of_this_machine
from slipstream.errors import Interrupted, Preempted, UserError
from slipstream.logs import logger
from slipstream.machine.limits import usable_cores
from slipstream.profiles.profile import Placement, Profile, current_profile
from slipstream.stages import StageRun
from slipstream.storage import StorageUnavailable
from tasks.flyte.artifact_types import Made
from tasks.flyte.before_start import check_pod
from tasks.flyte.departure import OutputPrefix, one_verdict, outlive_sigterm
from tasks.flyte.failures import (
    GROUP_ENDED,
    Outcome,
    PodPreempted,
    Report,
    SmallerMicroBatches,
    as_seen_by_flyte,
    clear_report,
    collect_reports,
    failure_of,
    ran_out_of_memory,
    read_reports,
    this_rank,
)
from tasks.flyte.forked_workers import LOOK, forked_workers, start_server
from tasks.flyte.homes import home_of, this_attempt
from tasks.flyte.memory_notes import noted_memory
from tasks.flyte.other_pods import PATIENCE_S, WaitingForPods, given_up, timeouts, waiting_for_pods
from tasks.flyte.stage import local_path, map_errors, run_stage, runs_locally
from tasks.flyte.watching.live_deck import live_deck
from tasks.flyte.watching.telemetry import sampled_directory

LOG = logger("flyte")
#: The inputs of a Flyte task by name.
TaskInputs: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Refusal:
    """What workers return when they agreed on a user's mistake."""

    message: str


@dataclass(frozen=True)
class Workspace:
    """Where the workers of one attempt work. An argument of the task function that is no input of the Flyte task."""

    stage: str
    #: A fresh directory of this pod; rank 0 leaves the finished artifact in it.
    directory: str
    #: Whose preemption notices to watch for.
    notices: str
    #: The home of what is not finished (a path or a URI), and who works there; "" if the stage keeps nothing.
    home: str
    holder: Holder
    #: How many processes to start, where the agent runs the task's function itself; 0 in a worker.
    processes: int = 0
    #: The file in which rank 0 tells the agent how its work goes; "" if nobody watches.
    so_far: str = ""
    #: Where this pod's sampler keeps what it sees; "" if there is none.
    sampled: str = ""

    def work(self, body: Callable[[], bool | None]) -> Any:
        """Run a worker's body and report how it ended. Returns what the agent goes on with, whatever the task returns:
        :class:`Made`, which is reused if the body says so, or the :class:`Refusal` that all workers agreed on."""
        clear_report(self.directory)
        try:
            reused = bool(body())
        except Exception as error:
            seen = as_seen_by_flyte(error)
            report = Report.of(seen)
            report.leave(self.directory)
            if isinstance(error, UserError) and not group_stands():
                return Refusal(error.message)
            if isinstance(seen, Interrupted):
                if not isinstance(seen, Preempted):
                    # The agent goes by the worker that it sees fail first: that is to be the one whom this one lost.
                    time.sleep(5 * LOOK)
                raise FlyteRecoverableException(report.message) from error
            # On this rank alone, so that the others wait for it: the agent, which ends them, goes by the report.
            raise
        Report(this_rank(), Outcome.FINISHED).leave(self.directory)
        return Made(FlyteDirectory(self.directory), StageRun(self.stage, 0.0, reused=reused))


#: Makes an input available on this machine, in the given fresh directory if it has to be fetched; returns its path.
Fetch = Callable[[FlyteDirectory, Placement, Path], Path]


def fetch_all(directory: FlyteDirectory, placement: Placement, fresh: Path) -> Path:
    """Download all of it."""
    return local_path(directory)


#: Raises ``UserError`` for inputs of the task, as they are here, that cannot work in processes placed so.
Check = Callable[[TaskInputs, Placement], None]


def nothing_to_check(inputs: TaskInputs, placement: Placement) -> None:
    """A stage whose processes find out by themselves."""


#: Of the task's inputs: the seconds after which a stage that nobody needs gives its other pods up; 0: it does not.
Patience = Callable[[TaskInputs], float]


def as_long_as_torch_does(inputs: TaskInputs) -> float:
    """A stage that all else needs."""
    return 0.0


def as_made(made: Made) -> Made:
    """The outputs of an ordinary stage."""
    return made


#: Makes the page of a deck of how the work in a workspace goes, of the task's inputs and whether it is still going on;
#: empty if there is nothing to show.
Watch = Callable[[Workspace, TaskInputs, bool], str]


class Unfinished(Protocol):
    """What a stage keeps for the attempts and executions after this one. Called in the agent."""

    def lasting(self, inputs: TaskInputs) -> TaskInputs:
        """Of the task's inputs, which are on this machine, what the result depends on; of settings, their values."""

    def address(self, home: str, inputs: TaskInputs) -> str:
        """The home that the user's own settings name instead of ``home``, if they do."""

    def take(self, home: str, holder: Holder, inputs: TaskInputs, directory: Path) -> bool:
        """Wait until nobody else is at the same work. Returns whether it is finished, and its result in
        ``directory``."""

    def progress(self, home: str) -> str:
        """What a later attempt would resume from; "" if it begins anew."""

    def deliver(self, home: str, holder: Holder, inputs: TaskInputs) -> Callable[[str], None]:
        """The workers are done: hold the home until what is returned is called with the address of the result, where
        Flyte finds it."""


@dataclass
class Distributed(Elastic):
    """Configuration of our Elastic task; made by :func:`distributed`."""

    stage: str = ""
    profile: Profile = field(default_factory=current_profile)
    fetch: Fetch = fetch_all
    check: Check = nothing_to_check
    returns: Callable[[Made], object] = as_made
    unfinished: Unfinished | None = None
    starts_processes: bool = False
    watch: Watch | None = None
    patience: Patience = as_long_as_torch_does


def distributed(
    stage: str,
    fetch: Fetch = fetch_all,
    check: Check = nothing_to_check,
    returns: Callable[[Made], object] = as_made,
    unfinished: Unfinished | None = None,
    *,
    starts_processes: bool = False,
    watch: Watch | None = None,
) -> Distributed:
    """The process group of a stage, as the current profile places it; ``fetch`` is how its inputs come to a pod,
    ``check`` sees them there before any process starts, ``returns`` makes the task's output of what the stage made, and
    ``unfinished`` says what is kept until it is made. With ``starts_processes`` the workers only start others and wait
    for them; on one machine the agent does so itself. ``watch`` makes a deck that pods publish while they work."""
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
        # The plugin makes a PyTorchJob of the text "2" and a plain pod of the number 1.
        nnodes=1 if placement.nodes == 1 else str(placement.nodes),
        nproc_per_node=placement.processes,
        max_restarts=placement.restarts,
        increase_shared_mem=False,
        rdzv_configs=timeouts(PATIENCE_S),
        # Pods that have ended stay until Flyte deletes the job, and their logs with them.
        run_policy=RunPolicy(clean_pod_policy=CleanPodPolicy.RUNNING),
    )


class DistributedTask(PytorchElasticFunctionTask):
    """Runs a stage in a process group of torch elastic."""

    def __init__(self, task_config: Distributed, task_function: Callable[..., Made], **kwargs: Any) -> None:
        super().__init__(task_config, task_function, ignore_input_vars=["workspace"], **kwargs)
        #: To be called with the address of the result that was made in this process.
        self._delivered: Callable[[str], None] | None = None

    def dispatch_execute(self, ctx: FlyteContext, input_literal_map: LiteralMap) -> Any:
        self._delivered = None
        try:
            outputs = super().dispatch_execute(ctx, input_literal_map)
            self._let_go(outputs)
            return outputs
        except FlyteUserRuntimeException as error:
            if self.task_config.nnodes == 1 and isinstance(error.value, PodPreempted):
                # flytekit makes a user's failure of whatever ``execute`` raises, and of this a system failure: what
                # Flyte calls a single pod that is taken away without a notice, it shall also be with one.
                raise error.value from None
            raise

    def _let_go(self, outputs: LiteralMap) -> None:
        """The result is where Flyte looks for it: nobody needs what led to it any more."""
        if self._delivered is None:
            return
        try:
            self._delivered(outputs.literals["artifact"].scalar.blob.uri)
        except (UserError, StorageUnavailable) as error:
            LOG.warning("the checkpoints of what is finished stay: %s", error)

    @map_errors
    def execute(self, **inputs: Any) -> object:
        if runs_locally() or self.task_config.nnodes == 1:
            return self._attempt(**inputs)
        with one_verdict(OutputPrefix(current_context().output_metadata_prefix)):
            return self._attempt(**inputs)

    @map_errors
    def _attempt(self, **inputs: Any) -> object:
        """This pod's part of the attempt. Raises ``IgnoreOutputs`` in pods without rank 0."""
        config = self.task_config
        placement = config.profile.placement(config.stage)
        local = runs_locally()
        check_pod(config.profile.name, placement, local=local)
        # Workers that torch elastic starts again would share the old ones' store and read their stale addresses.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // placement.processes)))

        agent_starts = config.starts_processes and placement.nodes == 1

        def make(directory: Path, key: str) -> bool:
            if not agent_starts:
                start_server(config.stage)
            # Fetched once by the agent; left to themselves, all workers of the pod would download the same bytes.
            here = {
                name: FlyteDirectory(str(config.fetch(value, placement, Path(f"{directory}.{name}"))))
                if isinstance(value, FlyteDirectory)
                else value
                for name, value in inputs.items()
            }
            config.check(here, placement)
            home, holder, reused = self._take(self._deciding(here), placement, directory)
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
                    reused = self._run_group(workspace, placement.processes, here, waiting, local=local)
                self._hold(home, holder, here)
            Artifact.open(directory, config.stage)
            return reused

        made = run_stage(
            config.stage, {**self._deciding(inputs), "world": [placement.nodes, placement.processes]}, make
        )
        return config.returns(made)

    def _deciding(self, inputs: TaskInputs) -> dict[str, Any]:
        """Return the inputs that decide the result: those that Flyte's cache does not ignore."""
        ignored = self.metadata.cache_ignore_input_vars
        return {name: value for name, value in inputs.items() if name not in ignored}

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
        """Hold the home until the result of the workers, which are done, is where Flyte finds it."""
        if self.task_config.unfinished is not None:
            try:
                self._delivered = self.task_config.unfinished.deliver(home, holder, inputs)
            except (UserError, StorageUnavailable) as error:
                LOG.warning("%s: not held until the result is delivered: %s", home, error)

    def _take(self, inputs: TaskInputs, placement: Placement, directory: Path) -> tuple[str, Holder, bool]:
        """The home of what the stage has not finished, who this attempt is there, and whether it was finished before:
        then the result is in ``directory``."""
        unfinished, holder = self.task_config.unfinished, this_attempt()
        if unfinished is None:
            return "", holder, False
        home = unfinished.address(home_of(self.task_config.stage, unfinished.lasting(inputs), placement), inputs)
        return home, holder, unfinished.take(home, holder, inputs, directory)

    def _run_group(
        self, workspace: Workspace, processes: int, inputs: TaskInputs, waiting: WaitingForPods, *, local: bool
    ) -> bool:
        """Run this machine's workers. Returns if they finished and rank 0 is among them: whether the result was there
        before."""
        outcome, ended, patience = None, None, self.task_config.patience(inputs)
        try:
            names = names_of_this_machine("localhost") if self.task_config.nnodes == 1 else nullcontext()
            if workspace.processes:
                outcome = self._task_function(workspace=workspace, **inputs)
            else:
                with names, forked_workers(self.task_config.stage, patience or PATIENCE_S, waiting.all_met):
                    outcome = self._run_workers(workspace, inputs)
        except GROUP_ENDED as error:
            if patience and isinstance(error, RendezvousError) and not waiting.met.is_set():
                raise given_up(workspace.stage, waiting.nodes, patience) from error
            ended = error
        finally:
            if not local:
                outlive_sigterm()
            reports = collect_reports(workspace.directory)
        if isinstance(outcome, Refusal):
            raise UserError(outcome.message)
        if ended is None:
            assert outcome is not None, "the plugin returns what rank 0 returned, or raises"
            return bool(outcome.run.reused)
        if len(reports) == processes and reports[0].outcome is Outcome.FINISHED:
            # The work is done, whatever ended the agents' farewell.
            if all(report.rank for report in reports):
                raise IgnoreOutputs("the pod of rank 0 hands on the result")
            return False
        failure = failure_of(ended, reports)
        if local and isinstance(failure, FlyteRecoverableException):
            # Nobody tries again here, so the user has to be told how. As text it begins with Flyte's name of its kind.
            why = failure.args[0]
            raise UserError(f"{workspace.stage}: interrupted ({why}); start it again to resume from there") from None
        if failure is ended:
            raise ended
        raise failure from (None if isinstance(failure, (UserError, SmallerMicroBatches)) else ended)

    def _run_workers(self, workspace: Workspace, inputs: TaskInputs) -> Any:
        """Run a process group; on one machine or pod another one whenever a step ran out of memory and smaller
        micro-batches are left to try: that costs no retry, of which a single pod may have none. One that runs out with
        a number that ran out before could not be told of more, and ends the attempt."""
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
                collect_reports(workspace.directory)  # the next group's are its own


TaskPlugins.register_pythontask_plugin(Distributed, DistributedTask)
