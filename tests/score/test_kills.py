"""A scoring that is killed at every step publishes one table with the bytes of an undisturbed one."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.publish import list_publications
from tests.support import REPOSITORY
from tests.support.scoring import bytes_below, table_of, write_files

#: Scores in a process that is killed before or after its step of a certain number: a batch that is added to a part, or
#: something that the store is asked for. Says how many steps there were.
SCORING = """
import os, signal, sys
from slipstream.pipeline.score import part, plan
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.storage.local import LocalStorage
from slipstream.shared.source.config import DataConfig
from tests.support.scoring import KEEP

registry, data, output, at, moment = sys.argv[1:]
steps = 0

def counted(work):
    def step(*arguments, **named):
        global steps
        steps += 1
        mine = steps == int(at)
        if mine and moment == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        made = work(*arguments, **named)
        if mine:
            os.kill(os.getpid(), signal.SIGKILL)
        return made
    return step

part.PartFile.add = counted(part.PartFile.add)
for name in ("put", "create", "delete"):
    setattr(LocalStorage, name, counted(getattr(LocalStorage, name)))
plan.PART_BYTES = 30_000
score_data(registry, data, output, DataConfig(), KEEP, workers=1)
print(steps)
"""
FILES = 5


def scoring(
    registry: Registry, data: Path, output: Path, at: int = 0, moment: str = ""
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCORING, registry.uri, str(data), str(output), str(at), moment]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)


def survive(registry: Registry, tmp_path: Path, seed: int, kills: int) -> None:
    data = write_files(tmp_path / "in", FILES, of_each=300)
    undisturbed = scoring(registry, data, tmp_path / "undisturbed")
    assert undisturbed.returncode == 0, undisturbed.stderr
    steps, draw, output = int(undisturbed.stdout), random.Random(seed), tmp_path / "killed"
    assert steps >= 2 * FILES + 4, "a batch and a part for each file; what was set aside, manifest, pointer, tidying"
    for _ in range(kills):
        at, moment = draw.randint(1, steps), draw.choice(["before", "after"])
        ended = scoring(registry, data, output, at, moment)
        there = len(list_publications(str(output)))
        # Once the pointer exists, a scoring has nothing to do and is not killed.
        assert ended.returncode == -signal.SIGKILL or (ended.returncode == 0 and there == 1), ended.stderr
    assert scoring(registry, data, output).returncode == 0
    (publication,) = list_publications(str(output))
    (expected,) = list_publications(str(tmp_path / "undisturbed"))
    assert publication.manifest == expected.manifest
    assert table_of(output, publication).num_rows == FILES * 300
    left = {name for name in bytes_below(output) if "part-" in name}
    assert left == {name for name in bytes_below(tmp_path / "undisturbed") if "part-" in name}
    assert all(bytes_below(output)[name] == bytes_below(tmp_path / "undisturbed")[name] for name in left)


@pytest.mark.prove
def test_three_kills(served: Registry, tmp_path: Path) -> None:
    survive(served, tmp_path, seed=0, kills=3)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(1, 11))
def test_thirty_kills(served: Registry, tmp_path: Path, seed: int) -> None:
    survive(served, tmp_path, seed, kills=3)
