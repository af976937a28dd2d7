"""The command ``slipstream``: list, help, completion, and one line of error if a dependency is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from slipstream import subcommands
from slipstream.subcommands import SUBCOMMANDS, slipstream
from tests.support import REPOSITORY

COMMAND = Path(sys.executable).with_name("slipstream")


def asked(*arguments: str) -> Result:
    return CliRunner().invoke(slipstream, list(arguments), prog_name="slipstream")


def run(place: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, **environment}
    return subprocess.run([COMMAND, *arguments], cwd=place, env=variables, capture_output=True, text=True, timeout=120)


def test_it_lists_what_there_is_without_importing_it() -> None:
    code = "import sys; from slipstream.subcommands import slipstream; slipstream(['--help'], standalone_mode=False); "
    code += "print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *listed, modules = run.stdout.splitlines()
    assert all(any(line.split()[:1] == [name] for line in listed) for name in SUBCOMMANDS)
    assert not {"torch", "numpy", "flytekit"} & set(modules.split())


@pytest.mark.parametrize("name", [name for name in SUBCOMMANDS if name != "check"])
def test_each_explains_itself_by_an_example(name: str) -> None:
    told = asked(name, "--help")
    assert told.exit_code == 0 and f"Usage: slipstream {name}" in told.output
    assert f"slipstream {name}" in told.output.split("Example: ")[1]


def test_a_word_that_is_no_command_is_said() -> None:
    told = asked("trian")
    assert told.exit_code == 2 and "No such command 'trian'" in told.output


def test_it_is_installed_and_completes(tmp_path: Path) -> None:
    words = {"_SLIPSTREAM_COMPLETE": "bash_complete", "COMP_WORDS": "slipstream ch", "COMP_CWORD": "1"}
    assert run(tmp_path, **words).stdout.split() == ["plain,checkpoints", "plain,check"]


def test_what_belongs_to_the_project_needs_a_clone_and_the_rest_none(tmp_path: Path) -> None:
    asked = run(tmp_path, "schedules")
    assert (
        asked.returncode == 1
        and asked.stderr.count("\n") == 1
        and "the directory workflows is missing here" in asked.stderr
    )
    assert run(REPOSITORY, "schedules").returncode == 0
    checked = run(tmp_path, "check", "absent")
    assert checked.returncode == 1 and checked.stderr == (
        "Error: absent: not an exported model; expected a directory with a manifest.json\n"
    )


def test_a_command_whose_package_is_missing_is_not_listed_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subcommands, "find_spec", lambda name: None if name in ("moto", "cryptography") else name)
    listed = {line.split()[0] for line in asked("--help").output.split("Commands:\n")[1].splitlines()}
    assert listed == SUBCOMMANDS.keys() - {"rehearse", "sign"}
    called = asked("sign", "--help")
    assert called.exit_code == 1 and called.output.count("\n") == 1
    assert "package cryptography is missing; pip install -e '.[sign]'" in called.output


def test_workflows_of_another_project_are_not_taken_for_a_clone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "workflows").mkdir()
    (tmp_path / "workflows/__init__.py").write_text("raise ZeroDivisionError\n")
    monkeypatch.chdir(tmp_path)
    listed = asked("--help").output
    assert not [name for name in ("schedules", "rehearse", "cluster-proof") if f"  {name} " in listed]
    assert "in a clone" in asked("schedules").output


@pytest.mark.parametrize("arguments", [["check", "."], ["profiles", "local"]])
def test_it_imports_nothing_from_the_directory_where_it_is_called(tmp_path: Path, arguments: list[str]) -> None:
    """A package that is to be checked comes from anywhere."""
    for name in ("numpy", "onnxruntime", "click", "tomllib"):
        (tmp_path / f"{name}.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    run(tmp_path, *arguments)
    assert not (tmp_path / "imported").exists()
