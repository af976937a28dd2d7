"""Ten everyday jobs, each by the commands of the pages, with the minutes that it takes (``-s`` shows them)."""

import json
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

import slipstream
from slipstream.subcommands import slipstream as command
from tests.support.bases import make_base
from tests.support.command_line import PYFLYTE, TERMINAL, TRAINING, run_in, run_process
from tests.support.corpora import story, write_lines
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.raw_tables import mixed_frame

QUICK: dict[str, Any] = {"export": EXPORT, "collectives": NETWORK}


class Jobs:
    """A user's directory with a table, and the minutes of every job."""

    def __init__(self, place: Path) -> None:
        self.place, self.minutes = place, dict[str, float]()
        mixed_frame(1500, "classification").to_csv(place / "churn.csv", index=False)
        mixed_frame(1500, "regression").to_csv(place / "prices.csv", index=False)
        mixed_frame(300, "classification", seed=5).drop(columns="y").to_csv(place / "today.csv", index=False)

    @contextmanager
    def job(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.minutes[name] = (time.perf_counter() - started) / 60

    def pyflyte(self, *arguments: str, config: dict[str, Any] | None = None, **where: Any) -> str:
        settings = json.dumps({**QUICK, **(config or {})})
        ended = run_in(self.place, *arguments, "--config", settings, **where)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def slipstream(self, *arguments: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(self.place)
            ended = CliRunner().invoke(command, list(arguments))
        assert ended.exit_code == 0, ended.output
        return ended.output

    def newest(self) -> Path:
        return max((self.place / "runs").glob("2*"), key=lambda path: path.stat().st_mtime_ns)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.newest() / "summary.json").read_text())


def interrupted_and_resumed(jobs: Jobs) -> str:
    """Press Ctrl-C in mid-training, start again, and return the output of the second start."""
    settings = {**QUICK, "training": {"epochs": 300, "batch_size": 64, "checkpoint_interval": {"steps": 10}}}
    training = [PYFLYTE, "run", TRAINING, "train_and_export", "--data", "churn.csv", "--target", "y"]
    asked = [*map(str, training), "--config", json.dumps({**settings, "model": {"arguments": {"hidden": [9]}}})]
    with (jobs.place / "log").open("wb") as log:
        agent = subprocess.Popen(asked, cwd=jobs.place, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    end = time.monotonic() + 300
    while len(list(jobs.place.glob(".slipstream/checkpoints/*/step-*"))) < 2:
        assert agent.poll() is None and time.monotonic() < end, (jobs.place / "log").read_text()
        time.sleep(0.05)
    agent.send_signal(signal.SIGINT)
    assert agent.wait(300) == 1
    again = run_process(asked, jobs.place, TERMINAL)
    assert again.returncode == 0, again.stdout
    return again.stdout


@pytest.mark.prove
def test_ten_everyday_jobs(tmp_path: Path) -> None:
    jobs, churn = Jobs(tmp_path), ("--data", "churn.csv", "--target", "y")
    with jobs.job("table with mixed types"):
        jobs.pyflyte(*churn)
        assert jobs.summary()["evaluation"]["metric"]["value"] > 0.8
    first = jobs.newest()
    with jobs.job("regression"):
        jobs.pyflyte("--data", "prices.csv", "--target", "y")
        assert jobs.summary()["evaluation"]["model"]["r2"] > 0.2
    with jobs.job("image folder"):
        write_images(tmp_path / "shades")
        jobs.pyflyte("--data", "shades", config={"training": {"epochs": 5}})
        assert jobs.summary()["evaluation"]["metric"]["value"] > 0.8
    with jobs.job("Ctrl-C and resume"):
        assert "training resumes from step" in interrupted_and_resumed(jobs)
    with jobs.job("predict from raw rows"):
        rows = pd.read_csv(tmp_path / "today.csv")
        predicted = slipstream.load(first).predict(rows)
        assert set(predicted["label"]) == {"yes", "no"} and len(predicted) == 300
    with jobs.job("sweep"):
        space = {"training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}}
        jobs.pyflyte(*churn, config={"sweep": {"trials": 3, "space": space}}, workflow="sweep", file="sweep")
        assert len(jobs.summary()["sweep"]["trials"]) == 3
    with jobs.job("promote and score twice"):
        jobs.pyflyte("--registry", "registry", *churn, workflow="train_and_promote")
        where: dict[str, Any] = {"workflow": "score", "file": "scoring"}
        arguments = ("--registry", "registry", "--data", "today.csv", "--output", "scores")
        said = [jobs.pyflyte(*arguments, **where) for _ in range(2)]
        assert "Published   now" in said[0] and "Published   earlier" in said[1]
        scored = pd.concat(map(pd.read_parquet, (tmp_path / "scores").glob("tables/*")), ignore_index=True)
        assert np.mean(scored["label"].to_numpy() == predicted["label"].to_numpy()) > 0.9
    with jobs.job("fine-tune"):
        make_base(tmp_path / "base", max_position_embeddings=512)
        write_lines(tmp_path / "texts.jsonl", [{"text": story(number)} for number in range(80)])
        tuned = {"data": {"length": 256}, "training": {"epochs": 1}, "model": {"lora": {"rank": 4}}}
        jobs.pyflyte("--base", "base", "--data", "texts.jsonl", config=tuned, workflow="fine_tune")
        assert (jobs.newest() / "model/hugging-face").is_dir()
    with jobs.job("compare two settings"):
        jobs.pyflyte(*churn, config={"training": {"epochs": 2}})
        said_of_both = jobs.slipstream("compare", str(first), str(jobs.newest()))
        assert re.search(r"training\.epochs", said_of_both) and "95 %" in said_of_both
    with jobs.job("plan"):
        assert "$" in jobs.slipstream("plan", "--measured", str(first), "--deadline", "12h", "--budget", "10")
    assert len(jobs.minutes) == 10
    print("".join(f"\n{minutes:6.1f} min  {name}" for name, minutes in jobs.minutes.items()))


def write_images(folder: Path) -> None:
    """Dark and light images, in a folder per class."""
    from PIL import Image

    draw = np.random.default_rng(0)
    for label, shade in {"dark": 0, "light": 90}.items():
        (folder / label).mkdir(parents=True)
        for number in range(120):
            pixels = draw.integers(shade, shade + 120, (16, 16)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / label / f"{number}.png")
