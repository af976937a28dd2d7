"""Train one model in this process group: the engine behind the Flyte task and behind plain ``torchrun``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tasks.artifacts.prepared import PreparedData
from tasks.artifacts.streamed import open_prepared
from tasks.distributed.agreement import together
from tasks.distributed.parent_death import end_with_agent
from tasks.distributed.process_group import Group, process_group
from tasks.errors import UserError
from tasks.models.config import ModelConfig
from tasks.models.factory import build
from tasks.models.trained import write_trained
from tasks.settings import to_dict
from tasks.train.checkpoint import Checkpoints
from tasks.train.checkpoint.random_state import seed_generators
from tasks.train.config import TrainingConfig
from tasks.train.data.order import ORDER_VERSION
from tasks.train.loop.precision import resolve_precision, scaler
from tasks.train.loop.state import Progress, TrainingState, weights_of
from tasks.train.loop.step import make_optimizer, settle_buckets
from tasks.train.loop.train_loop import take_up, to_save, train_loop
from tasks.train.survival.checkpoint_interval import Interval
from tasks.train.survival.goodput import RESTORE, Ledger
from tasks.train.survival.guard import Guard, Preempted
from tasks.train.survival.notices import Watcher, servers_of
from tasks.train.survival.reproducibility import conditions, departure


def run(
    *,
    prepared: Path,
    model: ModelConfig,
    training: TrainingConfig,
    directory: Path,
    checkpoints_home: str,
    previous_checkpoints: str = "",
    execution: str = "",
    notices: str = "none",
    made_by: Mapping[str, Any],
) -> None:
    """Train on the prepared data, whole or a stub, and write the trained model into ``directory`` (rank 0 does).

    ``checkpoints_home`` is where this attempt keeps its checkpoints (a path or an ``s3://`` URI); it goes on from the
    newest one it finds there or under ``previous_checkpoints``; ``execution`` names the run of which this is an
    attempt. ``notices`` is the cloud whose preemption notices are watched for ("auto" finds it, "none" does not look).
    Raises :class:`~tasks.distributed.agreement.AgreedRefusal` on all ranks when a user's mistake was found on any, and
    :class:`~tasks.train.survival.guard.Preempted` when a machine is taken away.
    """
    started = time.perf_counter()
    end_with_agent()
    with Watcher(servers_of(notices)) as watcher, process_group() as group:
        with together():
            data = open_prepared(prepared)
            check_rows(data)
            predictor = build(model, data.signature, training.seed)
            precision = resolve_precision(training.precision, group.device)
        predictor.to(group.device)
        state = TrainingState(
            model=predictor,
            optimizer=make_optimizer(predictor, training),
            scaler=scaler(precision, group.device),
            best_weights=weights_of(predictor),
            progress=Progress(),
            conditions=conditions(training, group),
        )
        # From here on only dropout and the like draw random numbers, and each rank draws its own. A user's model may
        # draw from Python's and NumPy's generators: left alone they would differ from run to run.
        seed_generators(training.seed * 1_000_003 + group.rank + 1)
        ddp = DistributedDataParallel(predictor, device_ids=[group.device] if group.device.type == "cuda" else None)
        settle_buckets(ddp, state, group)
        checkpoints = Checkpoints(
            training.checkpoint_uri or checkpoints_home,
            previous=previous_checkpoints,
            model=predictor,
            optimizer=state.optimizer,
            parts={"scaler": state.scaler},
            identity=identity(data, model, training),
            run=execution,
            resume=training.resume,
        )
        ledger = Ledger(
            checkpoints.home,
            checkpoints.attempt,
            group.world,
            writes=group.rank == 0,
            started=started,
            previous=checkpoints.previous,
        )
        with ledger.time(RESTORE):
            restored = checkpoints.restore()
        if restored:
            take_up(restored, state, group)
            if group.rank == 0:
                print(f"train        goes on from step {restored.step} ({restored.source})", flush=True)
                if changed := departure(restored.progress.get("conditions", {}), state.conditions, predictor):
                    print(f"train        {changed}", flush=True)
        checkpoints.prepare(to_save(state))
        guard = Guard(checkpoints, interval(training, data), watcher, ledger)
        first_step = state.progress.step
        guard.begin(first_step)
        try:
            train_loop(ddp, state, data, training, group, precision, guard, ledger)
            checkpoints.finish()
        except Preempted:
            raise
        except Exception as error:
            ledger.end(f"{type(error).__name__}: {error}")
            raise
        guard.close()
        account = ledger.account()
        checkpoints.close()
        if group.rank == 0:
            write_trained(
                directory,
                config=model,
                signature=data.signature,
                best=state.best_weights,
                last=state.model.state_dict(),
                history=history(state, group, precision),
                attempt={
                    "steps": state.progress.step - first_step,
                    "resumed_from": restored.source if restored else "",
                    "ledger": account.to_json(),
                },
                made_by=made_by,
            )
            print(f"train        {account}", flush=True)
        dist.barrier()


def check_rows(data: PreparedData) -> None:
    """Raise ``UserError`` if there is nothing to train on or nothing to choose the best weights by."""
    for split in ("train", "validation"):
        if not sum(data.segment_rows(split)):
            raise UserError(f"data.split: no row fell into the {split} split; give more rows or larger shares")


def identity(data: PreparedData, model: ModelConfig, training: TrainingConfig) -> dict[str, Any]:
    """What has to be equal for a checkpoint to be continued: all but how work is cut up and how often it is saved."""
    free = {
        *("accumulation", "checkpoint_every", "checkpoint_seconds", "mean_time_between_failures"),
        *("checkpoint_uri", "resume"),
    }
    settings = {name: value for name, value in to_dict(training).items() if name not in free}
    return {
        "data": data.artifact.fingerprint,
        "model": to_dict(model),
        "order": ORDER_VERSION,
        "training": settings,
    }


def interval(training: TrainingConfig, data: PreparedData) -> Interval:
    """When to save, by whichever of the settings is there; without any, once an epoch."""
    if training.checkpoint_seconds or training.mean_time_between_failures:
        return Interval(
            seconds=training.checkpoint_seconds,
            mean_time_between_failures_s=training.mean_time_between_failures,
        )
    epoch = math.ceil(sum(data.segment_rows("train")) / training.batch_size)
    return Interval(steps=training.checkpoint_every or epoch)


def history(state: TrainingState, group: Group, precision: str) -> dict[str, Any]:
    """The course of training, without any time of day: equal for equal runs."""
    progress = state.progress
    return {
        "steps": progress.steps,
        "evaluations": progress.evaluations,
        "best": progress.best,
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
    }
