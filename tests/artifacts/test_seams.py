"""The modules in ``SEAMS`` do not affect results: test doubles in their place change nothing."""

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch.distributed as dist

from slipstream.operations.proofs.gpu.trainings import train
from slipstream.pipeline.evaluate.engine import evaluate
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.evaluation import read_evaluation
from slipstream.shared.artifacts.versions import SEAMS, cached_syntax, enclosing_seam, import_closure
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig
from slipstream.shared.stages import STAGES

STAGES_RUN = ("prepare", "train", "evaluate")
STORES = (
    "slipstream.shared.storage.s3",
    "slipstream.shared.storage.object_store",
    "slipstream.shared.storage.gcs",
    "slipstream.shared.storage.azure",
)


class Counted:
    """Doubles that count how often they stand in for the real thing."""

    def __init__(self) -> None:
        self.calls = dict.fromkeys(SEAMS, 0)

    def returning(self, seam: str, value: Any) -> Any:
        def double(*_: Any, **__: Any) -> Any:
            self.calls[seam] += 1
            return value() if callable(value) else value

        return double


class Nothing:
    """Module or logger whose functions are all the same double."""

    def __init__(self, double: Any) -> None:
        self.double = double

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.double


class NoBlocks:
    """Records no times of steps."""

    def __init__(self, ranks: int) -> None:
        self.blocks: list[Any] = []
        self.beside = np.zeros((ranks, 0))
        self.total = None

    def add(self, *_: Any) -> None:
        NoBlocks.added = True

    added = False


def doubles(counted: Counted) -> dict[str, Any]:
    """Return a double of every function and class that a stage takes from a seam, by dotted name."""
    telemetry, local = "slipstream.shared.telemetry", "slipstream.pipeline.train.telemetry"

    def none(seam: str, value: Any = None) -> Any:
        return counted.returning(seam, value)

    return {
        "slipstream.shared.formatting.limits": none("slipstream.shared.formatting", ""),
        "slipstream.shared.formatting.size_text": none("slipstream.shared.formatting", ""),
        "slipstream.shared.formatting.aligned_table": none("slipstream.shared.formatting", ""),
        f"{telemetry}.node.read_facts": none(telemetry),
        f"{telemetry}.preflight.memory_of_gpu": none(telemetry),
        f"{telemetry}.preflight.refuse_if_too_small": none(telemetry),
        f"{telemetry}.preflight.visible_memory": none(telemetry),
        f"{telemetry}.ring.latest_samples": none(telemetry),
        f"{telemetry}.series.cpu_use": none(telemetry, 0.0),
        f"{telemetry}.series.share": none(telemetry, 0.0),
        f"{telemetry}.step_blocks.StepBlocks": NoBlocks,
        f"{local}.pods.read_device_series": none(f"{local}.pods"),
        f"{local}.pods.samples_uploaded": none(f"{local}.pods", nullcontext),
        f"{local}.totals.current_losses": none(f"{local}.totals"),
        f"{local}.totals.safe_diagnosis": none(f"{local}.totals"),
        f"{local}.totals.written_totals": none(f"{local}.totals", nullcontext),
    }


def taken_from_seams() -> dict[str, list[str]]:
    """Return every name that a module of the three stages takes from a seam, with these modules."""
    engines = tuple(engine for stage in STAGES_RUN for engine in STAGES[stage].engines)
    found: dict[str, list[str]] = {}
    for module, path in import_closure(engines).items():
        for name in () if module in SEAMS else cached_syntax(path).imports:
            if enclosing_seam(name):
                found.setdefault(name, []).append(module)
    return found


def behind(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Put doubles in the place of every seam."""
    counted = Counted()
    made = doubles(counted)
    for name, modules in taken_from_seams().items():
        attribute = name.rpartition(".")[2]
        for module in modules if name in made else ():
            monkeypatch.setattr(import_module(module), attribute, made[name])
    silent = Nothing(counted.returning("slipstream.shared.logs", None))
    for name, loaded in list(sys.modules.items()):
        if name.startswith("slipstream.") and hasattr(loaded, "LOG"):
            monkeypatch.setattr(loaded, "LOG", silent)
    for store in STORES:

        def used(*_: Any, store: str = store, **__: Any) -> Any:
            raise AssertionError(f"{store} was used")

        monkeypatch.setitem(sys.modules, store, Nothing(used))
        monkeypatch.setattr(
            import_module("slipstream.shared.storage"), store.rpartition(".")[2], Nothing(used), raising=False
        )
    return counted


def test_every_name_that_a_stage_takes_from_a_seam_is_a_constant_or_has_a_double() -> None:
    made = doubles(Counted())
    for name in taken_from_seams():
        seam = enclosing_seam(name)
        if name in made or name in STORES or seam in (*STORES, "slipstream.shared.logs"):
            continue
        module, _, attribute = name.rpartition(".")
        assert isinstance(getattr(import_module(module), attribute), str | float | tuple | dict | type), name


@pytest.fixture
def table(tmp_path: Path) -> Iterator[Path]:
    draw = np.random.default_rng(0)
    numbers = draw.normal(size=(600, 3))
    frame = pd.DataFrame(numbers, columns=["a", "b", "c"])
    frame["kind"] = draw.choice(["red", "green", "blue"], 600)
    frame["answer"] = np.where(numbers[:, 0] + numbers[:, 1] > 0, "yes", "no")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    yield tmp_path / "rows.csv"
    if dist.is_initialized():
        dist.destroy_process_group()


def results(directory: Path, table: Path) -> tuple[str, str, Any]:
    """Prepare, train and evaluate; return what the three decided."""
    directory.mkdir()
    prepared = prepare(directory / "prepared", str(table), "answer", DataConfig(), {})
    settings: dict[str, Any] = {"epochs": 2, "batch_size": 64, "learning_rate": 1e-2, "precision": "fp32"}
    train(directory / "trained", prepared.directory, ModelConfig("mlp", {"hidden": [8]}), **settings)
    if dist.is_initialized():
        dist.destroy_process_group()
    trained, data = TrainedModel.open(directory / "trained"), PreparedData.open(prepared.directory)
    evaluate(directory / "evaluated", trained, data, {})
    return prepared.content, trained.artifact.content, read_evaluation(directory / "evaluated")


def test_without_what_is_behind_the_seams_the_results_are_the_same(
    table: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = results(tmp_path / "plain", table)
    counted = behind(monkeypatch)
    assert results(tmp_path / "with doubles", table) == plain
    assert NoBlocks.added and {seam for seam, calls in counted.calls.items() if calls} >= {
        "slipstream.shared.logs",
        "slipstream.pipeline.train.telemetry.totals",
        "slipstream.pipeline.train.telemetry.pods",
    }
    monkeypatch.undo()
    edited = import_module("slipstream.pipeline.train.loop.optimizer")
    rate = edited.learning_rate
    monkeypatch.setattr(edited, "learning_rate", lambda *given: 0.5 * rate(*given))
    for module in list(sys.modules.values()):
        if getattr(module, "learning_rate", None) is rate:
            monkeypatch.setattr(module, "learning_rate", edited.learning_rate)
    assert results(tmp_path / "other arithmetic", table)[1] != plain[1], "this comparison finds no difference"
