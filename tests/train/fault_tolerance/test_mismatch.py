"""Checkpoints that do not fit, and unusable checkpoint directories, are refused before training."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from slipstream.operations.proofs.processes import free_port
from slipstream.pipeline.train.command import main as train
from tests.support import REPOSITORY
from tests.support.command_line import Ended, invoke, one_message, run_in, run_process
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3
from tests.support.quick_config import EXPORT, NETWORK

TRAINING = {"epochs": 2, "batch_size": 64, "checkpoint_interval": {"steps": 1}, "checkpoint_uri": "kept"}
ROWS = "".join(f"{i % 7},{(i * 37) % 101},{'yes' if i % 3 else 'no'}\n" for i in range(400))
NETS = """
from layers import SCALE
from slipstream.shared.models.tables_and_images import MLP
class Scaled(MLP):
    def forward(self, *inputs):
        return SCALE * super().forward(*inputs)
"""
QUICK = {"export": EXPORT, "collectives": NETWORK}


class Directory:
    """A working directory in which a run has left checkpoints in ``kept``."""

    def __init__(self, place: Path, prepared: Path, server: FaultyS3) -> None:
        self.place, self.prepared = place, prepared
        self.environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.url}

    def config(self, training: dict[str, Any], model: dict[str, Any] | None = None) -> Path:
        path = self.place / "run.yaml"
        path.write_text(json.dumps({"training": {**TRAINING, **training}, "model": model or {}, **QUICK}))
        return path

    def rank(
        self, training: dict[str, Any], output: str, model: dict[str, Any] | None = None
    ) -> tuple[list[str], dict[str, str]]:
        """The arguments and the environment of one rank of plain torchrun's, without its agent."""
        place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        arguments = [str(self.prepared), output, str(self.config(training, model))]
        return arguments, {**self.environment, **place, **meeting, "PYTHONPATH": str(REPOSITORY)}

    def train(self, training: dict[str, Any], output: str = "out", model: dict[str, Any] | None = None) -> Ended:
        arguments, environment = self.rank(training, output, model)
        return invoke(train, self.place, arguments, environment)

    def train_in_a_process(self, training: dict[str, Any], output: str = "out") -> Ended:
        arguments, environment = self.rank(training, output)
        return run_process([sys.executable, "-m", "slipstream", "train", *arguments], self.place, environment)

    def pyflyte(self, training: dict[str, Any], model: dict[str, Any] | None, rows: str) -> Ended:
        (self.place / "t.csv").write_text("a,b,y\n" + rows)
        arguments = ["--data", "t.csv", "--target", "y", "--config", str(self.config(training, model))]
        return run_in(self.place, *arguments, **self.environment)


@pytest.fixture(scope="module")
def plain(prepared: Path, server: FaultyS3, tmp_path_factory: pytest.TempPathFactory) -> Directory:
    directory = Directory(tmp_path_factory.mktemp("plain"), prepared, server)
    assert (done := directory.train_in_a_process({})).returncode == 0, done.stdout
    return directory


def only_line(refused: Ended) -> str:
    assert refused.returncode == 1
    (line,) = refused.stdout.strip().splitlines()
    return line


@pytest.mark.prove
def test_another_seed_is_refused_and_never_starts_afresh(plain: Directory) -> None:
    line = only_line(plain.train({"seed": 4}, "other"))
    assert "kept/step-" in line and "was made with training.seed 0, this run has 4" in line
    assert line.endswith("or start afresh with training.resume=never")
    afresh = plain.train({"seed": 4, "resume": "never"}, "other")
    assert afresh.returncode == 0 and "resumes from step" not in afresh.stdout, afresh.stdout


@pytest.mark.prove
def test_a_missing_bucket_is_found_before_training(plain: Directory) -> None:
    line = only_line(plain.train({"checkpoint_uri": "s3://absent/kept"}, "third"))
    assert "s3://absent/kept" in line and "there is no bucket 'absent'; create it" in line


def test_a_model_is_not_written_over_another(plain: Directory) -> None:
    made = (plain.place / "out" / "manifest.json").read_bytes()
    assert "out: holds an artifact already; choose another OUTPUT" in only_line(plain.train({"epochs": 3}))
    assert (plain.place / "out" / "manifest.json").read_bytes() == made


def test_a_rank_that_died_after_the_end_of_its_training_ends_well_when_it_is_started_again(plain: Directory) -> None:
    again = plain.train({})
    assert again.returncode == 0
    assert "out is the model of this training already; remove it to train again" in again.stdout


@pytest.mark.prove
def test_edited_code_of_the_model_is_another_training(prepared: Path, server: FaultyS3, tmp_path: Path) -> None:
    """The edited module is imported by the factory's module, and the old weights would fit."""
    directory, own = Directory(tmp_path, prepared, server), {"name": "nets:Scaled"}
    (tmp_path / "nets.py").write_text(NETS)
    (tmp_path / "layers.py").write_text("SCALE = 1")
    assert (done := directory.train({"epochs": 1}, model=own)).returncode == 0, done.stdout
    again = directory.train({"epochs": 1}, model=own)
    assert "out is the model of this training already" in again.stdout, again.stdout
    (tmp_path / "layers.py").write_text("SCALE = 0.5")
    assert "out: holds an artifact already; choose" in only_line(directory.train({"epochs": 1}, model=own))
    line = only_line(directory.train({"epochs": 1}, "other", own))
    assert "kept/step-" in line and "was made with model_code.layers " in line and "training.resume=never" in line
    assert not (tmp_path / "other").exists()


@pytest.fixture(scope="module")
def flyte(prepared: Path, server: FaultyS3, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Directory]:
    directory = Directory(tmp_path_factory.mktemp("flyte"), prepared, server)
    assert (done := directory.pyflyte({}, None, ROWS)).returncode == 0, done.stdout
    (directory.place / "file").touch()
    (made,) = sorted((directory.place / "kept").glob("step-*"))[-1:]
    manifest = json.loads((made / "manifest.json").read_bytes())
    made_by = manifest["made_by"]
    for home, changed in {
        "newer": {"content": made_by["content"] + 1},
        "reordered": {"identity": {**made_by["identity"], "order": 1}},
    }.items():
        copied = Path(shutil.copytree(made, directory.place / home / made.name))
        (copied / "manifest.json").write_text(json.dumps({**manifest, "made_by": {**made_by, **changed}}))
    s3 = boto3.client(
        "s3", endpoint_url=server.url, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
    )
    s3.create_bucket(Bucket="read-only")
    yield directory


MISMATCHES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, str]] = {
    # what differs: training settings, model settings, data, what the line says
    "seed": ({"seed": 4}, None, ROWS, "was made with training.seed 0, this run has 4"),
    "model": ({}, {"arguments": {"hidden": [8]}}, ROWS, "was made with model.arguments.hidden [64], this run has [8]"),
    "data": ({}, None, ROWS[:-40], "was made with data "),
    "newer format": ({"checkpoint_uri": "newer"}, None, ROWS, "written by a newer version of this project (content 2"),
    "another order of rows": ({"checkpoint_uri": "reordered"}, None, ROWS, "was made with order 1, this run has 2"),
    "no directory": ({"checkpoint_uri": "file/kept"}, None, ROWS, "file/kept: cannot be written (Not a directory)"),
    "no bucket": ({"checkpoint_uri": "s3://absent/kept"}, None, ROWS, "there is no bucket 'absent'"),
    "refused bucket": ({"checkpoint_uri": "s3://read-only/kept"}, None, ROWS, "access denied"),
}


@pytest.mark.prove
@pytest.mark.parametrize("case", MISMATCHES)
def test_what_does_not_fit_is_refused_in_one_line(case: str, flyte: Directory, server: FaultyS3) -> None:
    training, model, rows, expected = MISMATCHES[case]
    if case == "refused bucket":
        server.inject("PUT", "403")
    # A setting that is no part of what a checkpoint must agree in, so that no stage is reused.
    refused = flyte.pyflyte({"accumulation": 2, **training}, model, rows)
    assert refused.returncode == 1, refused.stdout
    assert expected in one_message(refused.stdout)
    assert "validation loss" not in refused.stdout, "it trained before it refused"
    server.plan.clear()


@pytest.mark.prove
def test_never_starts_afresh_beside_what_does_not_fit(flyte: Directory) -> None:
    afresh = flyte.pyflyte({"seed": 5, "resume": "never"}, None, ROWS)
    assert afresh.returncode == 0 and "resumes from step" not in afresh.stdout, afresh.stdout
