"""The main job: raw data to a quantised, measured, deployable model."""

from __future__ import annotations

from flytekit import workflow

from tasks.collectives.task import benchmark_collectives
from tasks.config import RunConfig
from tasks.evaluate.task import evaluate
from tasks.export.task import export
from tasks.preprocess.task import fingerprint, prepare
from tasks.report.summary import RunSummary
from tasks.report.task import report
from tasks.train.task import fingerprint_model_code, train


@workflow
def train_and_export(data: str = "", target: str = "", config: RunConfig = RunConfig()) -> RunSummary:  # noqa: B008
    """preprocess, train, evaluate, export, benchmark the interconnect, report.

    ``data`` is a file, a directory or a URI (empty: the handwritten digits that come with scikit-learn), ``target``
    the column to predict.
    """
    source = fingerprint(data=data, target=target, config=config.data)
    code = fingerprint_model_code(model=config.model)
    prepared = prepare(data=data, target=target, config=config.data, source=source)
    trained = train(prepared=prepared.artifact, model=config.model, training=config.training, code=code)
    evaluated = evaluate(trained=trained.artifact, prepared=prepared.artifact)
    exported = export(trained=trained.artifact, prepared=prepared.artifact, config=config.export)
    network = benchmark_collectives(config=config.collectives)
    # Both are PyTorchJobs that want every GPU of the profile: side by side each could hold half and wait for ever.
    trained.artifact >> network.artifact
    return report(
        prepared=prepared.artifact,
        trained=trained.artifact,
        evaluated=evaluated.artifact,
        exported=exported.artifact,
        network=network.artifact,
        stages=[prepared.run, trained.run, evaluated.run, exported.run, network.run],
        config=config,
        data=data,
        target=target,
    )
