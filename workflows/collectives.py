"""Workflows that only measure the interconnect, to find a slow link before a training."""

from __future__ import annotations

from slipstream.config import RunConfig
from slipstream.flyte.compat import patch_command_line
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.report.summary import NetworkSummary, TuningSummary
from tasks.collectives import compare_collectives, measure_collectives, tune_collectives
from tasks.prepare import list_data, prepare_listed
from tasks.report import report_network, report_tuning

patch_command_line()


@profile_workflow
def benchmark(config: CollectivesConfig = CollectivesConfig()) -> NetworkSummary:  # noqa: B008
    """Measure collectives between the processes of a training, and write the network profile.

    Args:
        config: settings of the benchmark (the section "collectives")
    """
    return report_network(network=measure_collectives(config=config))


@profile_workflow
def compare(config: CollectivesConfig = CollectivesConfig()) -> NetworkSummary:  # noqa: B008
    """Repeat ``benchmark`` until it is clear whether the interconnect is slower than its history.

    Args:
        config: settings of the benchmark (the section "collectives")
    """
    return report_network(network=compare_collectives(config=config))


@profile_workflow
def tune(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> TuningSummary:  # noqa: B008
    """Search for interconnect settings with faster training steps for ``train_and_export``.

    Args:
        data: a file, a directory or a URI; empty: the handwritten digits that come with scikit-learn
        target: the column to predict
        config: the configuration of the training
    """
    prepared = prepare_listed(list_data(data=data, target=target, config=config), target)
    return report_tuning(tuned=tune_collectives(prepared=prepared.artifact, config=config))
