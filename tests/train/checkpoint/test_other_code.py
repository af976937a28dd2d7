"""Training resumes after an edit of the code and says so; all settings that decide the result must be equal."""

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from slipstream.operations.proofs.gpu.trainings import train, write_table
from slipstream.pipeline.train import identity as identity_module
from slipstream.pipeline.train import run as run_module
from slipstream.pipeline.train.checkpoint.home import CheckpointName
from slipstream.pipeline.train.checkpoint.restore import Candidate, check_tensors
from slipstream.pipeline.train.config import STEP_VERSION
from slipstream.pipeline.train.identity import describe_other_code
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.training import Attempt, code_versions_of, read_attempt
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import storage_for
from tests.support.small_run import Run
from tests.support.wording import line_with, refuses, same_wording

THEN = {"slipstream.prepare.rows": "1", "slipstream.pipeline.train.loop": "1"}
NOW = {"slipstream.prepare.rows": "2", "slipstream.pipeline.train.loop": "1"}
SETTINGS: dict[str, Any] = {"epochs": 1, "batch_size": 50, "learning_rate": 1e-2, "precision": "fp32"}
SETTINGS |= {"checkpoint_every": 5}
MLP = ModelConfig("mlp", {"hidden": [16]})


def saved(home: Path, step: int, **policy: Any) -> Run:
    run = Run(home, **policy)
    run.checkpoints.restore()
    run.steps(1)
    run.save(step)
    return run


def test_other_code_resumes_and_its_checkpoints_name_all_code_that_trained(tmp_path: Path) -> None:
    saved(tmp_path, 1, version="old", modules=THEN)
    restored = (second := saved(tmp_path, 2, version="new", modules=NOW)).checkpoints.restore()
    assert restored is not None and restored.trained_by == ("old", "new")
    assert second.checkpoints.trained_by == ["old", "new"]
    third = Run(tmp_path, version="new", modules=NOW)
    assert third.checkpoints.trained_by == ["new"], "before it resumes"
    assert third.checkpoints.restore() is not None and third.checkpoints.trained_by == ["old", "new"]


def test_same_code_skips_checkpoints_that_other_code_made_or_touched(tmp_path: Path) -> None:
    saved(tmp_path, 1, version="old", modules=THEN)
    saved(tmp_path, 2, version="new", modules=NOW)
    with_old = Run(tmp_path, version="old", modules=THEN, resume="same-code").checkpoints.restore()
    assert with_old is not None and with_old.step == 1
    assert Run(tmp_path, version="new", modules=NOW, resume="same-code").checkpoints.restore() is None


def test_one_line_names_the_modules_that_changed() -> None:
    assert describe_other_code(THEN, THEN) == ""
    line = describe_other_code(THEN, NOW | {"slipstream.train.added": "1"})
    same_wording(line)
    many = describe_other_code({}, {f"module{number}": "1" for number in range(9)})
    assert many.count("module") == 5 and "and 4 more" in many and "\n" not in many


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda live: {**live, "model/added": ("float32", (1,))}, r"model/added is absent there and float32 \(1,\)"),
        (lambda live: {**live, "model/weight": ("float32", (3,))}, r"weight is float32 \(2,\) there and .*\(3,\)"),
        (lambda live: {**live, "model/weight": ("bfloat16", (2,))}, r"is float32 \(2,\) there and bfloat16 \(2,\)"),
        (lambda live: {}, r"model/weight is float32 \(2,\) there and absent here"),
    ],
    ids=["name", "shape", "type", "gone"],
)
def test_tensors_of_other_name_shape_or_type_are_one_line(
    edit: Callable[[dict[str, Any]], dict[str, Any]], message: str, tmp_path: Path
) -> None:
    index: Any = {"model/weight": SimpleNamespace(dtype="float32", size=[2])}
    live = {"model/weight": ("float32", (2,))}
    candidate = Candidate(storage_for(str(tmp_path)), CheckpointName(1, 1))
    check_tensors(candidate, index, live)
    with pytest.raises(UserError, match=message) as refused:
        check_tensors(candidate, index, edit(live))
    assert "\n" not in refused.value.message


def test_a_model_of_another_type_and_state_of_other_parts_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    other_type = Run(tmp_path)
    other_type.model.double()
    with refuses(UserError):
        other_type.checkpoints.restore()
    parts = Run(tmp_path)
    state = parts.checkpoints._state
    parts.checkpoints._state = replace(state, parts={**state.parts, "swept": nn.Linear(1, 1)})
    with refuses(UserError):
        parts.checkpoints.restore()


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    write_table(tmp_path / "table", "classification")
    yield tmp_path
    if dist.is_initialized():
        dist.destroy_process_group()


def at_step_5(directory: Path) -> None:
    """Leave of the checkpoints of a finished training the one of step 5."""
    for place in Path(f"{directory}.checkpoints").glob("step-*"):
        if not place.name.startswith("step-000000000005"):
            shutil.rmtree(place)


def test_an_edit_resumes_and_a_raised_step_version_does_not(
    alone: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def code(version: str, modules: dict[str, str]) -> None:
        monkeypatch.setattr(run_module, "training_code", lambda: (version, modules))

    code("old", THEN)
    train(alone / "model", alone / "table", MLP, **SETTINGS)
    at_step_5(alone / "model")
    shutil.copytree(alone / "model.checkpoints", alone / "kept.checkpoints")
    dist.destroy_process_group() if dist.is_initialized() else None
    code("new", NOW)
    shutil.rmtree(alone / "model")
    write_table(alone / "again", "classification")
    manifest = alone / "again" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"made_by": {}', '"made_by": {"code": "other"}'))
    tables = [Artifact.open(alone / name, "prepare") for name in ("table", "again")]
    assert tables[0].fingerprint != tables[1].fingerprint and tables[0].content == tables[1].content
    attempt: Attempt = read_attempt(train(alone / "model", alone / "again", MLP, **SETTINGS))
    assert attempt.steps == 7 and attempt.code_versions == ["old", "new"]
    assert code_versions_of(Artifact.open(alone / "model", "train")) == ["old", "new"]
    same_wording(line_with("slipstream.prepare.rows", capfd.readouterr().err))
    dist.destroy_process_group() if dist.is_initialized() else None
    monkeypatch.setattr(identity_module, "STEP_VERSION", STEP_VERSION + 1)
    with refuses(Exception):
        train(alone / "kept", alone / "table", MLP, **SETTINGS)


def test_the_holder_of_another_execution_is_no_reason_to_skip(tmp_path: Path) -> None:
    saved(tmp_path, 1, version="old", holder=Holder("f1"))
    assert Run(tmp_path, version="new", holder=Holder("f2")).checkpoints.restore() is not None


def test_a_stored_checkpoint_of_an_older_release_resumes(alone: Path) -> None:
    """The archive was made by the first commit with this ``STEP_VERSION``; a higher one needs a new archive."""
    with zipfile.ZipFile(Path(__file__).with_name(f"of_step_version_{STEP_VERSION}.zip")) as stored:
        stored.extractall(alone)
    model = ModelConfig("mlp", {"hidden": [8], "frequencies": 4})
    settings = {**SETTINGS, "epochs": 2, "batch_size": 20, "ema": 0.9}
    attempt = read_attempt(train(alone / "model", alone / "table", model, **settings))
    assert attempt.steps == 7 and len(attempt.code_versions) == 2
    then, now = load_file(alone / "last.safetensors"), load_file(alone / "model" / "last.safetensors")
    assert then.keys() == now.keys()
    assert all(torch.allclose(then[name], now[name], rtol=1e-5, atol=1e-6) for name in then)
