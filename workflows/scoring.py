"""Workflows that score new rows with the model in production, and retrain if the rows drift."""

from __future__ import annotations

from flytekit import conditional

from slipstream.config import RunConfig
from slipstream.flyte.compat import patch_command_line
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.report.summary import ScoringSummary
from tasks.score import ScoringStart, after_training, score_rows, without_training
from workflows.training import train_and_promote

patch_command_line()


@profile_workflow
def score(
    data: str,
    output: str,
    registry: str = "",
    model: str = "",
    config: RunConfig = RunConfig(),  # noqa: B008
) -> ScoringSummary:
    """Score rows with a model and publish the table, unless the same table is already published.

    Args:
        data: the rows: a file, a directory or a URI
        output: a directory or a store's address for the table
        registry: the registry with the model in production
        model: an exported model (a directory or a store's address) instead of a registry
        config: only the sections "data" (how rows are read) and "scoring" are used, so a training's configuration works
    """
    return score_rows(ScoringStart(registry, model, data, output, config)).summary


@profile_workflow
def train_again(summary: ScoringSummary, registry: str, data: str, target: str, config: RunConfig) -> ScoringSummary:
    """Run ``train_and_promote`` after scored rows drifted."""
    return after_training(
        summary=summary, run=train_and_promote(registry=registry, data=data, target=target, config=config)
    )


@profile_workflow
def retrain_if_drifted(
    registry: str,
    data: str,
    output: str,
    training_data: str,
    target: str,
    config: RunConfig = RunConfig(),  # noqa: B008
) -> ScoringSummary:
    """Score rows as ``score`` does, and run ``train_and_promote`` if a column or the predictions drifted.

    Args:
        registry: the registry with the model in production
        data: the rows to score: a file, a directory or a URI
        output: a directory or a store's address for the table
        training_data: the data for a new training
        target: the column to predict
        config: the configuration of the scoring and of a new training
    """
    return score_and_retrain(ScoringStart(registry, "", data, output, config), training_data, target)


def score_and_retrain(start: ScoringStart, training_data: str, target: str) -> ScoringSummary:
    """Build the workflow nodes of a scoring and of the training after a drift."""
    scored = score_rows(start)
    return (
        conditional("drift")
        .if_(scored.drifted.is_true())
        .then(
            train_again(
                summary=scored.summary,
                registry=start.registry,
                data=training_data,
                target=target,
                config=start.config,
            )
        )
        .else_()
        .then(without_training(summary=scored.summary))
    )
