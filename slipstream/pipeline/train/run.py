"""Training of one model in this process group, for Flyte's task and plain ``torchrun``."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch.distributed as dist

from slipstream.pipeline.train.applied_tuning import AppliedTuning, agree_on_tuning
from slipstream.pipeline.train.checkpoint.home import Retention
from slipstream.pipeline.train.checkpoint.manager import Checkpoints, RestoredCheckpoint
from slipstream.pipeline.train.checkpoint.restore import newest_conditions, newest_identity
from slipstream.pipeline.train.checkpoint.state import generator_seed, seed_generators
from slipstream.pipeline.train.checks import (
    check_compiler,
    check_data,
    check_divisible,
    check_memory,
    check_parameters,
    check_pipeline,
    micro_batch_slices,
    probe_traits,
    why_not_fused,
)
from slipstream.pipeline.train.device_clock import StepProfiler, device_clock
from slipstream.pipeline.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher, metadata_servers
from slipstream.pipeline.train.identity import log_resumption, training_code
from slipstream.pipeline.train.loop.state import kernels_configured
from slipstream.pipeline.train.loop.train_loop import RanOutOfMemory, TrainLoop
from slipstream.pipeline.train.memory.decision import with_micro_batches
from slipstream.pipeline.train.memory.running_out import after_running_out
from slipstream.pipeline.train.parallel.compiled import CompiledTraining, recompute_blocks
from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel, count_nodes
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel, check_exchange, replicate_model
from slipstream.pipeline.train.request import Lineage, TrainingRequest
from slipstream.pipeline.train.setup import (
    BuiltModel,
    PlacedModel,
    ResolvedTraining,
    ResumedTraining,
    Setup,
    TrainedState,
    compile_for,
    first_of_machine,
    same_origin,
    suits_compilation,
)
from slipstream.pipeline.train.so_far import progress_written
from slipstream.pipeline.train.telemetry.attempt import (
    describe_machine,
    overhead_seconds,
    record_attempt,
)
from slipstream.pipeline.train.telemetry.pods import samples_uploaded
from slipstream.pipeline.train.telemetry.totals import current_losses, written_totals
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.results.ledger import RESTORE
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.distributed.child_processes import end_with_torch_elastic
from slipstream.shared.distributed.process_group import Peers, RankContext, host_group, meeting_store, process_group
from slipstream.shared.distributed.user_errors import leave_after_rank_0, same_error_on_all_ranks
from slipstream.shared.errors import Preempted, UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.adapters.network import hold_frozen
from slipstream.shared.models.arithmetic import autocast_context, common_precision, device_capability
from slipstream.shared.models.base.directory import BaseRecord
from slipstream.shared.models.factory import initial_values
from slipstream.shared.models.initial.drawn import allocate_zeros
from slipstream.shared.models.trained import write_trained
from slipstream.shared.storage.local import cannot_write

LOG = logger("train")


def run_attempt(request: TrainingRequest) -> None:
    """Train, from the newest checkpoint if there is one, and write the trained model (on rank 0).

    Raises :class:`~slipstream.shared.distributed.user_errors.AgreedUserError` on all ranks if any rank found a user
    error, :class:`~slipstream.shared.errors.Preempted` when a machine is preempted,
    :class:`~slipstream.pipeline.train.loop.train_loop.Stopped` if the request's callback stops training, and on a
    single rank :class:`~slipstream.shared.errors.OutOfMemory`, or ``UserError`` if smaller micro-batches would not
    help.
    """
    started = time.perf_counter()
    end_with_torch_elastic()
    training = request.training

    def tuning_of_checkpoint() -> object:
        resumed = newest_identity(request.home, request.holder, training.resume, code_version("train"))
        return None if resumed is None else resumed.get("network", {})

    store = meeting_store()
    applied = agree_on_tuning(training, tuning_of_checkpoint, store, os.environ)
    with (
        NoticeWatcher(metadata_servers(request.notices), grace_s=request.grace_s) as watcher,
        kernels_configured(training),
        process_group(store=dist.PrefixStore("training", store), backend=training.backend) as group,
    ):
        if group.rank == 0 and group.backend == "gloo" and group.device.type == "cuda":
            LOG.warning("gloo connects NVIDIA and AMD GPUs in one job; its speed between GPUs was never measured")
        Trainer(request, group, host_group(group), applied, store, watcher, started).run()


@dataclass(frozen=True)
class Trainer:
    """One attempt at a training, in seven steps.

    A step takes only the result of the step before, which fixes their order. All ranks take all steps. Before the first
    step of the training, a user error of any rank is raised on all as ``AgreedUserError``.
    """

    request: TrainingRequest
    group: RankContext
    #: Gloo group of all ranks, which needs no GPU memory.
    on_host: dist.ProcessGroup | None
    applied: AppliedTuning
    #: Store of the ranks, which outlives the process group.
    store: dist.Store
    watcher: NoticeWatcher
    #: Start of the attempt, on the clock of ``time.perf_counter``.
    started: float

    def run(self) -> None:
        """Take all steps."""
        # No variable keeps the undivided model, or the initial values.
        with self.restore(self.divide(self.place(self.build(self.resolve())))) as resumed:
            trained = self.train(resumed)
            self.write(trained)

    @property
    def peers(self) -> Peers:
        return Peers(self.group.rank, self.group.world, self.on_host)

    def resolve(self) -> ResolvedTraining:
        """Open the data, and choose architecture, precision and micro-batches.

        Raises ``AgreedUserError`` if data, settings and devices are incompatible.
        """
        with same_error_on_all_ranks(self.on_host):
            data = open_prepared(self.request.prepared)
            check_data(data, self.request.training)
        known = self.request.for_data(data)
        request, made_for = with_micro_batches(known, self.group, self.on_host)
        training, group = request.training, self.group
        abilities = self.peers.gather(device_capability(group.device))
        with same_error_on_all_ranks(self.on_host):
            if training.compile is True:
                check_compiler(group.device.type == "cuda")
            check_pipeline(training, gpu=any(ability.gpu for ability in abilities))
            _, replicas, shards, _ = training.parallel.sizes(group.world, count_nodes(group.world))
            pieces = micro_batch_slices(data, training, replicas * shards)
            lineage = Lineage.open(request, data)
            architecture = lineage.architecture(request.origin, data)
            inherited = lineage.inherited(request.origin) if group.rank == 0 else {}
            precision = common_precision(training.precision, abilities)
            check_exchange(self.applied.exchange(training.gradients), group.backend, precision)
        if group.rank == 0 and training.precision == "auto" and len(set(abilities)) > 1:
            LOG.warning("training.precision: auto is %s on all ranks, as their devices differ", precision)
        compiles = training.compile
        if compiles == "auto":
            compiles = suits_compilation(architecture, abilities) and self.compiles_automatically()
        fused = training.kernels == "auto" and data.signature.task == "next token"
        if fused:
            reason = next(filter(None, self.peers.gather(why_not_fused(group.device))), "")
            fused = not reason
            if reason and group.rank == 0 and group.device.type == "cuda":
                LOG.warning("the loss of tokens is computed without Triton's kernels: %s", reason)
        return ResolvedTraining(
            request=replace(request, training=replace(training, compile=compiles)),
            group=group,
            made_for=made_for,
            data=data,
            lineage=lineage,
            architecture=architecture,
            inherited=inherited,
            precision=precision,
            pieces=pieces,
            fused_loss=fused,
            data_ranks=replicas * shards,
        )

    def compiles_automatically(self) -> bool:
        """Return True if all ranks have a compiler, and no checkpoint to resume from was trained without."""
        request, refused = self.request, ""
        try:
            check_compiler(self.group.device.type == "cuda")
        except UserError as error:
            refused = error.message
        if self.group.rank == 0 and not refused:
            before = newest_conditions(request.home, request.holder, request.training.resume, code_version("train"))
            if before is not None and not before.get("compiled"):
                refused = "as in the checkpoint to resume from"
        return self.all_compile(refused)

    def all_compile(self, refused: str) -> bool:
        """Return True if no rank has a reason against compilation; log the first."""
        reason = next(filter(None, self.peers.gather(refused)), "")
        if reason and self.group.rank == 0:
            LOG.warning("training runs without torch.compile: %s", reason)
        return not reason

    def compile(
        self, resolved: ResolvedTraining, parallel: ParallelModel, pieces: Sequence[slice]
    ) -> CompiledTraining | None:
        """Compile this rank's part of the model if ``training.compile`` asks for it.

        Raises ``AgreedUserError`` if it fails; with "auto" training then runs without.
        """
        found, refused = None, ""
        if not resolved.training.compile:
            return None
        with same_error_on_all_ranks(self.on_host):
            try:
                found = compile_for(parallel, pieces, resolved.precision, self.group)
            except UserError as error:
                if self.request.training.compile is True:
                    raise
                refused = error.message
        if not self.all_compile(refused):
            parallel.compiled, found = nullcontext, None
        return found

    def build(self, resolved: ResolvedTraining) -> BuiltModel:
        """Build the model, on the meta device if its weights are to be filled.

        Raises ``AgreedUserError`` if the base lacks weights, or if memory is too small, before any is taken.
        """
        training, config = resolved.training, resolved.architecture.config
        with same_error_on_all_ranks(self.on_host):
            predictor = resolved.lineage.begin(resolved.architecture, training)
            built = BuiltModel(resolved, predictor, None)
            if built.unfilled:
                values = initial_values(config, predictor.network, training.seed, self.request.origin)
                built = replace(built, values=values)
            if predictor.adapted:
                hold_frozen(predictor.network, resolved.precision)
            check_memory(predictor, training, self.group, resolved.precision)
        return built

    def place(self, built: BuiltModel) -> PlacedModel:
        """Allocate the model on this rank's device, unless it is to be divided, and examine it.

        Raises ``AgreedUserError`` if the settings do not suit the model, or the machines have different bases.
        """
        resolved, predictor, group = built.resolved, built.predictor, self.group
        training, config, first = resolved.training, resolved.architecture.config, resolved.pieces[0]
        divides, overhead = training.parallel.divides, 0.0
        with same_error_on_all_ranks(self.on_host):
            if not (built.unfilled and divides):
                if built.unfilled:
                    # On the device and in the final dtypes: host memory may not suffice for one model per process.
                    allocate_zeros(predictor.network, group.device)
                predictor = predictor.to(group.device)
            traits = probe_traits(predictor, group.device)
            check_divisible(training, traits, resolved.precision)
            if training.parallel.uses_fsdp(resolved.data_ranks):
                check_parameters(predictor.network)
            if training.recompute == "full":
                recompute_blocks(predictor.network)
            digest = self.request.origin.digest if config.base and first_of_machine(group) else ""
        compiled = None if divides else self.compile(resolved, ReplicatedModel(predictor, traits), [first])
        if not (divides or compiled):
            with same_error_on_all_ranks(self.on_host):
                overhead = overhead_seconds(
                    predictor,
                    partial(autocast_context, resolved.precision, group.device),
                    device_clock(group.device),
                    first.stop,
                    on_cpu=group.device.type == "cpu",
                    has_batch_statistics=traits.has_batch_statistics,
                )
        origin = ""
        if config.base:
            origin = same_origin(config.base, self.peers.gather(digest))
            base = BaseRecord(config.base, origin.partition(" ")[0])
            resolved = replace(resolved, architecture=replace(resolved.architecture, base=base))
        return PlacedModel(resolved, predictor, built.values, traits, compiled, overhead, origin)

    def divide(self, placed: PlacedModel) -> Setup:
        """Divide the model among the ranks, or replicate it.

        Raises ``AgreedUserError`` if the layout cannot divide the model.
        """
        resolved, predictor, compiled, group = placed.resolved, placed.predictor, placed.compiled, self.group
        training, pieces, precision = resolved.training, resolved.pieces, resolved.precision
        with same_error_on_all_ranks(self.on_host):
            layout = Layout.connect(training.parallel, group.rank, group.world, group.device)
            parallel: ParallelModel
            if training.parallel.divides:
                # The import takes half a second on every process, and most trainings do not need it.
                from slipstream.pipeline.train.parallel.divide import divide_model

                size = {"micro_batches": len(pieces), "rows": pieces[0].stop}
                parallel = divide_model(predictor, layout, group.device, None, **size, precision=precision)
            else:
                exchange = self.applied.exchange(training.gradients)
                parallel = replicate_model(predictor, placed.traits, group, exchange, training.seed, compiled)
        if training.parallel.divides:
            # A pipeline takes whole batches only.
            compiled = self.compile(resolved, parallel, pieces if training.parallel.pipeline > 1 else pieces[:1])
        setup = Setup(
            resolved, placed.traits, placed.overhead, placed.origin, layout, parallel, compiled, placed.values
        )
        self.fill(setup, own=False)
        return setup

    def fill(self, setup: Setup, *, own: bool) -> None:
        """Fill the weights that checkpoints hold (``own``), or all others, unless the model was built with values.

        Raises ``AgreedUserError`` for missing values.
        """
        if setup.values:
            with same_error_on_all_ranks(self.on_host):
                setup.parallel.fill(setup.values, own=own)
            setup.parallel.share_filled(own=own)

    @contextmanager
    def restore(self, setup: Setup) -> Iterator[ResumedTraining]:
        """Restore the newest checkpoint, if there is one, and hold the checkpoint directory during the block."""
        request, training, group = setup.resolved.request, setup.training, self.group
        with same_error_on_all_ranks(self.on_host):
            state = setup.initial_state()
        # From here on only layers such as dropout draw random numbers, which must differ between ranks. A user's model
        # may also draw from Python's and NumPy's generators, so these are seeded too.
        seed_generators(generator_seed(training.seed, setup.layout.data_rank))
        code = self.peers.gather(training_code() if group.rank == 0 else ("", {}))[0]
        clock, rows = device_clock(group.device), sum(setup.resolved.data.segment_rows("train"))
        interval = CheckpointInterval.configured(training, rows)
        with Checkpoints(
            request.home,
            state.app_state(),
            setup.resume_policy(self.applied, code, time.perf_counter() - self.started),
            retention=Retention(regular=interval.steps),
            clock=clock,
            watcher=self.watcher,
        ) as checkpoints:
            recorder = GoodputRecorder(
                checkpoints.home, checkpoints.attempt, group.world, writes=group.rank == 0, started=self.started
            )
            guard = Guard(checkpoints, interval, self.watcher, recorder, clock, training.unsaved_limit)
            describe_machine(recorder.record, request.sampled, group)
            with recorder.time(RESTORE):
                restored = checkpoints.restore(into=state.to_save())
            if restored:
                state.apply(restored, group)
                if group.rank == 0:
                    log_resumption(restored, state, checkpoints.policy)
            elif setup.values:
                self.fill(setup, own=True)
                state.copy_initial_weights()
            setup = replace(setup, values=None)
            checkpoints.prepare(state.to_save())
            yield ResumedTraining(setup, state, checkpoints, guard, restored, state.progress.step)

    def train(self, resumed: ResumedTraining) -> TrainedState:
        """Take all remaining optimiser steps, and write live progress to the paths in the request.

        If a rank runs out of memory, it stores a higher number of micro-batches for the next attempt.
        """
        setup, state, checkpoints, guard = resumed.setup, resumed.state, resumed.checkpoints, resumed.guard
        resolved, recorder, group = setup.resolved, guard.recorder, self.group
        request, training = resolved.request, resolved.training

        def restore(least: int, most: int) -> RestoredCheckpoint | None:
            # Use only regular checkpoints: a run without this preemption would not have the extra checkpoint.
            regular = guard.interval.steps or 1
            return checkpoints.restore(
                lambda name: least <= name.step <= most and name.step % regular == 0, into=state.to_save()
            )

        steps = training.profile.steps if group.rank == 0 else 0
        profiler = StepProfiler(steps, group.device) if steps else None
        recorder.observe = partial(current_losses, setup, guard.times, recorder)
        guard.begin(resumed.first_step)
        try:
            loop = TrainLoop(state, resolved.data, training, group, resolved.precision, guard, profiler)
            with (
                progress_written(request.so_far if group.rank == 0 else None, loop.so_far),
                written_totals(request.sampled, guard.times, recorder, group),
                samples_uploaded(checkpoints.home, recorder.record, request.sampled, guard.times),
            ):
                loop.run(restore, request.sampled, request.told)
                guard.collect_times()
                checkpoints.finish()
        except Preempted:
            raise
        except RanOutOfMemory as reason:
            ending = after_running_out(setup, request, resolved.made_for, checkpoints, str(reason))
            recorder.end_of_all(ending)
            raise ending from None
        except Exception as error:
            recorder.end(f"{type(error).__name__}: {error}")
            raise
        guard.close()
        files = {**record_attempt(resumed), **(profiler.files if profiler else {}), **resolved.inherited}
        return TrainedState(resumed, files)

    def write(self, trained: TrainedState) -> None:
        """Write the trained model on rank 0, and shut down all ranks.

        Raises ``UserError`` on all ranks if it cannot be written.
        """
        resumed, group = trained.resumed, self.group
        setup, state, request = resumed.setup, resumed.state, resumed.setup.resolved.request
        best, last = (setup.parallel.whole(weights).once() for weights in (state.best_weights, state.weights()))
        refused = ""
        if group.rank == 0:
            try:
                write_trained(
                    request.directory, setup.resolved.architecture, best, last, request.made_by, trained.record
                )
            except OSError as error:
                refused = cannot_write(request.directory, error).message
        # Gathering the tensors of a divided model is collective: all ranks iterate, even if rank 0 failed to write.
        deque(chain(best.tensors(), last.tensors()), maxlen=0)
        if request.delivered_by_agent and not refused:
            resumed.checkpoints.hand_over()
        leave_after_rank_0(dist.PrefixStore("end", self.store), group.rank, group.world, refused)
