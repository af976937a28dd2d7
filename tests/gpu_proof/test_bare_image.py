"""`make gpu` needs the packages that docs/gpu.md lists, and no others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.operations.proofs.gpu.check import CHECKS
from slipstream.operations.proofs.gpu.command import main
from tests.support import REPOSITORY
from tests.support.bare_image import hidden_modules, listed_packages, present_in_image, write_blocker

#: Packages that the code of this project imports and GPU images lack.
CLIENTS = {"boto3", "botocore", "croniter", "flyteidl", "flytekit"}
CHECK_MODULES = sorted({f"slipstream.operations.proofs.gpu.checks.{check.function.split(':')[0]}" for check in CHECKS})


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Hide all other packages from the processes that the test starts."""
    (tmp_path / "image").mkdir()
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(write_blocker(tmp_path / "image", present_in_image())), str(REPOSITORY)])
    )
    return tmp_path


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)


def test_clients_of_stores_and_of_flyte_are_hidden(image: Path) -> None:
    hidden = set(hidden_modules(present_in_image()))
    assert hidden >= CLIENTS and not hidden & {*listed_packages()}
    for name in CLIENTS:
        assert f"No module named '{name}'" in run_python(f"import {name}").stderr


@pytest.mark.prove
def test_every_check_and_the_command_line_are_imported(image: Path) -> None:
    modules = [
        *CHECK_MODULES,
        "slipstream.operations.proofs.gpu.command",
        "slipstream.pipeline.train.command",
        "slipstream.shared.cron",
    ]
    ended = run_python("\n".join(f"import {module}" for module in modules))
    assert ended.returncode == 0, ended.stderr


def test_a_store_without_its_client_is_one_line(image: Path) -> None:
    ended = run_python("from slipstream.shared.storage import storage_for\nstorage_for('s3://bucket/key')")
    assert "UserError: s3://bucket/key: boto3 is missing" in ended.stderr


@pytest.mark.prove
@pytest.mark.alone
def test_all_checks_hold_as_the_command_runs_them(image: Path) -> None:
    """But for those that need a GPU or torch's exporter."""
    ended = CliRunner().invoke(main, ["--quick", "--output", str(image / "out")])
    assert ended.exit_code == 0, ended.output
    written = json.loads((image / "out/gpu.json").read_text())
    reasons = {each["name"]: each["reason"] for each in written["checks"] if each["state"] != "held"}
    assert reasons == {
        "graphs": "a CPU has no graphs",
        "export": "torch's exporter needs onnxscript: pip install onnxscript",
    }
    assert (image / "out/trace.json.gz").stat().st_size > 1000
    assert len(list((image / "out").iterdir())) <= 8
    lines = (image / "out/figures.jsonl").read_text().splitlines()
    assert len(lines) == sum(len(each["figures"]) for each in written["checks"]) > 60
    assert written["seconds"] <= 530
