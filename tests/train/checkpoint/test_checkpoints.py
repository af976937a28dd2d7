"""Promises of checkpoints, one at a time, in one process."""

import json
import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.pipeline.train.checkpoint import publish
from slipstream.pipeline.train.checkpoint.home import CheckpointName, Retention, Superseded
from slipstream.pipeline.train.checkpoint.shards import FileWriter
from slipstream.pipeline.train.checkpoint.staging import assign_writers
from slipstream.pipeline.train.checkpoint.state import join_tensors, split_tensors
from slipstream.shared.artifacts.format import hash_file
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.storage import StorageUnavailable, storage_for
from tests.support.small_run import Run, names, same
from tests.support.wording import refuses, same_wording


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(1)
    np.random.seed(1)


def test_a_resumed_run_goes_on_bit_for_bit_with_every_generator(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.steps(3)
    first.save(3)
    first.steps(4)
    random.seed(99)
    second = Run(tmp_path)
    restored = second.checkpoints.restore()
    assert restored is not None and (restored.step, restored.progress, restored.same_world) == (3, {"step": 3}, True)
    second.steps(4)
    assert same(first.everything(), second.everything())
    assert first.scheduler.state_dict() == second.scheduler.state_dict()


def test_preparing_and_saving_change_nothing_that_a_run_computes(tmp_path: Path) -> None:
    plain = Run(tmp_path / "a")
    plain.steps(6)
    random.seed(1)
    np.random.seed(1)
    saved = Run(tmp_path / "b")
    saved.checkpoints.prepare({"step": 0})
    assert not saved.optimizer.state
    for step in range(6):
        saved.steps(1)
        saved.checkpoints.save(step + 1, {"step": step})
    saved.checkpoints.finish()
    assert same(plain.everything(), saved.everything())


def goes_on(home: Path) -> dict[str, torch.Tensor]:
    """What becomes of a run that finds nothing to resume."""
    random.seed(1)
    np.random.seed(1)
    run = Run(home)
    assert run.checkpoints.restore(into={"step": 0}) is None
    run.checkpoints.prepare({"step": 0})
    run.steps(2)
    return run.everything()


def test_a_checkpoint_that_cannot_be_restored_leaves_nothing_behind(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.steps(3)
    first.save(3)
    [shard] = tmp_path.glob("step-*/tensors-*.bin")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert same(goes_on(tmp_path / "empty"), goes_on(tmp_path))


def test_the_last_and_the_newest_regular_one_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, retention=Retention(last=2, regular=4))
    run.steps(1)
    for step in range(1, 8):
        run.save(step)
    assert names(tmp_path) == ["step-000000000004.a0001", "step-000000000006.a0001", "step-000000000007.a0001"]
    assert json.loads((tmp_path / "latest.json").read_text())["checkpoint"] == "step-000000000007.a0001"


def test_any_number_of_attempts_that_save_nothing_lose_nothing(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.steps(2)
    first.save(2)
    for _ in range(3):  # they die before their first save
        assert Run(tmp_path).checkpoints.restore() is not None
    last = Run(tmp_path)
    restored = last.checkpoints.restore()
    assert restored is not None and restored.step == 2
    assert last.checkpoints.attempt == 5
    assert names(tmp_path) == ["step-000000000002.a0001"]
    assert same(first.everything(), last.everything())


def test_a_checkpoint_is_of_the_layout_that_wrote_it_whatever_those_after_it_had(tmp_path: Path) -> None:
    first = Run(tmp_path, layout=(1, 1, 2))
    first.steps(2)
    first.save(2)
    # The layout changes, and the attempt dies before its first save.
    restored = Run(tmp_path, layout=(1, 2, 1)).checkpoints.restore()
    assert restored is not None and not restored.same_world
    for layout, resumes_bit_for_bit in {(1, 2, 1): False, (1, 1, 2): True, (): False}.items():
        restored = Run(tmp_path, layout=layout).checkpoints.restore()
        assert restored is not None and restored.same_world == resumes_bit_for_bit


def test_an_older_attempt_cannot_publish_once_a_later_one_began(tmp_path: Path) -> None:
    old = Run(tmp_path)
    old.steps(1)
    old.save(1)
    new = Run(tmp_path)
    new.checkpoints.restore()
    with pytest.raises(Superseded, match="attempt 2"):
        old.save(9)
    assert json.loads((tmp_path / "latest.json").read_text())["step"] == 1
    new.save(2)
    third = Run(tmp_path)
    restored = third.checkpoints.restore()
    assert restored is not None and restored.step == 2
    assert not [name for name in names(tmp_path) if "000009" in name]


@pytest.mark.prove
def test_a_later_attempt_is_newer_whatever_its_step(tmp_path: Path) -> None:
    old = Run(tmp_path)
    old.steps(1)
    old.save(100)
    (tmp_path / "step-000000000100.a0001").rename(tmp_path / "aside")
    new = Run(tmp_path)
    assert new.checkpoints.restore() is None
    new.steps(1)
    new.save(5)
    (tmp_path / "aside").rename(tmp_path / "step-000000000100.a0001")
    restored = Run(tmp_path).checkpoints.restore()
    assert restored is not None and restored.step == 5


@pytest.mark.parametrize(
    "identity", [{"training": {"seed": 1}, "data": "abc"}, {"training": {"seed": 0}, "data": "xyz"}]
)
def test_another_run_is_refused_by_its_first_difference(identity: dict, tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.steps(1)
    first.save(1)
    with refuses(UserError):
        Run(tmp_path, identity=identity).checkpoints.restore()
    assert Run(tmp_path, identity=identity, resume="never").checkpoints.restore() is None


def test_another_model_is_refused_by_its_first_tensor(tmp_path: Path) -> None:
    first = Run(tmp_path, width=8)
    first.steps(1)
    first.save(1)
    with refuses(UserError):
        Run(tmp_path, width=9).checkpoints.restore()


def test_never_leaves_older_runs_alone_but_goes_on_with_its_own(tmp_path: Path) -> None:
    for run, step in (("execution-1", 7), ("execution-2", 3)):
        made = Run(tmp_path, holder=Holder(run), resume="never")
        assert made.checkpoints.restore() is None
        made.steps(1)
        made.save(step)
    retried = Run(tmp_path, holder=Holder("execution-2"), resume="never").checkpoints.restore()
    assert retried is not None and retried.step == 3


def test_a_newer_format_is_refused_and_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Run(tmp_path)
    first.steps(1)
    monkeypatch.setattr(publish, "CONTENT", publish.CONTENT + 1)
    first.save(1)
    with refuses(UserError):
        Run(tmp_path).checkpoints.restore()


@contextmanager
def failing_writes(times: int, error: Exception) -> Iterator[list[str]]:
    original, failed = FileWriter.write, list[str]()

    def write(self: FileWriter, name: str, chunks: Any) -> None:
        if len(failed) < times and name.startswith("tensors"):
            failed.append(name)
            raise error
        original(self, name, chunks)

    FileWriter.write = write  # type: ignore[method-assign]
    try:
        yield failed
    finally:
        FileWriter.write = original  # type: ignore[method-assign]


def test_two_refused_saves_in_a_row_are_borne_and_the_third_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    run.steps(1)
    with failing_writes(2, UserError("no space left")) as failed:
        for step in (1, 2, 3):
            run.checkpoints.save(step, {"step": step})
        assert run.checkpoints.finish() == CheckpointName(1, 3)
    assert len(failed) == 2
    assert capsys.readouterr().err.count("could not be saved: no space left") == 2
    with failing_writes(3, UserError("no space left")), pytest.raises(UserError):
        for step in (4, 5, 6, 7):
            run.checkpoints.save(step, {"step": step})


@pytest.mark.prove
def test_a_store_that_stays_away_is_borne_however_often_and_each_snapshot_takes_the_place_of_the_one_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    with failing_writes(6, StorageUnavailable("away")) as failed:
        for step in range(1, 6):
            run.steps(1)
            run.checkpoints.save(step, {"step": step})
            while run.checkpoints.background.busy():
                time.sleep(0.001)
        run.checkpoints.background.resume(5, busy=False)  # the fifth again, and for the last time in vain
        while run.checkpoints.background.busy():
            time.sleep(0.001)
        kept = {name: tensor.clone() for name, tensor in run.everything().items()}
        run.steps(2)
        run.checkpoints.background.resume(7, busy=False)
        assert run.checkpoints.finish() == CheckpointName(1, 5)
    assert len(failed) == 6
    said = capsys.readouterr().err
    assert "(away)" in said
    same_wording(said)
    assert names(tmp_path) == ["step-000000000005.a0001"]
    resumed = Run(tmp_path)
    assert resumed.checkpoints.restore() is not None
    assert same(resumed.everything(), kept)


def test_an_index_that_leads_out_of_its_checkpoint_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Run(tmp_path)
    first.steps(1)
    first.save(1)
    elsewhere = tmp_path / "elsewhere.bin"
    [shard] = tmp_path.glob("step-*/tensors-*.bin")
    elsewhere.write_bytes(shard.read_bytes())
    index = shard.parent / "index.json"
    index.write_text(index.read_text().replace(shard.name, f"../{elsewhere.name}"))
    manifest = json.loads((shard.parent / "manifest.json").read_bytes())
    manifest["files"]["index.json"] = vars(hash_file(index))  # as any writer of the directory could
    (shard.parent / "manifest.json").write_text(json.dumps(manifest))
    assert Run(tmp_path).checkpoints.restore() is None
    same_wording(capsys.readouterr().err)


@pytest.mark.parametrize("world", [0, 2, -1, 10**18])
def test_a_manifest_that_lists_other_ranks_than_it_says_is_damage(
    world: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path)
    for step in (3, 6):
        run.steps(3)
        run.save(step)
    path = tmp_path / names(tmp_path)[-1] / "manifest.json"
    manifest = json.loads(path.read_bytes())
    manifest["made_by"]["world"] = world
    path.write_text(json.dumps(manifest))
    restored = Run(tmp_path).checkpoints.restore()
    assert restored and restored.step == 3
    same_wording(capsys.readouterr().err)


def test_what_a_dead_attempt_left_half_written_is_swept(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.steps(1)
    first.save(1)
    storage = storage_for(str(tmp_path))
    storage.put("step-000000000002.a0001/tensors-00000.bin", b"half")
    scratch = first.checkpoints._publisher.staging_directory / "step-000000000002.a0001"
    scratch.mkdir(parents=True)
    (scratch / "tensors-00000.bin").write_bytes(b"half")
    Run(tmp_path)
    assert names(tmp_path) == ["step-000000000001.a0001"]
    assert not scratch.exists()


def test_a_home_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with refuses(UserError):
        Run(tmp_path / "file" / "home")


def test_no_pickle_is_in_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.steps(1)
    run.save(1)
    kinds = {path.suffix for path in (tmp_path / names(tmp_path)[0]).iterdir()}
    assert kinds == {".json", ".bin"}
    size = sum(path.stat().st_size for path in tmp_path.glob("step-*/*.bin"))
    assert size == sum(tensor.nbytes for tensor in run.everything().values())


def test_any_state_survives_the_tree() -> None:
    value: dict[str | int, Any] = {
        "tuple": (1, 2.5, (None, True)),
        "odd": [math.inf, -math.inf, 0.1 + 0.2, "text"],
        3: {"deep": torch.arange(3)},
        "empty": {},
        "$key": [[], ()],
    }
    tree, tensors = split_tensors(value)
    back = join_tensors(json.loads(json.dumps(tree, allow_nan=False)), tensors)
    assert torch.equal(back[3].pop("deep"), value[3].pop("deep"))
    assert back == value
    with pytest.raises(TypeError, match="a/b: a set"):
        split_tensors({"a": {"b": {1}}})


def test_ranks_write_about_the_same_amount_and_every_tensor_once() -> None:
    sizes = [1000, 900, 500, 400, 300, 7, 7, 1]
    held = [(f"t{i}", (size,), torch.float32, False) for i, size in enumerate(sizes)]
    alone = ("only-1", (100,), torch.float32, False)
    chosen = assign_writers([held, [*held, alone], held])
    assert chosen.keys() == {*(name for name, *_ in held), "only-1"}
    assert chosen["only-1"] == 1
    load = [sum(size for i, size in enumerate(sizes) if chosen[f"t{i}"] == rank) for rank in range(3)]
    # Graham (1969): largest first is never worse than four thirds of the best division.
    assert max(load) <= sum(sizes) / 3 * 4 / 3


def test_a_setting_that_an_older_checkpoint_does_not_know_counts_as_its_default(tmp_path: Path) -> None:
    older = Run(tmp_path, identity={"training": {"seed": 0}})
    older.steps(1)
    older.save(1)
    defaults = {"training": {"seed": 0, "ema": 0.0}, "model": {"name": "auto"}}
    newer = Run(tmp_path, identity=defaults, defaults=defaults)
    assert newer.checkpoints.restore() is not None
    other = Run(tmp_path, identity={**defaults, "training": {"seed": 0, "ema": 0.9}}, defaults=defaults)
    with refuses(UserError):
        other.checkpoints.restore()


def test_it_goes_back_to_the_newest_checkpoint_that_is_accepted(tmp_path: Path) -> None:
    # Its own are accepted though older ones are to be left alone.
    run = Run(tmp_path, resume="never", retention=Retention(last=1, regular=2))
    for step in (1, 2, 3):
        run.steps(1)
        run.save(step)
    assert names(tmp_path) == ["step-000000000002.a0001", "step-000000000003.a0001"], "2 is the last regular one"
    restored = run.checkpoints.restore(lambda name: name.step < 3)
    assert restored is not None and restored.step == 2
    assert run.checkpoints.restore(lambda name: name.step < 2) is None
    assert Run(tmp_path, resume="never").checkpoints.restore() is None
