"""``slipstream doctor``: output, exit codes, and one line for unusable input."""

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest

from slipstream.operations.doctor.command import main
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.artifacts.results.training import ATTEMPT, KIND, Attempt, Goodput
from tests.support import REPOSITORY
from tests.support.command_line import Ended, invoke, run_process
from tests.support.proving import first_few
from tests.support.wording import line_with, same_wording

LIMITS = '[limits]\ncpu = "96"\nmemory = "1100Gi"\ngpu = "8"\n'


def doctor(place: Path, *arguments: object) -> Ended:
    """The command without a kubectl to ask."""
    return invoke(main, place, [str(argument) for argument in arguments], {"PATH": str(place)})


def test_it_exits_with_1_only_if_something_will_fail(archive: Path, tmp_path: Path) -> None:
    ended = doctor(tmp_path, archive)
    assert ended.returncode == 0, ended.stdout
    same_wording(line_with("--limits", ended.stdout))
    (tmp_path / "small.toml").write_text('[limits]\ncpu = "2"\n')
    ended = doctor(tmp_path, archive, "--limits", "small.toml")
    assert ended.returncode == 1 and "\nerror: " in f"\n{ended.stdout}"
    assert "cpu 4 is over the platform's 2: registration is refused; raise" in ended.stdout
    (tmp_path / "cluster.toml").write_text(LIMITS)
    ended = doctor(tmp_path, archive, "--limits", "cluster.toml")
    assert ended.returncode == 0, ended.stdout
    assert not [line for line in ended.stdout.splitlines() if line.startswith("error")]
    assert "--limits" not in ended.stdout
    assert "not checked: the cluster: no kubectl on PATH" in ended.stdout.splitlines()


def test_dockerfiles_beside_the_package_are_read(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images/gpu.Dockerfile").write_text("FROM base\nUSER someone\n")
    (tmp_path / "flyte.tgz").symlink_to(archive)
    assert "images/gpu.Dockerfile: the image's user is someone, by name" in doctor(tmp_path, "flyte.tgz").stdout


def trained(directory: Path, save_seconds: float) -> Path:
    writer = ArtifactWriter(directory)
    ledger = Goodput(1, 0, 0, {}, 0.0, 0.0, (), 1.0, 1.0)
    write_record(writer, ATTEMPT, Attempt(steps=0, resumed_from="", save_seconds=save_seconds, ledger=ledger))
    writer.finish(KIND, {})
    return directory


def test_grace_periods_are_compared_with_the_measured_save(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(LIMITS)
    slow = trained(tmp_path / "slow", save_seconds=145.5)
    ended = doctor(tmp_path, archive, "--limits", "cluster.toml", "--trained", slow)
    assert ended.returncode == 1
    same_wording(line_with("terminationGracePeriodSeconds", ended.stdout))
    quick = trained(tmp_path / "quick", save_seconds=2.0)
    ended = doctor(tmp_path, archive, "--limits", "cluster.toml", "--trained", quick)
    assert ended.returncode == 0 and f"against a save of 2 s (measured in {quick})" in ended.stdout


def no_package(place: Path) -> Path:
    with tarfile.open(place / "other.tgz", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("readme.txt"), io.BytesIO())
    return place / "other.tgz"


def torn(place: Path, archive: Path) -> Path:
    (place / "torn.tgz").write_bytes(archive.read_bytes()[:2000])
    return place / "torn.tgz"


def no_protobuf(place: Path) -> Path:
    with tarfile.open(place / "noise.tgz", "w:gz") as tar:
        entry = tarfile.TarInfo("00_mine_1.pb")
        entry.size = 4
        tar.addfile(entry, io.BytesIO(b"\xff\xff\xff\xff"))
    return place / "noise.tgz"


def text(place: Path) -> Path:
    (place / "notes.tgz").write_text("not an archive")
    return place / "notes.tgz"


def test_what_is_no_package_is_one_line(archive: Path, tmp_path: Path) -> None:
    bad = {
        tmp_path / "absent.tgz": "no such file",
        tmp_path: "is a directory; expected --profile",
        text(tmp_path): "not an archive of `pyflyte package` (the tar file is incomplete); package again",
        no_package(tmp_path): "it describes no tasks",
        no_protobuf(tmp_path): "not an archive of `pyflyte package`",
        torn(tmp_path, archive): "not an archive of `pyflyte package`",
    }
    for path, why in bad.items():
        ended = doctor(tmp_path, path)
        assert ended.returncode == 1
        (line,) = ended.stdout.splitlines()
        assert line.startswith(f"Error: {path}: ") and why in line


@pytest.mark.parametrize(
    ("toml", "said"),
    [
        ("cpu = 2\ngpu = 8", "2 cpu, 1Gi memory, 8 gpu"),
        ("cpu = 0.5\nmemory = 1024", "0.5 cpu, 1024 memory, 1 gpu"),
        ("cpu = 4.0\nmemory = '2Gi'", "4 cpu, 2Gi memory, 1 gpu"),
    ],
)
def test_limits_may_be_numbers(archive: Path, tmp_path: Path, toml: str, said: str) -> None:
    (tmp_path / "cluster.toml").write_text(f"[limits]\n{toml}\n")
    assert f"against the platform's limits of {said}" in doctor(tmp_path, archive, "--limits", "cluster.toml").stdout


@pytest.mark.parametrize(
    "toml",
    first_few(
        [
            "[limit]\n",
            "[limits]\ngpus = '8'\n",
            "[limits]\nmemory = 'much'\n",
            "[limits]\ncpu = -2\n",
            "[limits]\ncpu = true\n",
            "limits = 2\n",
            "[limits\n",
        ],
        2,
    ),
)
def test_wrong_limits_are_one_line(archive: Path, tmp_path: Path, toml: str) -> None:
    (tmp_path / "cluster.toml").write_text(toml)
    ended = doctor(tmp_path, archive, "--limits", "cluster.toml")
    (line,) = ended.stdout.splitlines()
    assert ended.returncode == 1 and line.startswith("Error: cluster.toml: ")
    same_wording(line)


def test_other_mistakes_are_one_line(archive: Path, tmp_path: Path) -> None:
    unsaved = trained(tmp_path / "unsaved", save_seconds=0.0)
    for arguments, why in (
        ([], "expected PACKAGE.tgz"),
        (["--node", archive], "--node: checks this machine only"),
        ([archive, "--store", "s3://bucket/x"], "expected PACKAGE.tgz"),
        ([archive, "--limits", "absent.toml"], "absent.toml: no such file"),
        ([archive, "--trained", tmp_path], "this is not a finished artifact"),
        ([archive, "--trained", unsaved], "its record has no save"),
    ):
        ended = doctor(tmp_path, *arguments)
        (line,) = ended.stdout.splitlines()
        assert ended.returncode == 1 and line.startswith("Error: ") and why in line


def test_the_node_is_read_without_a_package(tmp_path: Path) -> None:
    ended = doctor(tmp_path, "--node", "--store", tmp_path / "store")
    assert ended.returncode == 0
    lines = ended.stdout.splitlines()
    for what in (
        "host: ",
        "torch: ",
        "CPU: ",
        "/dev/shm: ",
        "store: ",
        "clock: not read: a directory has this machine's",
    ):
        assert any(line.startswith(what) for line in lines), what
    kept = f"conditional writes: {tmp_path / 'store'}: the second write of a key was refused, as it must be"
    assert kept in lines
    assert not json.dumps(lines).count("Traceback") and not list((tmp_path / "store").glob("doctor-*"))


def test_a_wrong_profile_does_not_matter_to_it(tmp_path: Path) -> None:
    """The module is also that of a workflow, whose tasks are placed by a profile."""
    command = [sys.executable, "-m", "slipstream", "doctor", "absent.tgz"]
    ended = run_process(command, tmp_path, {"PYTHONPATH": str(REPOSITORY), "SLIPSTREAM_PROFILE": "none"})
    assert ended.returncode == 1
    same_wording(ended.stdout)
