"""An unavailable store: every task asks Flyte to retry, and tells a user at the terminal how to continue."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.flyte import elastic, stage
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.source.config import DataConfig
from slipstream.shared.storage import retry
from tasks.evaluate import evaluate
from tasks.export import export
from tasks.inputs import resolve_inputs
from tasks.prepare import list_data, prepare
from tasks.report import report, report_data
from tasks.train import train
from tests.support.faulty_s3 import FaultyS3
from tests.support.proving import first_few

ELSEWHERE = "s3://bucket/away/artifact"


def inputs(*names: str) -> dict[str, FlyteDirectory]:
    return {name: FlyteDirectory(ELSEWHERE) for name in names}


ALL = ("prepared", "trained", "evaluated", "exported")
TASKS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "list_data": lambda: (list_data, {"data": ELSEWHERE, "target": "y", "config": RunConfig()}),
    "resolve_inputs": lambda: (
        resolve_inputs,
        {"data": ELSEWHERE, "target": "y", "config": RunConfig(), "kickoff": None},
    ),
    "prepare": lambda: (prepare, {**inputs("listing"), "target": "y", "config": DataConfig(), "source": "0"}),
    "train": lambda: (train, {**inputs("prepared"), "model": ModelConfig(), "training": TrainingConfig(), "code": ""}),
    "evaluate": lambda: (evaluate, inputs("trained", "prepared")),
    "export": lambda: (export, {**inputs("trained", "prepared"), "config": ExportConfig()}),
    "report": lambda: (
        report,
        {
            **inputs(*ALL),
            "networks": [],
            "stages": [],
            "config": RunConfig(),
            "data": "",
            "target": "",
            "cron": "",
            "kickoff": None,
            "promotion": None,
            "compression": None,
            "sweep": None,
        },
    ),
    "report_data": lambda: (report_data, {**inputs("prepared"), "stages": []}),
}


@pytest.fixture
def away(store: FaultyS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FaultyS3]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    # More than all attempts of all downloads at a time.
    for verb in ("GET", "HEAD"):
        store.inject(verb, *["503"] * 50)
    yield store
    store.plan.clear()


@pytest.mark.parametrize("name", TASKS)
def test_a_pod_is_tried_again(away: FaultyS3, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    task, given = TASKS[name]()
    for module in (stage, elastic):
        monkeypatch.setattr(module, "runs_locally", lambda: False)
    with pytest.raises(FlyteRecoverableException, match="kept answering 503"):
        task.execute(**given)
    assert away.fired


@pytest.mark.parametrize("name", first_few(TASKS, 2))
def test_a_person_is_told_to_start_again(away: FaultyS3, name: str) -> None:
    task, given = TASKS[name]()
    with pytest.raises(UserError, match=r" 503( SlowDown)? in 3 attempts"):
        task(**given)
    assert away.fired
