"""The interconnect alone: measured by itself, so that a slow link is seen before a training pays for it."""

from __future__ import annotations

from flytekit import workflow

from tasks.collectives.config import CollectivesConfig
from tasks.collectives.task import measure_collectives
from tasks.report.summary import NetworkSummary
from tasks.report.task import report_network
from workflows.command_line import prepare_pyflyte

prepare_pyflyte()


@workflow
def benchmark(config: CollectivesConfig = CollectivesConfig()) -> NetworkSummary:  # noqa: B008
    """Measure the collectives in the process group that the profile gives training, and keep the network profile."""
    return report_network(network=measure_collectives(config=config))
