"""Scoring: the model in service on new rows, as a table; and a new training if they are distributed otherwise."""

from __future__ import annotations

from flytekit import conditional, workflow

from slipstream.config import RunConfig
from slipstream.report.scoring_summary import ScoringSummary
from tasks.score import after_training, score_rows, without_training
from workflows.command_line import prepare_pyflyte
from workflows.training import train_and_promote

prepare_pyflyte()


@workflow
def score(
    data: str,
    output: str,
    registry: str = "",
    model: str = "",
    config: RunConfig = RunConfig(),  # noqa: B008
) -> ScoringSummary:
    """Score ``data`` with the model in service in ``registry`` (or the exported ``model``, a directory or a store's
    address) and publish the table in ``output``, unless the same was published before.

    Of ``config`` only the sections ``data`` (how rows are read) and ``scoring`` count, so the file of a training will
    do.
    """
    return score_rows(registry, model, data, output, config).summary


@workflow
def train_again(summary: ScoringSummary, registry: str, data: str, target: str, config: RunConfig) -> ScoringSummary:
    """:func:`train_and_promote`, as rows that were scored drifted."""
    return after_training(
        summary=summary, run=train_and_promote(registry=registry, data=data, target=target, config=config)
    )


@workflow
def retrain_if_drifted(
    registry: str,
    data: str,
    output: str,
    training_data: str,
    target: str,
    config: RunConfig = RunConfig(),  # noqa: B008
) -> ScoringSummary:
    """:func:`score`, and if a column or the predictions drifted, :func:`train_and_promote` on ``training_data``."""
    scored = score_rows(registry, "", data, output, config)
    return (
        conditional("drift")
        .if_(scored.drifted.is_true())
        .then(train_again(summary=scored.summary, registry=registry, data=training_data, target=target, config=config))
        .else_()
        .then(without_training(summary=scored.summary))
    )
