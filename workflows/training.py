"""The main job, from raw data to a quantised model in production, and its stages as separate workflows."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple

from flytekit import StructuredDataset, conditional, map_task
from flytekit.core.promise import Promise

from slipstream.config import FineTuneConfig, RunConfig
from slipstream.flyte.compat import patch_command_line
from slipstream.flyte.metadata import profile_workflow
from slipstream.pipeline.report.summary import CompressionSummary, DataSummary, ExportSummary, RunSummary
from tasks.collectives import benchmark_collectives
from tasks.config import read_config, with_base
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.inputs import open_inputs, resolve_inputs
from tasks.prepare import list_data, open_dataset, prepare_listed
from tasks.promote import judge, leave_in_service, open_registry, put_in_service
from tasks.report import report, report_compression, report_data, report_export
from workflows.compression import compress, train_as_asked

patch_command_line()


@profile_workflow
def train_and_export(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> RunSummary:  # noqa: B008
    """Prepare, train (and compress, if requested), evaluate, export, benchmark the interconnect, report.

    Args:
        data: a file, a directory or a URI; empty: the handwritten digits that come with scikit-learn
        target: the column to predict
        config: the configuration of all stages
    """
    start = RunStart(data, target, config)
    return report_run(run_stages(start), start)


@profile_workflow
def fine_tune(base: str, data: str = "", config: FineTuneConfig = FineTuneConfig()) -> RunSummary:  # noqa: B008
    """Fine-tune a language model on documents or conversations, then run the stages of ``train_and_export``.

    Args:
        base: the model and its tokenizer: a directory or a store's address
        data: a file, a directory or a URI
        config: the configuration of all stages; what it lacks has the defaults of adapters of rank 16
    """
    return train_and_export(data=data, target="", config=with_base(base=base, config=config))


class RunStart(NamedTuple):
    """Inputs of a run; a scheduled one has the schedule ``cron`` and the time ``kickoff``."""

    data: str
    target: str
    config: RunConfig
    cron: str = ""
    kickoff: datetime | None = None


class StageNodes(NamedTuple):
    """Workflow nodes of the stages before the report."""

    prepared: Promise
    trained: Promise
    evaluated: Promise
    exported: Promise
    networks: Promise


def run_stages(start: RunStart) -> StageNodes:
    """Build the workflow nodes of all stages before the report."""
    given = resolve_inputs(data=start.data, target=start.target, config=start.config, kickoff=start.kickoff)
    return stages_after_preparation(prepare_listed(given, start.target), given, given.machine)


def stages_after_preparation(prepared: Promise, sections: Promise, machine: Promise) -> StageNodes:
    """Build the workflow nodes from training to the benchmark.

    ``sections`` are those of a configuration; ``machine`` describes the pod of the export.
    """
    trained = train_as_asked(
        prepared=prepared.artifact,
        model=sections.model,
        training=sections.training,
        code=sections.model_code,
        most_parameters=sections.most_parameters,
        config=sections.config,
    )
    evaluated = evaluate(
        trained=trained.artifact, prepared=prepared.artifact, factory=sections.factory, code=sections.model_code
    )
    exported = export(
        trained=trained.artifact,
        prepared=prepared.artifact,
        config=sections.export,
        machine=machine,
        factory=sections.factory,
        code=sections.model_code,
    )
    # An element of a map task may fail: a failed benchmark must not lose a finished training.
    networks = map_task(benchmark_collectives, min_success_ratio=0.0)(config=[sections.collectives])
    # Both are PyTorchJobs that need all GPUs of the profile: in parallel each could hold half and deadlock.
    trained.artifact >> networks
    return StageNodes(prepared, trained, evaluated, exported, networks)


def report_run(
    nodes: StageNodes, start: RunStart, promotion: Promise | None = None, sweep: Promise | None = None
) -> RunSummary:
    """Build the node of the report, the result of the run."""
    return report(
        prepared=nodes.prepared.artifact,
        trained=nodes.trained.artifact,
        evaluated=nodes.evaluated.artifact,
        exported=nodes.exported.artifact,
        networks=nodes.networks,
        stages=[nodes.prepared.run, nodes.trained.run, nodes.evaluated.run, nodes.exported.run],
        compression=nodes.trained.compression,
        config=start.config,
        data=start.data,
        target=start.target,
        cron=start.cron,
        kickoff=start.kickoff,
        promotion=promotion,
        sweep=sweep,
    )


@profile_workflow
def train_and_promote(
    registry: str,
    data: str = "",
    target: str = "",
    config: RunConfig = RunConfig(),  # noqa: B008
) -> RunSummary:
    """Run ``train_and_export``, and promote the model if it is shown not to be worse than the model in production.

    Otherwise the report says why.

    Args:
        registry: a directory or a store's address
        data: a file, a directory or a URI; empty: the handwritten digits that come with scikit-learn
        target: the column to predict
        config: the configuration of all stages
    """
    return run_and_promote(registry, RunStart(data, target, config))


def run_and_promote(registry: str, start: RunStart) -> RunSummary:
    """Build the workflow nodes of a run, of its promotion and of its report."""
    found = open_registry(registry=registry, config=start.config)
    nodes = run_stages(start)
    judged = judge(
        exported=nodes.exported.artifact,
        prepared=nodes.prepared.artifact,
        evaluated=nodes.evaluated.artifact,
        registry=found,
        config=start.config,
    )
    promotion = (
        conditional("promotion")
        .if_(judged.passed.is_true())
        .then(put_in_service(request=judged.request, config=start.config, verdict=judged.verdict))
        .else_()
        .then(leave_in_service(request=judged.request, verdict=judged.verdict))
    )
    return report_run(nodes, start, promotion=promotion)


@profile_workflow
def prepare(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> DataSummary:  # noqa: B008
    """Prepare the data as ``train_and_export`` does, and write the data card.

    Args:
        data: a file, a directory or a URI; empty: the handwritten digits that come with scikit-learn
        target: the column to predict
        config: only the section "data" is used, so a training's configuration works
    """
    prepared = prepare_listed(list_data(data=data, target=target, config=config), target)
    return report_data(prepared=prepared.artifact, stages=[prepared.run])


@profile_workflow
def export_model(model: str, data: str, config: RunConfig = RunConfig()) -> ExportSummary:  # noqa: B008
    """Export a trained model as ``train_and_export`` does.

    Args:
        model: the trained model: a directory or a store's address
        data: the prepared data: a directory or a store's address
        config: only the section "export" is used. For a model of your own, "model.name" must name its factory, as a
            factory named only in the trained model never runs
    """
    sections = read_config(config=config)
    given = open_inputs(model=model, data=data)
    exported = export(
        trained=given.trained,
        prepared=given.prepared,
        config=sections.export,
        machine=given.machine,
        factory=sections.factory,
        code=sections.model_code,
    )
    return report_export(exported=exported.artifact, stages=[exported.run])


@profile_workflow
def prune(model: str, data: str, config: RunConfig = RunConfig()) -> CompressionSummary:  # noqa: B008
    """Remove units of a trained model and train it further with the unpruned model as its teacher.

    Args:
        model: the trained model: a directory or a store's address
        data: the prepared data: a directory or a store's address
        config: only the sections "compression" and "training" are used. For a model of your own, "model.name" must
            name its factory, as a factory named only in the trained model never runs
    """
    given, sections = open_inputs(model=model, data=data), read_config(config=config, method="prune")
    made = compress(trained=given.trained, prepared=given.prepared, config=sections.config)
    return report_compression(compression=made.compression)


@profile_workflow
def distil(model: str, data: str, config: RunConfig = RunConfig()) -> CompressionSummary:  # noqa: B008
    """Train a smaller model with a trained model as its teacher.

    Args:
        model: the trained model: a directory or a store's address
        data: the prepared data: a directory or a store's address
        config: the sections that ``prune`` uses
    """
    given, sections = open_inputs(model=model, data=data), read_config(config=config, method="distil")
    made = compress(trained=given.trained, prepared=given.prepared, config=sections.config)
    return report_compression(compression=made.compression)


@profile_workflow
def train_on_dataset(dataset: StructuredDataset, target: str, config: RunConfig = RunConfig()) -> RunSummary:  # noqa: B008
    """Run ``train_and_export`` on a dataset that an upstream task returned.

    Args:
        dataset: a StructuredDataset of Parquet or a DataFrame
        target: the column to predict
        config: the configuration of all stages
    """
    opened = open_dataset(dataset=dataset, target=target, config=config)
    return train_and_export(data=opened.data, target=target, config=opened.config)


@profile_workflow
def prepare_dataset(dataset: StructuredDataset, target: str, config: RunConfig = RunConfig()) -> DataSummary:  # noqa: B008
    """Run ``prepare`` on a dataset that an upstream task returned.

    Args:
        dataset: a StructuredDataset of Parquet or a DataFrame
        target: the column to predict
        config: only the section "data" is used
    """
    opened = open_dataset(dataset=dataset, target=target, config=config)
    return prepare(data=opened.data, target=target, config=opened.config)
