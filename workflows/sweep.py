"""Hyperparameter search by many short trainings; the best settings are then trained, exported and reported."""

from __future__ import annotations

from functools import partial

from flytekit import map_task

from slipstream.config import RunConfig
from slipstream.flyte.compat import patch_command_line
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.report.summary import RunSummary
from tasks.config import read_config
from tasks.inputs import resolve_inputs
from tasks.prepare import prepare_listed
from tasks.sweep import begin_sweep, choose_settings, compare_with_given, search
from workflows.training import RunStart, report_run, stages_after_preparation

patch_command_line()


@profile_workflow
def sweep(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> RunSummary:  # noqa: B008
    """Search settings by many trainings, then train, export and report with the best settings.

    A restarted sweep resumes.

    Args:
        data: a file, a directory or a URI; empty: the handwritten digits that come with scikit-learn
        target: the column to predict
        config: the configuration; the section "sweep" has the search space
    """
    return search_and_run(RunStart(data, target, config))


def search_and_run(start: RunStart) -> RunSummary:
    """Build the workflow nodes of a sweep, of the run with the best settings and of its report."""
    given = resolve_inputs(data=start.data, target=start.target, config=start.config, kickoff=start.kickoff)
    prepared = prepare_listed(given, start.target)
    begun = begin_sweep(prepared=prepared.artifact, config=start.config)
    # Other workers run the trials of a failed one: all trials are done if one worker found none left.
    work = map_task(
        partial(search, store=begun.store, prepared=prepared.artifact, config=start.config), min_success_ratio=0.0
    )
    chosen = choose_settings(store=begun.store, searched=work(worker=begun.workers), config=start.config)
    best = read_config(config=chosen.config)
    nodes = stages_after_preparation(prepared, best, given.machine)
    found = compare_with_given(
        trained=nodes.trained.artifact,
        prepared=prepared.artifact,
        store=begun.store,
        config=start.config,
        factory=best.factory,
        seconds=chosen.seconds,
    )
    return report_run(nodes, start._replace(config=chosen.config), sweep=found)
