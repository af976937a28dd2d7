"""A run for TensorBoard and MLflow: what arrives, and that neither is needed nor waited for."""

import json
import logging
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.report import engine, tracking
from slipstream.pipeline.report.run_directory import RunOrigin
from slipstream.pipeline.report.summary import RunSummary
from slipstream.shared.artifacts.results.scoring import Promotion
from slipstream.shared.artifacts.results.training import History
from slipstream.shared.settings import as_written
from tests.support.report_runs import STAGES, results
from tests.support.wording import same_wording

ORIGIN = RunOrigin("run it", "abc", {"data": "d.csv"}, {}, as_written(RunConfig()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunSummary, History]:
    """A run whose model was promoted."""
    place = tmp_path_factory.mktemp("run")
    found = results(place / "in", ["no", "yes"])
    promotion = Promotion(True, "s3://bucket/churn", "abc", "it is the first")
    summary = engine.build_report(place / "runs", found, STAGES, {}, promotion=promotion, origin=ORIGIN)
    return summary, found.history


def test_points_of_the_history_have_their_steps(run: tuple[RunSummary, History]) -> None:
    history = run[1]
    found = list(tracking.metrics_by_step(history))
    losses = {step: value for name, value, step in found if name == "train/loss"}
    assert losses == {point.step: point.loss for point in history.steps}
    validated = {step: value for name, value, step in found if name == "validation/accuracy"}
    assert validated == {point.step: point.accuracy for point in history.evaluations}


def test_nothing_is_imported_and_nothing_sent_without_a_reason(tmp_path: Path) -> None:
    code = "import sys; import slipstream.pipeline.report.tracking; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlflow", "tensorboard", "torch"} & set(loaded)


def test_a_missing_library_is_one_line(
    run: tuple[RunSummary, History], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tracking.ADDRESS, "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, "mlflow", None)
    tracking.track_run(*run, ORIGIN)
    (record,) = caplog.records
    same_wording(record.getMessage())


def test_tensorboard_reads_the_history(run: tuple[RunSummary, History]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    summary, history = run
    everything = {"tensors": 0}
    events = EventAccumulator(str(Path(summary.directory, tracking.EVENTS)), everything)
    events.Reload()
    points = events.Tensors("train/loss")
    from tensorboard.util.tensor_util import make_ndarray

    read = {point.step: make_ndarray(point.tensor_proto).item() for point in points}
    assert read == pytest.approx({point.step: point.loss for point in history.steps})


@pytest.fixture
def quiet_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_store_gets_parameters_metrics_files_and_the_promoted_version(
    run: tuple[RunSummary, History], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mlflow import MlflowClient

    summary, history = run
    address = f"sqlite:///{tmp_path}/mlflow.db" if find_spec("sqlalchemy") else f"file://{tmp_path}/mlruns"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tracking.ADDRESS, address)
    tracking.track_run(summary, history, ORIGIN, most_s=60)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING and record.name == "report"]
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("slipstream")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_name == Path(summary.directory).name and found.info.status == "FINISHED"
    assert found.data.params["training.learning_rate"] == "0.002" and found.data.params["data"] == "d.csv"
    assert found.data.metrics["test/accuracy"] == summary.evaluation.model.accuracy
    course = {point.step: point.value for point in client.get_metric_history(found.info.run_id, "train/loss")}
    assert course == {point.step: point.loss for point in history.steps}
    assert {each.path for each in client.list_artifacts(found.info.run_id)} >= {"report.html", "summary.json", "model"}
    (version,) = client.search_model_versions("name='churn'")
    assert version.run_id == found.info.run_id and str(version.source).endswith("/model")
    tracking.track_run(replace(summary, promotion=None), history, ORIGIN, most_s=60)
    assert len(client.search_model_versions("name='churn'")) == 1


def test_names_may_have_any_characters_and_a_failed_run_is_marked(
    run: tuple[RunSummary, History], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    address = f"file://{tmp_path}/mlruns"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tracking.ADDRESS, address)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    odd = {"price (EUR)": "number", "a/../b%": "text", "Größe": "number"}
    origin = replace(ORIGIN, settings={"data": {"types": odd}})
    tracking.send_run(address, *run, origin)
    client = MlflowClient(address)
    experiment = client.get_experiment_by_name("slipstream")
    assert experiment
    (found,) = client.search_runs([experiment.experiment_id])
    names = {f"data.types.{name}" for name in ("price _EUR_", "a_.._b_", "Größe")}
    assert found.info.status == "FINISHED" and names < found.data.params.keys()
    with pytest.raises(Exception, match="absent"):
        tracking.send_run(address, replace(run[0], directory=str(tmp_path / "absent")), run[1], origin)
    assert {each.info.status for each in client.search_runs([experiment.experiment_id])} == {"FINISHED", "FAILED"}


def test_a_server_that_never_answers_costs_one_warning_and_a_bounded_time(
    run: tuple[RunSummary, History],
    quiet_server: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(tracking.ADDRESS, quiet_server)
    started = time.monotonic()
    tracking.track_run(*run, ORIGIN, most_s=1.5)
    assert time.monotonic() - started < 3
    said = [record.getMessage() for record in caplog.records if "MLflow did not take the run" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith(f"{tracking.ADDRESS}={quiet_server}:")
    assert json.loads(Path(run[0].directory, "summary.json").read_text())


@pytest.mark.parametrize("seconds", [0.2, 5.0])
def test_the_password_of_a_server_is_not_logged(
    run: tuple[RunSummary, History],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    seconds: float,
) -> None:
    """Neither if it does not answer in time nor if the library's message quotes the address."""
    address = "http://alice:s3cret@127.0.0.1:9/base?token=t0ken"

    def send_run(*_: object) -> None:
        time.sleep(0.5 if seconds < 0.5 else 0.0)
        raise OSError(f"cannot reach {address} ({address.replace('/base', '/other')})")

    monkeypatch.setenv(tracking.ADDRESS, address)
    monkeypatch.setattr(tracking, "find_spec", lambda name: name)
    monkeypatch.setattr(tracking, "send_run", send_run)
    tracking.track_run(*run, ORIGIN, most_s=seconds)
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert not any(secret in f"{record.getMessage()}{record.args}" for secret in ("alice", "s3cret", "t0ken"))
    same_wording(record.getMessage())
