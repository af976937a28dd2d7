"""Faults by name, damage to stored data, and seeded schedules of both."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.operations.proofs.gpu.attempts import ALL_RANKS, InjectedFault, TrainingJob, run_attempt
from slipstream.pipeline.train.checkpoint.home import CHECKPOINTS, CheckpointName, complete_checkpoints
from slipstream.shared.storage import storage_for

#: Every moment at which a process can be lost, at a time when any run of the harness passes it.
MOMENTS = [
    InjectedFault("step", rank=0, at=5),
    InjectedFault("step", rank=1, at=2),
    InjectedFault("step", rank=ALL_RANKS, at=7),
    InjectedFault("step", what="SIGTERM", rank=1, at=4),
    InjectedFault("evaluation", rank=1, at=1),
    InjectedFault("write", rank=1, at=1),
    InjectedFault("mid-write", rank=0, at=2),
    InjectedFault("mid-write", rank=1, at=1),
    InjectedFault("upload", rank=0, at=1),
    InjectedFault("upload", rank=1, at=2),
    InjectedFault("manifest", at=1),
    InjectedFault("manifest", at=2),
    InjectedFault("latest", at=1),
    InjectedFault("retire", at=1),
]
#: A peer that no longer answers: the others wait until their patience is spent.
STOPPED = InjectedFault("step", what="SIGSTOP", rank=1, at=3)
#: A disk that fills up costs a checkpoint and lets the run go on, so it comes together with a death later on.
FULL = InjectedFault("write", what="ENOSPC", rank=1, at=1)
#: Moments of an attempt that has something to go on from.
RESUMING = [
    InjectedFault("restore", rank=0),
    InjectedFault("restore", rank=1),
    InjectedFault("load", rank=0),
    InjectedFault("load", rank=ALL_RANKS),
]


def whole_checkpoints(home: Path) -> list[CheckpointName]:
    """The newest first; a process that is killed in between leaves ``latest.json`` pointing to an older."""
    return complete_checkpoints(storage_for(str(home)).list(CHECKPOINTS))


def newest(home: Path) -> Path:
    return home / str(whole_checkpoints(home)[0])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def flip_shard(home: Path) -> None:
    flip(newest(home) / "tensors-00001.bin")


def flip_randomness(home: Path) -> None:
    flip(newest(home) / "rank-00000.json")


def truncate_shard(home: Path) -> None:
    path = newest(home) / "tensors-00000.bin"
    path.write_bytes(path.read_bytes()[:-100])


def lose_shard(home: Path) -> None:
    (newest(home) / "tensors-00001.bin").unlink()


def lose_index(home: Path) -> None:
    (newest(home) / "index.json").unlink()


def spoil_manifest(home: Path) -> None:
    (newest(home) / "manifest.json").write_text('{"format": 1, "files"')


def mislead(home: Path) -> None:
    """A pointer to what is no longer there."""
    pointer = {"attempt": 1, "step": 1, "manifest_sha256": "0" * 64}
    (home / "latest.json").write_text(json.dumps({**pointer, "checkpoint": "step-000000000001.a0001"}))


DAMAGE: list[Callable[[Path], None]] = [
    flip_shard,
    flip_randomness,
    truncate_shard,
    lose_shard,
    lose_index,
    spoil_manifest,
    mislead,
]


def has_checkpoint(home: Path) -> bool:
    return bool(whole_checkpoints(home))


def disturbed(job: TrainingJob, seed: int, faults: int) -> Iterator[str]:
    """Run ``job`` to its end with ``faults`` faults, drawn from ``seed``; yield every fault that happened.

    Raises ``AssertionError`` if a planned fault did not happen.
    """
    draw = random.Random(seed)
    home = Path(job.home)
    remaining = faults
    while remaining:
        if has_checkpoint(home) and draw.random() < 0.3:
            damage = draw.choice(DAMAGE)
            damage(home)
            yield damage.__name__
            remaining -= 1
            continue
        chosen = [draw.choice([*MOMENTS, *(RESUMING if has_checkpoint(home) else [])])]
        rare = draw.random()
        if rare < 0.1:
            chosen = [STOPPED]
        elif rare < 0.2 and remaining > 1:
            chosen = [FULL, InjectedFault("step", rank=0, at=8)]
        ended = run_attempt(job, *chosen)
        for fault in chosen:
            if fault.what in ended.struck:
                yield f"{fault.where} {fault.what} rank {fault.rank}"
                remaining -= 1
            else:
                # It was too near the end to pass that moment as often; then it must have reached the end.
                assert ended.finished, f"{fault} did not happen, and the run did not end; see {job.place}/log-0"
        if ended.finished:
            # Without its result the run goes on from its newest checkpoint and has its last steps to do again.
            shutil.rmtree(job.output)
    assert run_attempt(job).finished, f"the run did not end; see {job.place}/log-0"
