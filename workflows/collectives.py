"""The interconnect alone: measured by itself, so that a slow link is seen before a training pays for it."""

from __future__ import annotations

from flytekit import workflow

from slipstream.collectives.config import CollectivesConfig
from slipstream.config import RunConfig
from slipstream.report.summary import NetworkSummary, TuningSummary
from tasks.collectives import compare_collectives, measure_collectives, tune_collectives
from tasks.prepare import list_data, prepare_listed
from tasks.report import report_network, report_tuning
from workflows.command_line import prepare_pyflyte

prepare_pyflyte()


@workflow
def benchmark(config: CollectivesConfig = CollectivesConfig()) -> NetworkSummary:  # noqa: B008
    """Measure the collectives in the process group that the profile gives training, and keep the network profile."""
    return report_network(network=measure_collectives(config=config))


@workflow
def compare(config: CollectivesConfig = CollectivesConfig()) -> NetworkSummary:  # noqa: B008
    """:func:`benchmark`, until it is clear whether the network is slower than the history says it was."""
    return report_network(network=compare_collectives(config=config))


@workflow
def tune(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> TuningSummary:  # noqa: B008
    """Find settings with which the training of :func:`workflows.training.train_and_export` takes faster steps."""
    prepared = prepare_listed(list_data(data=data, target=target, config=config), target)
    return report_tuning(tuned=tune_collectives(prepared=prepared.artifact, config=config))
