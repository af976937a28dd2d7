"""Flyte tasks of scoring, divided by files among pods.

None is cached, but a published table is not scored again.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from flytekit import map_task, task
from flytekit.core.promise import Promise

from slipstream.config import RunConfig
from slipstream.flyte.artifact_types import Part
from slipstream.flyte.metadata import stage_metadata
from slipstream.flyte.stage import fresh_directory, local_path, map_errors, output_directory, runs_locally
from slipstream.pipeline.report.summary import RunSummary, ScoringSummary
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.source.dates import dated_address
from slipstream.shared.storage import STORES
from tasks.prepare import SHARES_OF_A_POD


def count_scoring_pods() -> int:
    """Return the number of pods that score files, from the profile."""
    return current_profile().placement("score").nodes


class OpenedScoring(NamedTuple):
    """Plan of a scoring, and its shares; a single share without files if the table is already published."""

    plan: Part
    shares: list[Part]


@task(**stage_metadata("fingerprint"))
@map_errors
def open_scoring(
    registry: str, model: str, data: str, output: str, config: RunConfig, kickoff: datetime | None
) -> OpenedScoring:
    """Check the model and the files, and divide the files into shares.

    Never cached, since the model in production and the bytes at an address may change.
    """
    from slipstream.pipeline.score.plan import plan_scoring
    from slipstream.pipeline.score.publish import find_publication
    from slipstream.shared.artifacts import exchange

    if not (runs_locally() or output.startswith(STORES) or Path(output).is_absolute()):
        raise UserError(f"output: {output!r} would be lost with its pod; expected a store's address, or a mounted path")
    data = dated_address("data", data, kickoff)
    plan = plan_scoring(registry, model, data, output, config.data, config.scoring)
    number = SHARES_OF_A_POD * count_scoring_pods() if count_scoring_pods() > 1 else 1
    # One empty share: Flyte does not document a map over an empty list.
    shares = [replace(plan, portions=())] if find_publication(output, plan.key) else plan.shares(number)
    written = [exchange.write_part(fresh_directory(f"share-{index:05d}"), share) for index, share in enumerate(shares)]
    return OpenedScoring(
        output_directory(exchange.write_part(fresh_directory("plan"), plan)),
        [output_directory(each) for each in written],
    )


@task(**stage_metadata("score"))
@map_errors
def score_share(share: Part) -> Part:
    """Score the files of one share, and write their part of the table."""
    from slipstream.pipeline.score.plan import ScoringPlan
    from slipstream.pipeline.score.publish import ScoredShare, score_portions
    from slipstream.shared.artifacts import exchange

    plan = exchange.read_part(local_path(share), ScoringPlan)
    return output_directory(exchange.write_part(fresh_directory("scored"), ScoredShare(score_portions(plan))))


class PublishedScoring(NamedTuple):
    """Published table; ``drifted``, a plain value on which Flyte can branch, is True if it has alarms."""

    summary: ScoringSummary
    drifted: bool


@task(**stage_metadata("fingerprint"))
@map_errors
def publish_scores(plan: Part, scored: list[Part]) -> PublishedScoring:
    """Publish the table unless it is already published."""
    from slipstream.pipeline.score.plan import ScoringPlan
    from slipstream.pipeline.score.publish import (
        ScoredShare,
        fetched_model,
        find_publication,
        publish_table,
        read_scored,
        table_prefix,
    )
    from slipstream.shared.artifacts import exchange

    planned = exchange.read_part(local_path(plan), ScoringPlan)
    parts = [part for share in scored for part in exchange.read_part(local_path(share), ScoredShare).parts]
    publication, new = find_publication(planned.output, planned.key), False
    if publication is None:
        with fetched_model(planned) as model:
            publication, new = publish_table(planned, parts, model)
    table = read_scored(planned.output, publication)
    where = f"{planned.output.rstrip('/')}/{table_prefix(planned.key)}".rstrip("/")
    summary = ScoringSummary(planned.output, where, publication, new, table)
    return PublishedScoring(summary, bool(table.drift.alarms))


@task(**stage_metadata("report"))
@map_errors
def after_training(summary: ScoringSummary, run: RunSummary) -> ScoringSummary:
    """Return the summary with the outcome of the retraining that a drift caused."""
    promotion = run.promotion
    done = f"version {promotion.version} is in service" if promotion and promotion.promoted else "the model stays"
    why = f": {promotion.why}" if promotion else ""
    return replace(summary, retrained=f"yes, rows drifted; {done}{why}; see {run.directory}")


@task(**stage_metadata("report"))
@map_errors
def without_training(summary: ScoringSummary) -> ScoringSummary:
    """Return the summary with the reason for not retraining."""
    unknown = "the drift is unknown" if summary.scored.drift.unknown else "no rows drifted"
    return replace(summary, retrained=f"no, {unknown}")


class ScoringStart(NamedTuple):
    """Inputs of a scoring; a scheduled one has the time ``kickoff``."""

    registry: str
    model: str
    data: str
    output: str
    config: RunConfig
    kickoff: datetime | None = None


def score_rows(start: ScoringStart) -> Promise:
    """Build the workflow nodes that score and publish."""
    opened = open_scoring(
        registry=start.registry,
        model=start.model,
        data=start.data,
        output=start.output,
        config=start.config,
        kickoff=start.kickoff,
    )
    # All must succeed: without one share it would be another table.
    score = map_task(score_share, concurrency=count_scoring_pods(), min_success_ratio=1.0)
    return publish_scores(plan=opened.plan, scored=score(share=opened.shares))
