"""The same training started twice at once on the same output: it runs once, and the other start says so."""

import json
import re
import time
from pathlib import Path

import pytest

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.train.command import main as train
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.results.training import KIND
from tests.support.command_line import invoke

#: What one rank of plain torchrun has, without its agent.
RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}


def train_here(place: Path, prepared: Path, number: int) -> None:
    environment = {**RANK, "MASTER_PORT": str(free_port())}
    ended = invoke(train, place, [str(prepared), "out", "run.json"], environment)
    (place / f"log-{number}").write_text(f"{ended.returncode}\n{ended.stdout}")


def train_twice(place: Path, prepared: Path, *, together: bool) -> list[str]:
    """Start both, at once or the second when the first is at work. Returns exit codes and outputs."""
    # Long enough for the second to come in time.
    settings = {"epochs": 20, "patience": 0, "batch_size": 64, "checkpoint_every": 1}
    (place / "run.json").write_text(json.dumps({"training": settings}))
    both = [FORK.Process(target=train_here, args=(place, prepared, number)) for number in range(2)]
    for process in both:
        process.start()
        while not together and process.is_alive() and not list(place.glob("out.checkpoints/leases/*")):
            time.sleep(0.01)
    for process in both:
        process.join(100)
    Artifact.open(place / "out", KIND).check()
    return [(place / f"log-{number}").read_text() for number in range(2)]


@pytest.mark.prove
def test_the_second_waits_for_the_first_and_takes_its_model(prepared: Path, tmp_path: Path) -> None:
    first, second = train_twice(tmp_path, prepared, together=False)
    assert first.startswith("0\n") and re.search(r"\d+ steps in \d", first), first
    assert second.startswith("0\n") and "held by a run without a name" in second, second
    assert "out is the model of this training already" in second and " steps in " not in second, second


@pytest.mark.prove
@pytest.mark.parametrize("_", range(3))
def test_of_two_in_the_same_moment_one_makes_the_model_and_the_other_has_a_line(
    prepared: Path, tmp_path: Path, _: int
) -> None:
    logs = train_twice(tmp_path, prepared, together=True)
    assert any(log.startswith("0\n") for log in logs), logs
    for log in logs:
        code, text = log.split("\n", 1)
        assert "Traceback" not in text and 'File "' not in text, log
        assert code == "0" or (
            "has taken over this checkpoint directory" in text and "start again to wait for the other one" in text
        ), log
