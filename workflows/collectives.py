"""The interconnect alone: measured by itself, so that a slow link is seen before a training pays for it."""

from __future__ import annotations

from flytekit import workflow

from tasks.collectives.config import CollectivesConfig
from tasks.collectives.task import benchmark_collectives, tabulate
from workflows.command_line import prepare_pyflyte

prepare_pyflyte()


@workflow
def measure_collectives(config: CollectivesConfig = CollectivesConfig()) -> str:  # noqa: B008
    """Measure the collectives in the process group that the profile gives training; the result is a table to read."""
    return tabulate(network=benchmark_collectives(config=config))
