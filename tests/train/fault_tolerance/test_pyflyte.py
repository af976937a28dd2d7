"""Kills through ``pyflyte run``: the agent restarts the workers, and the user restarts the run."""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.support.main_job import MainJob
from tests.support.processes import forked_workers
from tests.support.quick_config import EXPORT, NETWORK

CONFIG = {
    "model": {"arguments": {"hidden": [48, 32], "dropout": 0.2}},
    "training": {"epochs": 240, "batch_size": 64, "checkpoint_every": 10, "evaluate_every": 100, "patience": 0},
    "export": EXPORT,
    "collectives": NETWORK,
}
#: One process group of two; started again twice by its agent.
PROFILE = "[stages.train]\nprocesses = 2\nrestarts = 2\n[stages.collectives]\nprocesses = 2\n"
TABLE = "a,b,y\n" + "".join(f"{i % 7},{(i * 37) % 101},{'yes' if i % 3 else 'no'}\n" for i in range(400))


@pytest.mark.prove
def test_killed_under_pyflyte_it_ends_the_same(tmp_path: Path) -> None:
    whole, killed = (MainJob(tmp_path / name, TABLE, CONFIG, PROFILE) for name in ("whole", "killed"))
    assert whole.start().wait(300) == 0, whole.log()

    agent = killed.start()
    # In one execution: the agent starts the workers again, and they go on from its own checkpoint.
    for step, victims in ((50, slice(0, 1)), (200, slice(None))):
        killed.wait_for_step(agent, step)
        workers = forked_workers(agent.pid)
        assert len(workers) == 2
        for worker in workers[victims]:
            os.kill(worker, signal.SIGKILL)
    # A third loss is one too many: the run ends, and says how to go on.
    killed.wait_for_step(agent, 350)
    os.kill(forked_workers(agent.pid)[1], signal.SIGKILL)
    assert agent.wait(120) == 1
    said = "train: interrupted (the worker of rank 1 was lost to SIGKILL); start it again to resume from there"
    assert said in killed.log()
    # The agent itself: killed, then told to end.
    agent = killed.start()
    killed.wait_for_step(agent, 500)
    agent.kill()
    assert agent.wait() == -signal.SIGKILL
    agent = killed.start()
    killed.wait_for_step(agent, 650)
    agent.send_signal(signal.SIGTERM)
    assert agent.wait(120) == 1
    assert re.search(r"interrupted \(stopped at step \d+, saved \(rank \d: signal: SIGTERM\)\)", killed.log())

    assert killed.start().wait(300) == 0, killed.log()
    assert killed.trained() == whole.trained()
    (attempt,) = killed.place.glob(".slipstream/train/*/attempt.json")
    ledger = json.loads(attempt.read_bytes())["ledger"]
    assert ledger["attempts"] == 6, ledger
    assert (killed.place / "log").read_text().count("resumes from step") == 5
