"""Scoring: plan, score every part in worker processes, publish the table once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.part import ScoredPart, ScorePartJob, score_part
from slipstream.pipeline.score.plan import ScoringPlan, plan_scoring, public_key
from slipstream.pipeline.score.publish import find_publication, publish_table
from slipstream.shared.artifacts.results.scoring import Publication
from slipstream.shared.artifacts.workspaces import temporary_workspace
from slipstream.shared.distributed.pool import WorkerPool, workers_for
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import files_unchanged
from slipstream.shared.storage import Storage, storage_for
from slipstream.shared.storage.local import LocalStorage


@dataclass(frozen=True)
class ScoredShare:
    """Results of one worker's portions."""

    parts: list[ScoredPart]


def score_data(
    registry: str,
    data: str,
    output: str,
    reading: DataConfig,
    config: ScoringConfig,
    package: str = "",
    workers: int | None = None,
) -> tuple[Publication, bool]:
    """Score ``data`` and publish the table in ``output``.

    The model is the promoted one of ``registry``, or the exported ``package``. Returns the publication, and True if it
    is new. Raises ``UserError`` for invalid input.
    """
    plan = plan_scoring(registry, package, data, output, reading, config)
    there = find_publication(output, plan.key)
    if there:
        return there, False
    parts = score_portions(plan, workers)
    with fetched_model(plan) as model:
        return publish_table(plan, parts, model)


def score_portions(plan: ScoringPlan, workers: int | None = None) -> list[ScoredPart]:
    """Score the portions of a plan and store their parts.

    By default the number of processes follows from the amount of data; every session has one thread.
    """
    if not plan.portions:
        return []
    files = [file for portion in plan.portions for file in portion.files]
    count = workers_for(plan.size, plan.source.config.memory) if workers is None else workers
    with (
        files_unchanged(files),
        fetched_model(plan) as model,
        scratch_of(storage_for(plan.output)) as scratch,
        closing(WorkerPool(min(count, len(plan.portions)), "slipstream.pipeline.score.part")) as processes,
    ):
        jobs = (ScorePartJob(plan, portion, model.directory, Path(scratch)) for portion in plan.portions)
        return list(processes.map(score_part, jobs))


@contextmanager
def fetched_model(plan: ScoringPlan) -> Iterator[ServedModel]:
    """Yield the plan's model, verified, until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        yield plan.model.fetch(Path(scratch, "model"), public_key(plan.config))


def scratch_of(storage: Storage) -> AbstractContextManager[Path | str]:
    """Return a directory for parts.

    For a local output it is in the output's file system, and a later run removes it if this process is killed. For a
    store it is temporary.
    """
    if isinstance(storage, LocalStorage):
        return temporary_workspace(storage.scratch())
    return tempfile.TemporaryDirectory(dir=storage.scratch())
