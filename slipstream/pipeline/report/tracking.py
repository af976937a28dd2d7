"""Figures of a run for TensorBoard and MLflow, written once the run has ended.

A thread talks to MLflow for at most :data:`LONGEST_S`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from slipstream.pipeline.report.run_directory import MODEL, REPORT, SUMMARY, RunOrigin, flat
from slipstream.pipeline.report.summary import RunSummary
from slipstream.shared.artifacts.results.training import History
from slipstream.shared.errors import first_line
from slipstream.shared.logs import logger
from slipstream.shared.one_line import without_secrets

LOG = logger("report")
EVENTS = "tensorboard"
#: Variables of MLflow: address of its store or server, and name of the experiment.
ADDRESS, EXPERIMENT = "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"
#: Seconds after which a run no longer waits for MLflow.
LONGEST_S = 10.0
#: Settings of MLflow's client, unless they are set: short requests without retries, and no usage statistics.
QUIET = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
#: Limits of MLflow: entries per request, and characters of a parameter.
MOST_METRICS, MOST_PARAMETERS, LONGEST_VALUE = 1000, 100, 500


def metrics_by_step(history: History) -> Iterator[tuple[str, float, int]]:
    """Yield name, value and optimiser step of every point of the history."""
    for point in history.steps:
        yield "train/loss", point.loss, point.step
        yield "train/learning_rate", point.learning_rate, point.step
    for evaluated in history.evaluations:
        for name, value in vars(evaluated).items():
            if name not in ("step", "epoch") and isinstance(value, float):
                yield f"validation/{name}", value, evaluated.step


def write_events(directory: Path, history: History) -> None:
    """Write TensorBoard's events below ``directory``; do nothing without the package tensorboard."""
    if find_spec(EVENTS) is None:
        return
    from tensorboard.summary import Writer

    writer = Writer(str(directory / EVENTS))
    for name, value, step in metrics_by_step(history):
        writer.add_scalar(name, value, step)
    writer.close()


def track_run(summary: RunSummary, history: History, origin: RunOrigin, most_s: float = LONGEST_S) -> None:
    """Send a run to the MLflow at :data:`ADDRESS`, if it is set.

    A server that fails or does not answer in ``most_s`` seconds costs one warning.
    """
    address = os.environ.get(ADDRESS, "")
    if not address:
        return
    if find_spec("mlflow") is None:
        LOG.warning("%s is set, but MLflow is not installed; pip install -e '.[mlflow]'", ADDRESS)
        return
    failed: list[Exception] = []

    def send() -> None:
        try:
            send_run(address, summary, history, origin)
        except Exception as error:  # whatever the library or the server does, the run is complete
            failed.append(error)

    sender = threading.Thread(target=send, name="mlflow", daemon=True)
    sender.start()
    sender.join(most_s)
    where = f"{ADDRESS}={without_secrets(address).partition('?')[0]}"
    if sender.is_alive():
        LOG.warning("%s: MLflow did not take the run within %g s; the run itself is complete", where, most_s)
    elif failed:
        reason = first_line(failed[0]).replace(address, "the address")
        LOG.warning("%s: MLflow did not take the run (%.200s); the run itself is complete", where, reason)


def send_run(address: str, summary: RunSummary, history: History, origin: RunOrigin) -> None:
    """Send parameters, metrics by step, files and, after a promotion, the registered version."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(address)
    experiment = os.environ.get(EXPERIMENT) or "slipstream"
    known = client.get_experiment_by_name(experiment)
    number = known.experiment_id if known else client.create_experiment(experiment)
    directory = Path(summary.directory)
    run = client.create_run(number, run_name=directory.name, tags={"mlflow.source.git.commit": origin.commit}).info
    settings = {**origin.inputs, **dict(flat(origin.settings))}
    parameters = [Param(name, str(value)[:LONGEST_VALUE]) for name, value in settings.items()]
    for start in range(0, len(parameters), MOST_PARAMETERS):
        client.log_batch(run.run_id, params=parameters[start : start + MOST_PARAMETERS])
    last = history.steps_total
    scores = vars(summary.evaluation.model).items()
    tested = [(f"test/{name}", value, last) for name, value in scores if value is not None]
    metrics = [Metric(name, value, run.start_time, step) for name, value, step in (*metrics_by_step(history), *tested)]
    for start in range(0, len(metrics), MOST_METRICS):
        client.log_batch(run.run_id, metrics=metrics[start : start + MOST_METRICS])
    for name in (REPORT, SUMMARY):
        client.log_artifact(run.run_id, str(directory / name))
    client.log_artifacts(run.run_id, str(directory / MODEL), MODEL)
    if summary.promotion and summary.promotion.promoted:
        register(client, summary.promotion.registry, f"{run.artifact_uri}/{MODEL}", run.run_id)
    client.set_terminated(run.run_id)


def register(client: Any, registry: str, source: str, run: str) -> None:
    """Register the promoted model under the last part of the registry's address."""
    name = registry.rstrip("/").rpartition("/")[2]
    if not any(each.name == name for each in client.search_registered_models()):
        client.create_registered_model(name)
    client.create_model_version(name, source, run)
