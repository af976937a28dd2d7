"""Train one model in this process group: the engine behind the Flyte task and behind plain ``torchrun``."""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tasks.artifacts.prepared.data import PreparedData
from tasks.artifacts.prepared.streamed import open_prepared
from tasks.artifacts.results.training import Attempt, History, Throughput, ValidationPoint
from tasks.distributed.agreement import same_error_on_all_ranks
from tasks.distributed.parent_death import end_with_torch_elastic
from tasks.distributed.process_group import Group, meeting_store, process_group
from tasks.errors import Preempted, UserError
from tasks.logs import logger
from tasks.models.config import ModelConfig, TeachingConfig
from tasks.models.factory import Predictor
from tasks.models.trained import write_trained
from tasks.settings import to_dict
from tasks.storage import storage_for
from tasks.train.arithmetic.ema import AveragedWeights
from tasks.train.arithmetic.precision import LossScaler, autocast, kernels, resolve_precision
from tasks.train.checkpoint import Checkpoints, Restored, Retention, newest_identity
from tasks.train.checkpoint.random_state import seed_generators
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import layout as layout_of
from tasks.train.data.loader import padding
from tasks.train.data.order import ORDER_VERSION, GlobalOrder
from tasks.train.device_clock import clock_of
from tasks.train.lineage import Lineage
from tasks.train.loop.probe import Traits, probe
from tasks.train.loop.state import Progress, TrainingState, weights_of
from tasks.train.loop.step import make_optimizer, micro_batches, padded_rows
from tasks.train.loop.train_loop import TrainLoop
from tasks.train.network import Applied, agreed
from tasks.train.parallel.compiled import Compiled, compiled
from tasks.train.parallel.layout import Layout
from tasks.train.parallel.model import ParallelModel
from tasks.train.parallel.replicas import check_exchange, replicate
from tasks.train.speed.profiler import StepProfiler
from tasks.train.speed.throughput import throughput
from tasks.train.survival.checkpoint_interval import Interval
from tasks.train.survival.goodput import DATA_WAIT, RESTORE, STALL, STEPS, AttemptRecord, GoodputRecorder
from tasks.train.survival.guard import Guard
from tasks.train.survival.notices import Watcher, metadata_servers
from tasks.train.survival.reproducibility import conditions, describe_changes

LOG = logger("train")
META = torch.device("meta")


@dataclass(frozen=True)
class TrainingRequest:
    """One attempt at training a model."""

    #: A directory with the prepared data, or a stub of it.
    prepared: Path
    model: ModelConfig
    training: TrainingConfig
    #: Where rank 0 writes the trained model.
    directory: Path
    #: Where this attempt stores its checkpoints, a path or a store's address. ``training.checkpoint_uri`` replaces it.
    checkpoints_home: str
    #: What goes into the manifest of the trained model.
    made_by: Mapping[str, Any]
    #: The home of the attempt before, if it is another one; its newest checkpoint may be resumed from, too.
    previous_checkpoints: str = ""
    #: The id of the execution that this is an attempt of.
    execution: str = ""
    #: The cloud whose preemption notices are watched for; "auto" tries all, "none" does not watch.
    notices: str = "none"
    #: Seconds that SIGTERM leaves to save and end.
    grace_s: float = 25.0
    #: A trained model that training goes on from: its network and weights, instead of fresh ones of ``model``.
    start: Path | None = None
    #: A trained model to learn from, too, and how.
    teacher: Path | None = None
    teaching: TeachingConfig = field(default_factory=TeachingConfig)


def run(request: TrainingRequest) -> None:
    """Train, from the newest checkpoint on if there is one, and write the trained model (on rank 0).

    Raises :class:`~tasks.distributed.agreement.AgreedUserError` on all ranks if any of them found a user error, and
    :class:`~tasks.errors.Preempted` when a machine is preempted.
    """
    started = time.perf_counter()
    end_with_torch_elastic()
    training = request.training
    homes = [training.checkpoint_uri or request.checkpoints_home, request.previous_checkpoints]

    def began() -> Mapping[str, Any] | None:
        found = newest_identity([storage_for(home) for home in homes if home], request.execution, training.resume)
        return None if found is None else found.get("network", {})

    store = meeting_store()
    applied = agreed(training, began, store, os.environ)
    exchange = applied.exchange(training.gradients)
    with (
        Watcher(metadata_servers(request.notices), grace_s=request.grace_s) as watcher,
        kernels(training),
        process_group(store=dist.PrefixStore("training", store), backend=training.backend) as group,
    ):
        if group.rank == 0 and group.backend == "gloo" and group.device.type == "cuda":
            LOG.warning("gloo between GPUs lets NVIDIA's and AMD's work in one job; it was never measured here")
        with same_error_on_all_ranks():
            data = open_prepared(request.prepared)
            check_rows(data)
            lineage = Lineage.open(request.start, request.teacher, request.teaching, data, training.parallel.divides)
            model = lineage.config(request.model)
            predictor = lineage.begin(model, data, training)
            precision = resolve_precision(training.precision, group.device)
            empty = any(parameter.is_meta for parameter in predictor.parameters())
            traits = probe(predictor if empty else predictor.to(group.device), META if empty else group.device)
            check_divisible(training, traits, precision)
            check_exchange(exchange, group, precision)
            fast = compile_pass(predictor, data, training, precision, group) if training.compile else None
        with same_error_on_all_ranks():
            layout = Layout.connect(training.parallel, group.rank, group.world, group.device)
            parallel: ParallelModel = (
                divide_model(predictor, data, training, layout, group)
                if training.parallel.divides
                else replicate(predictor, traits, group, exchange, training.seed, fast)
            )
        predictor = parallel.model
        averaged = AveragedWeights(predictor, training.ema) if training.ema else None
        state = TrainingState(
            parallel=parallel,
            optimizer=make_optimizer(predictor, training),
            scaler=LossScaler(group.device, enabled=precision == "fp16"),
            best_weights=weights_of(predictor),
            progress=Progress(),
            traits=traits,
            averaged=averaged,
            teacher=lineage.teacher_on(group.device, precision),
            conditions=conditions(training, group),
        )
        # From here on only dropout and the like draw random numbers, different ones on each rank. A user's model may
        # also draw from Python's and NumPy's generators, so these are seeded too.
        seed_generators(training.seed * 1_000_003 + layout.data_rank + 1)
        clock = clock_of(group.device)
        every = interval(training, data)
        checkpoints = Checkpoints(
            homes[0],
            previous=homes[1],
            model=predictor,
            optimizer=state.optimizer,
            parts={"scaler": state.scaler, **({"ema": averaged} if averaged else {}), **parallel.parts},
            identity=identity(data, model, training, applied) | lineage.identity(),
            defaults={"model": to_dict(ModelConfig()), "training": to_dict(TrainingConfig())},
            run=request.execution,
            resume=training.resume,
            retention=Retention(regular=every.steps),
            layout=layout.sizes if training.parallel.divides else (),
            clock=clock,
        )
        recorder = GoodputRecorder(
            checkpoints.home,
            checkpoints.attempt,
            group.world,
            writes=group.rank == 0,
            started=started,
            previous=checkpoints.previous,
        )
        with recorder.time(RESTORE):
            restored = checkpoints.restore(into=state.to_save())
        if restored:
            state.apply(restored, group)
            if group.rank == 0:
                LOG.info("goes on from step %d (%s)", restored.step, restored.source)
                if not all(settings["fused"] for settings in state.optimizer.param_groups):
                    LOG.info("goes on with the optimiser of this checkpoint, which is slower than the fused one")
                if changes := describe_changes(restored.progress.get("conditions", {}), state.conditions, predictor):
                    LOG.warning("%s", changes)
        checkpoints.prepare(state.to_save())
        guard = Guard(checkpoints, every, watcher, recorder, clock)

        def restore(least: int, most: int) -> Restored | None:
            # A checkpoint that a notice brought about is none to go back to: another run would not have it.
            regular = every.steps or 1
            return checkpoints.restore(
                lambda name: least <= name.step <= most and name.step % regular == 0, into=state.to_save()
            )

        first_step = state.progress.step
        steps = training.profile.steps if group.rank == 0 else 0
        profiler = StepProfiler(steps, group.device) if steps else None
        guard.begin(first_step)
        try:
            TrainLoop(state, data, training, group, precision, guard, recorder, profiler).run(restore)
            checkpoints.finish()
        except Preempted:
            raise
        except Exception as error:
            recorder.end(f"{type(error).__name__}: {error}")
            raise
        guard.close()
        goodput = recorder.summary()
        checkpoints.close()
        speed = trained_speed(state, data, training, precision, group, first_step, recorder.record)
        best, last = parallel.whole(state.best_weights), parallel.whole(state.weights())
        attempt = Attempt(
            steps=state.progress.step - first_step,
            resumed_from=restored.source if restored else "",
            save_seconds=checkpoints.publish_seconds,
            ledger=goodput.to_json(),
        )
        if speed:
            attempt["throughput"] = speed
        if fast:
            attempt["compiled"] = fast.figures
        if group.rank == 0:
            write_trained(
                request.directory,
                config=model,
                signature=data.signature,
                best=best,
                last=last,
                history=history(state, group, precision),
                attempt=attempt,
                made_by=request.made_by,
                kept=lineage.kept,
                more=profiler.files if profiler else None,
            )
            LOG.info("%s", goodput)
        else:
            deque(chain(best.tensors(), last.tensors()), maxlen=0)
        dist.barrier()


def pieces_of(data: PreparedData, training: TrainingConfig, shares: int) -> list[slice]:
    """The micro-batches of a padded share of a batch."""
    largest = GlobalOrder(layout_of(data, "train"), training.batch_size, training.seed).largest
    return micro_batches(padded_rows(-(-largest // shares), training.accumulation), training.accumulation)


def divide_model(
    predictor: Predictor, data: PreparedData, training: TrainingConfig, layout: Layout, group: Group
) -> ParallelModel:
    """Divide the model for micro-batches of the size that this training has."""
    # Half a second on every process, which most trainings need not spend.
    from tasks.train.parallel.divide import divide

    pieces = pieces_of(data, training, layout.data_size)
    return divide(predictor, layout, group.device, training.seed, micro_batches=len(pieces), rows=pieces[0].stop)


def compile_pass(
    predictor: Predictor, data: PreparedData, training: TrainingConfig, precision: str, group: Group
) -> Compiled:
    """Compile the model's pass for micro-batches of the size and layout that this training has."""
    pieces = pieces_of(data, training, group.world)
    inputs = tuple(x[pieces[0]] for x in padding(pieces[-1].stop, data.signature, group.device))
    found = compiled(predictor, inputs, partial(autocast, precision, group.device))
    if group.rank == 0:
        gain = found.figures["plain_pass_s"] / found.figures["pass_s"]
        LOG.info("compiled in %.1f s; a pass is %.2f times as fast as without", found.figures["seconds"], gain)
    return found


def check_divisible(training: TrainingConfig, traits: Traits, precision: str) -> None:
    """Raise ``UserError`` for models and types of numbers that no layout divides, and models that are not compiled."""
    if training.compile and traits.couples_rows:
        raise UserError(
            "training.compile: false expected: this model has batch normalisation or buffers that change, so its "
            "batches are not padded, and each size would be compiled for itself"
        )
    if training.parallel.divides and traits.couples_rows:
        raise UserError(
            "training.parallel: this model has batch normalisation or buffers that change, which cannot be divided; "
            "expected no shard, pipeline or tensor, or layer or group normalisation instead"
        )
    if training.parallel.divides and precision == "fp16":
        raise UserError(
            "training.precision: fp16 is not allowed with training.parallel, where its loss scaling was never tried; "
            "expected bf16 or fp32"
        )


def check_rows(data: PreparedData) -> None:
    """Raise ``UserError`` if the training or the validation split has no rows."""
    for split in ("train", "validation"):
        if not sum(data.segment_rows(split)):
            raise UserError(f"data.split: no row fell into the {split} split; give more rows or larger shares")


def identity(
    data: PreparedData, model: ModelConfig, training: TrainingConfig, applied: Applied | None = None
) -> dict[str, Any]:
    """What must equal the checkpoint's to resume it: everything that determines the result, but not how batches are
    divided into micro-batches and how often checkpoints are saved; and what of the tuner's result is applied."""
    free = {
        *("accumulation", "checkpoint_every", "checkpoint_seconds", "mean_time_between_failures"),
        *("checkpoint_uri", "resume", "skip_nonfinite", "parallel", "backend"),
        *("network_profile", "network_numbers", "profile"),
    }
    settings = {name: value for name, value in to_dict(training).items() if name not in free}
    return {
        "data": data.artifact.fingerprint,
        "model": to_dict(model),
        "order": ORDER_VERSION,
        "training": settings,
        **({"network": asdict(applied)} if applied else {}),
    }


def interval(training: TrainingConfig, data: PreparedData) -> Interval:
    """The checkpoint interval by the setting that is given; without any, one epoch."""
    if training.checkpoint_seconds or training.mean_time_between_failures:
        return Interval(
            seconds=training.checkpoint_seconds,
            mean_time_between_failures_s=training.mean_time_between_failures,
        )
    epoch = math.ceil(sum(data.segment_rows("train")) / training.batch_size)
    return Interval(steps=training.checkpoint_every or epoch)


def trained_speed(
    state: TrainingState,
    data: PreparedData,
    training: TrainingConfig,
    precision: str,
    group: Group,
    first_step: int,
    record: AttemptRecord,
) -> Throughput | None:
    """How fast this attempt's steps were, with all waits between them."""
    order = GlobalOrder(layout_of(data, "train"), training.batch_size, training.seed)
    return throughput(
        rows=order.consumed(state.progress.step) - order.consumed(first_step),
        seconds=sum(record.seconds[name] for name in (STEPS, DATA_WAIT, STALL)),
        tokens_per_row=data.signature.inputs[0].shape[0] if data.signature.task == "next token" else 0,
        flops_per_row=state.traits.flops_per_row,
        kind="tf32" if training.tf32 and precision == "fp32" and group.device.type == "cuda" else precision,
        group=group,
    )


def history(state: TrainingState, group: Group, precision: str) -> History:
    """The contents of ``history.json``."""
    progress = state.progress
    return {
        "steps": progress.steps,
        "evaluations": progress.evaluations,
        "best": cast(ValidationPoint, progress.best),
        "steps_total": progress.step,
        "stopped_early": progress.stopped_early,
        "parameters": sum(parameter.numel() for parameter in state.model.parameters()),
        "world": {
            "size": group.world,
            "backend": group.backend,
            "device": group.device.type,
            "precision": precision,
            "threads": torch.get_num_threads(),
        },
        "skipped": progress.skipped,
        "left_out": progress.left_out,
    }
