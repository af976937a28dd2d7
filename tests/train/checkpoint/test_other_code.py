"""Checkpoints of other code: training goes on and says so, unless the settings or the tensors forbid it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from slipstream.artifacts.format import MANIFEST
from slipstream.errors import UserError
from slipstream.train.config import STEP_VERSION
from slipstream.train.identity import describe_other_code
from tests.support.small_run import IDENTITY, Run

IDENTITY_NOW = {**IDENTITY, "step": STEP_VERSION}
THEN, NOW = {"a": "1", "b": "1", "gone": "1"}, {"a": "1", "b": "2", "new": "1"}


def saved(home: Path, step: int, identity: dict[str, Any] = IDENTITY_NOW, **policy: Any) -> Path:
    """A checkpoint; returns its manifest."""
    run = Run(home, identity=identity, **policy)
    run.checkpoints.restore()
    run.steps(1)
    run.save(step)
    run.checkpoints.end()
    (manifest,) = home.glob(f"step-{step:012d}*/{MANIFEST}")
    return manifest


def test_other_code_resumes_and_every_version_is_recorded(tmp_path: Path) -> None:
    saved(tmp_path, 1, version="v1", modules=THEN)
    manifest = saved(tmp_path, 2, version="v2", modules=NOW)
    made_by = json.loads(manifest.read_text(encoding="utf-8"))["made_by"]
    assert (made_by["trained_by"], made_by["code"]) == (["v1", "v2"], NOW)
    run = Run(tmp_path, identity=IDENTITY_NOW, version="v2", modules=NOW)
    restored = run.checkpoints.restore()
    assert restored is not None and restored.step == 2
    assert run.checkpoints.trained_by == ["v1", "v2"]


def test_the_modules_that_changed_are_named_in_one_line() -> None:
    assert describe_other_code(THEN, THEN) == ""
    assert describe_other_code(THEN, NOW) == "resumes a checkpoint of other code: b, gone, new changed since"
    many = {f"m{number}": "1" for number in range(9)}
    assert describe_other_code({}, many).endswith("m0, m1, m2, m3, m4 and 4 more changed since")


def test_same_code_skips_what_other_code_has_trained(tmp_path: Path) -> None:
    saved(tmp_path, 1, version="v1")
    saved(tmp_path, 2, version="v2")
    for version, expected in (("v1", 1), ("v2", None), ("v3", None)):
        run = Run(tmp_path, identity=IDENTITY_NOW, version=version, resume="same-code")
        restored = run.checkpoints.restore()
        run.checkpoints.end()
        assert (restored and restored.step) == expected, version


def test_a_raised_step_version_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    with pytest.raises(UserError, match=rf"was made with step {STEP_VERSION}, this run has {STEP_VERSION + 1}"):
        Run(tmp_path, identity={**IDENTITY, "step": STEP_VERSION + 1}).checkpoints.restore()


def test_an_identity_in_the_form_of_older_releases_is_compared_without_digests_of_manifests(tmp_path: Path) -> None:
    manifest = saved(tmp_path, 1, identity=IDENTITY)
    written = json.loads(manifest.read_text(encoding="utf-8"))
    for newer in ("trained_by", "code"):
        del written["made_by"][newer]
    manifest.write_text(json.dumps(written), encoding="utf-8")
    now = {**IDENTITY_NOW, "data": "a digest of contents"}
    older = {"training": {"seed": 0}}
    restored = Run(tmp_path, identity=now, older=older).checkpoints.restore()
    assert restored is not None and restored.trained_by == ()
    with pytest.raises(UserError, match=r"was made with training\.seed 0, this run has 1"):
        Run(tmp_path, identity=now, older={"training": {"seed": 1}}).checkpoints.restore()


def test_tensors_of_another_type_are_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    run = Run(tmp_path, identity=IDENTITY_NOW)
    run.model.double()
    with pytest.raises(
        UserError, match=r"holds another model: model/0\.bias is float32 \(8,\) there and float64 \(8,\)"
    ):
        run.checkpoints.restore()


def test_another_part_of_the_state_is_refused_in_one_line(tmp_path: Path) -> None:
    saved(tmp_path, 1)
    run = Run(tmp_path, identity=IDENTITY_NOW)
    cast(dict[str, Any], run.checkpoints._state.parts)["ema"] = run.scheduler
    with pytest.raises(
        UserError, match="holds the state of scheduler besides the model's, this code has ema, scheduler"
    ):
        run.checkpoints.restore()
