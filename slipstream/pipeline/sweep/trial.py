"""Training of one trial in its own process, which reports to its parent."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.records import CurvePoint
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.training import KIND, ValidationPoint
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.child_processes import end_with_parent
from slipstream.shared.distributed.user_errors import torch_user_error
from slipstream.shared.errors import Interrupted, OutOfMemory, Preempted, UserError
from slipstream.shared.storage import StorageUnavailable

#: File name of the best weights in a trained model.
WEIGHTS = "best.safetensors"


@dataclass(frozen=True)
class TrialJob:
    """One attempt at a trial, as passed to its process."""

    prepared: Path
    config: RunConfig
    #: Empty directory for the trained model.
    directory: Path
    #: Checkpoint directory of the trial, and the worker that holds its lease.
    home: str
    holder: Holder
    #: Index of this process on the machine, which selects its GPU, if there are any.
    slot: int
    notices: str
    grace_s: float
    #: File for the process's output and logs.
    log: Path


@dataclass(frozen=True)
class TrialOutcome:
    """How an attempt ended.

    Only the first three states end the trial. The others mean: this machine is preempted, another attempt has started,
    the store is unavailable, or the next attempt needs smaller micro-batches.
    """

    state: Literal["complete", "pruned", "failed", "preempted", "superseded", "unavailable", "out of memory"]
    reason: str = ""
    weights: str = ""
    #: Micro-batch count that ran out of memory in a step.
    micro_batches: int = 0


def train_trial(link: Connection, job: TrialJob) -> None:
    """Run a trial's process.

    It sends lists of :class:`CurvePoint`, receives after each list whether to stop, and finally sends a
    :class:`TrialOutcome`.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent decides
    said = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(said, stream)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": str(job.slot), "LOCAL_WORLD_SIZE": "1"}
    os.environ.update({**alone, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    link.send(attempt_trial(link, job))


def attempt_trial(link: Connection, job: TrialJob) -> TrialOutcome:
    from slipstream.pipeline.train.identity import run_identity
    from slipstream.pipeline.train.loop.train_loop import Stopped
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.pipeline.train.run import run_attempt

    def told(evaluations: Sequence[ValidationPoint]) -> bool:
        link.send(curve_of(evaluations, job.config.training.metric))
        return bool(link.recv())

    try:
        from slipstream.shared.artifacts.prepared.streamed import open_prepared
        from slipstream.shared.models.base.directory import ModelOrigin

        data = open_prepared(job.prepared)
        config = job.config.for_data(data)
        model, training, origin = config.model, config.for_training(), ModelOrigin(config.model)
        request = TrainingRequest(
            prepared=job.prepared,
            model=model,
            training=training,
            directory=job.directory,
            home=job.home,
            made_by={"sweep": run_identity(data, model, training, base_digest=origin.digest)},
            holder=job.holder,
            notices=job.notices,
            grace_s=job.grace_s,
            told=told,
            opened=origin,
        )
        run_attempt(request)
        return TrialOutcome("complete", weights=Artifact.open(job.directory, KIND).files[WEIGHTS].sha256)
    except Stopped:
        return TrialOutcome("pruned")
    except Preempted as error:
        return TrialOutcome("preempted", str(error))
    except OutOfMemory as error:
        return TrialOutcome("out of memory", str(error), micro_batches=error.micro_batches)
    except Interrupted as error:
        return TrialOutcome("superseded", str(error))
    except StorageUnavailable as error:
        return TrialOutcome("unavailable", str(error))
    except Exception as error:
        traceback.print_exc()
        mistake = error if isinstance(error, UserError) else torch_user_error(error)
        return TrialOutcome("failed", mistake.message if mistake else f"{type(error).__name__}: {error}")


def curve_of(evaluations: Sequence[ValidationPoint], metric: str) -> list[CurvePoint]:
    best, points = float("inf"), []
    for each in evaluations:
        cost = each.cost(metric)
        best = min(best, cost)
        points.append(CurvePoint(round(1000 * each.epoch), cost, best))
    return points
