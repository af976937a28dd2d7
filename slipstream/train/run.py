"""Training of one model in this process group, for Flyte's task and plain ``torchrun``."""

from __future__ import annotations

import math
import os
import socket
import time
from collections import deque
from functools import partial
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.results.ledger import DATA_WAIT, RESTORE, STALL, STEPS, AttemptRecord, summarise_goodput
from slipstream.artifacts.results.training import Attempt, History, ProcessGroupFigures, Throughput, record_files
from slipstream.artifacts.versions import code_version
from slipstream.distributed.child_processes import end_with_torch_elastic
from slipstream.distributed.farewell import leave_after_rank_0
from slipstream.distributed.process_group import Peers, RankContext, host_group, meeting_store, process_group
from slipstream.distributed.user_errors import same_error_on_all_ranks
from slipstream.errors import Preempted
from slipstream.logs import logger
from slipstream.models.config import ModelConfig
from slipstream.models.trained import write_trained
from slipstream.settings import to_dict
from slipstream.storage.local import cannot_write
from slipstream.telemetry.node import read_facts
from slipstream.train.applied_tuning import agree_on_tuning
from slipstream.train.checkpoint.home import Retention
from slipstream.train.checkpoint.manager import Checkpoints, RestoredCheckpoint
from slipstream.train.checkpoint.restore import ResumePolicy, newest_identity
from slipstream.train.checkpoint.state import generator_seed, seed_generators
from slipstream.train.config import NO_LONGER_LASTING, TrainingConfig
from slipstream.train.data_loader import stored_blocks
from slipstream.train.data_order import GlobalOrder
from slipstream.train.device_clock import device_clock
from slipstream.train.fault_tolerance.consensus import CheckpointInterval
from slipstream.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.train.fault_tolerance.guard import Guard
from slipstream.train.fault_tolerance.notices import NoticeWatcher, metadata_servers
from slipstream.train.identity import describe_other_code, in_older_form, run_identity, training_code
from slipstream.train.loop.precision import kernels_configured
from slipstream.train.loop.state import TrainingState
from slipstream.train.loop.train_loop import RanOutOfMemory, TrainLoop
from slipstream.train.memory.decision import DecisionConditions, with_micro_batches
from slipstream.train.memory.running_out import after_running_out
from slipstream.train.profiler import StepProfiler
from slipstream.train.setup import Setup, TrainingRequest, describe_changes
from slipstream.train.so_far import progress_written
from slipstream.train.telemetry.around import current_losses, safe_diagnosis
from slipstream.train.telemetry.pods import read_device_series, samples_uploaded
from slipstream.train.telemetry.totals import written_totals
from slipstream.train.throughput import compute_throughput

LOG = logger("train")


def run_attempt(request: TrainingRequest) -> None:
    """Train, from the newest checkpoint if there is one, and write the trained model (on rank 0).

    Raises :class:`~slipstream.distributed.user_errors.AgreedUserError` on all ranks if any rank found a user error,
    :class:`~slipstream.errors.Preempted` when a machine is preempted,
    :class:`~slipstream.train.loop.train_loop.Stopped` if the request's callback stops training, and on a single rank
    :class:`~slipstream.errors.OutOfMemory`, or ``UserError`` if smaller micro-batches would not help.
    """
    started = time.perf_counter()
    end_with_torch_elastic()
    training = request.training

    def tuning_of_checkpoint() -> object:
        resumed = newest_identity(request.home, request.holder, training.resume, code_version("train"))
        return None if resumed is None else resumed.get("network", {})

    store = meeting_store()
    applied = agree_on_tuning(training, tuning_of_checkpoint, store, os.environ)
    exchange = applied.exchange(training.gradients)
    with (
        NoticeWatcher(metadata_servers(request.notices), grace_s=request.grace_s) as watcher,
        kernels_configured(training),
        process_group(store=dist.PrefixStore("training", store), backend=training.backend) as group,
    ):
        if group.rank == 0 and group.backend == "gloo" and group.device.type == "cuda":
            LOG.warning("gloo connects NVIDIA and AMD GPUs in one job; its speed between GPUs was never measured")
        on_host = host_group(group)
        request, made_for = with_micro_batches(request, group, on_host)
        training = request.training
        setup = Setup.begin(request, group, exchange, on_host)
        with same_error_on_all_ranks(on_host):
            state = setup.state()
        # From here on only layers such as dropout draw random numbers, which must differ between ranks. A user's model
        # may also draw from Python's and NumPy's generators, so these are seeded too.
        seed_generators(generator_seed(training.seed, setup.layout.data_rank))
        clock = device_clock(group.device)
        interval = interval_of(training, setup.data)
        this = run_identity(setup.data, setup.architecture.config, training, applied, setup.origin)
        this |= setup.lineage.identity()
        code = training_code() if group.rank == 0 else ("", {})
        version, modules = Peers(group.rank, group.world, on_host).gather(code)[0]
        policy = ResumePolicy(
            this,
            older=in_older_form(this, setup.architecture.config),
            version=version,
            modules=modules,
            holder=request.holder,
            resume=training.resume,
            defaults={"model": to_dict(ModelConfig()), "training": to_dict(TrainingConfig())},
            ignored=NO_LONGER_LASTING,
            layout=setup.layout.sizes if training.parallel.divides else (),
            grace_s=max(0.0, request.grace_s - (time.perf_counter() - started)),
        )
        retention = Retention(regular=interval.steps)
        with Checkpoints(
            request.home, state.app_state(), policy, retention=retention, clock=clock, watcher=watcher
        ) as checkpoints:
            recorder = GoodputRecorder(
                checkpoints.home, checkpoints.attempt, group.world, writes=group.rank == 0, started=started
            )
            guard = Guard(checkpoints, interval, watcher, recorder, clock, training.unsaved_limit)
            record = train(setup, state, guard, checkpoints, request, made_for)
            best, last = (setup.parallel.whole(weights).once() for weights in (state.best_weights, state.weights()))
            refused = ""
            if group.rank == 0:
                try:
                    write_trained(request.directory, setup.architecture, best, last, request.made_by, record)
                except OSError as error:
                    refused = cannot_write(request.directory, error).message
            # Gathering the tensors of a divided model is collective: all ranks iterate, even if rank 0 failed to write.
            deque(chain(best.tensors(), last.tensors()), maxlen=0)
            if request.delivered_by_agent and not refused:
                checkpoints.hand_over()
            leave_after_rank_0(dist.PrefixStore("end", store), group.rank, group.world, refused)


def train(
    setup: Setup,
    state: TrainingState,
    guard: Guard,
    checkpoints: Checkpoints,
    request: TrainingRequest,
    made_for: DecisionConditions,
) -> dict[str, bytes]:
    """Train to the end, from the newest checkpoint if there is one, and return the record files by name.

    Live progress goes to the paths in ``request``. If a rank runs out of memory, a higher number of micro-batches is
    stored for the next attempt, with ``made_for``, the conditions under which it applies.
    """
    training, group, recorder = setup.training, setup.group, guard.recorder
    describe_machine(recorder.record, request.sampled, group)
    with recorder.time(RESTORE):
        restored = checkpoints.restore(into=state.to_save())
    if restored:
        state.apply(restored, group)
        if group.rank == 0:
            log_resumption(restored, state, checkpoints.policy)
    checkpoints.prepare(state.to_save())

    def restore(least: int, most: int) -> RestoredCheckpoint | None:
        # Use only regular checkpoints: a run without this preemption would not have the extra checkpoint.
        regular = guard.interval.steps or 1
        return checkpoints.restore(
            lambda name: least <= name.step <= most and name.step % regular == 0, into=state.to_save()
        )

    first_step = state.progress.step
    steps = training.profile.steps if group.rank == 0 else 0
    profiler = StepProfiler(steps, group.device) if steps else None
    recorder.observe = partial(current_losses, setup, guard.times, recorder)
    guard.begin(first_step)
    try:
        loop = TrainLoop(state, setup.data, training, group, setup.precision, guard, profiler)
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
        ending = after_running_out(setup, request, made_for, checkpoints, str(reason))
        recorder.end_of_all(ending)
        raise ending from None
    except Exception as error:
        recorder.end(f"{type(error).__name__}: {error}")
        raise
    guard.close()
    attempts = recorder.attempts()
    goodput, bottleneck = summarise_goodput(attempts), safe_diagnosis(attempts)
    if group.rank == 0:
        LOG.info("%s", goodput)
        if bottleneck:
            LOG.info("%s", bottleneck.sentence)
    checkpoints.close()
    attempt = Attempt(
        steps=state.progress.step - first_step,
        resumed_from=restored.source if restored else "",
        save_seconds=checkpoints.background.publish_seconds,
        ledger=goodput,
        throughput=trained_speed(setup, state, first_step, recorder.record),
        compiled=setup.compiled.figures if setup.compiled else None,
        bottleneck=bottleneck,
        code_versions=checkpoints.trained_by,
    )
    # All pods have uploaded their samples, because the ranks have exchanged memory figures afterwards.
    devices = read_device_series(checkpoints.home.storage, attempts) if group.rank == 0 else None
    files = record_files(training_history(state, group, setup.precision), attempt, devices)
    return files | (profiler.files if profiler else {})


def describe_machine(record: AttemptRecord, sampled: Path | None, group: RankContext) -> None:
    """Record device, pods, node and spot capacity of this attempt.

    Without a sampler, the node is the host name.
    """
    gpu = group.device.type == "cuda"
    record.device = torch.cuda.get_device_name(group.device) if gpu else "cpu"
    record.pods = max(1, group.world // int(os.environ.get("LOCAL_WORLD_SIZE", group.world)))
    facts = read_facts(sampled) if sampled else None
    record.node, record.spot = (facts.node, facts.spot) if facts else (socket.gethostname(), None)


def log_resumption(restored: RestoredCheckpoint, state: TrainingState, policy: ResumePolicy) -> None:
    """Log the checkpoint that training resumes from, and reasons why results may differ."""
    LOG.info("training resumes from step %d (%s)", restored.step, restored.source)
    if not restored.trained_by:
        LOG.warning("the checkpoint is of an older release, which recorded other digests: its data was not compared")
    elif other_code := describe_other_code(restored.modules, policy.modules):
        LOG.warning("%s", other_code)
    if not all(settings["fused"] for settings in state.optimizer.param_groups):
        LOG.info("training continues with the optimiser of this checkpoint, which is slower than the fused one")
    if changes := describe_changes(restored.progress.get("conditions", {}), state.conditions, state.model):
        LOG.warning("%s", changes)


def interval_of(training: TrainingConfig, data: PreparedData) -> CheckpointInterval:
    """Return the checkpoint interval from the settings; by default one epoch."""
    if training.checkpoint_seconds or training.mean_time_between_failures:
        return CheckpointInterval(0, training.checkpoint_seconds, training.mean_time_between_failures)
    epoch = math.ceil(sum(data.segment_rows("train")) / training.batch_size)
    return CheckpointInterval(steps=training.checkpoint_every or epoch)


def trained_speed(setup: Setup, state: TrainingState, first_step: int, record: AttemptRecord) -> Throughput | None:
    """Return the throughput of this attempt's steps, including data waits and stalls."""
    training, group, data, precision = setup.training, setup.group, setup.data, setup.precision
    order = GlobalOrder(stored_blocks(data, "train"), training.batch_size, training.seed)
    return compute_throughput(
        rows=order.consumed(state.progress.step) - order.consumed(first_step),
        seconds=sum(record.seconds[name] for name in (STEPS, DATA_WAIT, STALL)),
        tokens_per_row=data.signature.inputs[0].shape[0] if data.signature.task == "next token" else 0,
        flops_per_row=state.traits.flops_per_row,
        kind="tf32" if training.tf32 and precision == "fp32" and group.device.type == "cuda" else precision,
        group=group,
    )


def training_history(state: TrainingState, group: RankContext, precision: str) -> History:
    """Return the contents of ``history.json``."""
    progress = state.progress
    assert progress.best, "training ends with an evaluation"
    return History(
        steps=progress.steps,
        evaluations=progress.evaluations,
        best=progress.best,
        steps_total=progress.step,
        stopped_early=progress.stopped_early,
        parameters=state.traits.parameters,
        trained=state.traits.trained,
        world=ProcessGroupFigures(
            size=group.world,
            backend=group.backend,
            device=group.device.type,
            precision=precision,
            threads=torch.get_num_threads(),
        ),
        skipped=progress.skipped,
        left_out=progress.left_out,
    )
