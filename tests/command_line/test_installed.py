"""The installed wheel in an empty folder: it lists the commands that work there, and has the files that they need."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slipstream.subcommands import SUBCOMMANDS
from tests.support import REPOSITORY
from tests.support.bare_image import with_dependencies, write_blocker

PIP: list[str | Path] = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
#: Of a wheel and of its installation: from what is there.
ALONE = ["--no-deps", "--no-index"]
NO_SOURCE = shutil.ignore_patterns("__pycache__", "*.egg-info")
#: Starts every listed command with --help, and prints what was listed and from where it was loaded.
START_ALL = """
import contextlib, io, json, sys
import sitecustomize
from slipstream.__main__ import main


def run(*words):
    sys.argv = ["slipstream", *words]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
    assert not code, f"{words}: exit code {code}"
    return said.getvalue()


listed = [line.split()[0] for line in run("--help").split("Commands:\\n")[1].splitlines()]
helps = {name: run(name, "--help") for name in listed}
ours = ("slipstream", "tasks", "workflows", "tests")
modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in ours]
print(json.dumps({"helps": helps, "files": [module.__file__ for module in modules if module.__file__]}))
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which the wheel of a copy of the sources is installed."""
    place = tmp_path_factory.mktemp("installed")
    source = place / "source"
    for name in ("slipstream", "tasks", "workflows", "examples"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=NO_SOURCE)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source / name)
    subprocess.run([*PIP, "wheel", *ALONE, "--no-build-isolation", "--wheel-dir", place / "dist", source], check=True)
    (wheel,) = (place / "dist").iterdir()
    subprocess.run([*PIP, "install", *ALONE, "--no-compile", "--target", place / "site", wheel], check=True)
    return place / "site"


def core_packages() -> set[str]:
    """The packages that an installation without extras brings."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return with_dependencies(Requirement(text).name for text in project["dependencies"]) | {"slipstream"}


def test_it_holds_the_package_with_all_of_its_data_and_nothing_else(site: Path) -> None:
    assert {path.name.partition("-")[0] for path in site.iterdir()} == {"bin", "slipstream"}

    def files(folder: Path) -> set[str]:
        paths = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        return {path.relative_to(folder).as_posix() for path in paths}

    assert files(site / "slipstream") == files(REPOSITORY / "slipstream")


@pytest.mark.prove
def test_every_command_that_it_lists_in_an_empty_folder_starts(site: Path, tmp_path: Path) -> None:
    """Without the packages of the extras, and with no .pth file: nothing leads to a clone."""
    (tmp_path / "empty").mkdir()
    blocker = write_blocker(tmp_path, core_packages())
    path = os.pathsep.join(map(str, [blocker, site, sysconfig.get_path("purelib")]))
    ended = subprocess.run(
        [sys.executable, "-S", "-c", START_ALL],
        cwd=tmp_path / "empty",
        env={"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    in_clone = {name for name, known in SUBCOMMANDS.items() if known.in_clone}
    assert in_clone == {"schedules", "rehearse", "cluster-proof"}
    assert found["helps"].keys() == SUBCOMMANDS.keys() - in_clone - {"generate"}, "it needs the extra [text]"
    assert all(f"slipstream {name}" in text for name, text in found["helps"].items())
    assert [file for file in found["files"] if not Path(file).is_relative_to(site)] == []


def test_the_script_runs(site: Path, tmp_path: Path) -> None:
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": path}
    command: list[str | Path] = [sys.executable, "-S", site / "bin/slipstream", "profiles", "a100-spot"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0 and "train" in ended.stdout, ended.stderr


#: Another project: its workflow calls a task of this one. Prints the tasks that would be registered.
STRANGER = """
import flytekit, json
from flytekit import FlyteContextManager, workflow
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.serialize_helpers import get_registrable_entities
from slipstream.flyte.artifact_types import MadeEvaluated, Prepared, Trained
from slipstream.flyte.tasks.evaluate import evaluate


@workflow
def mine(trained: Trained, prepared: Prepared) -> MadeEvaluated:
    made = evaluate(trained=trained, prepared=prepared)
    return MadeEvaluated(made.artifact, made.run)


settings = SerializationSettings(image_config=ImageConfig.auto(img_name="a:b"), project="p", domain="d", version="v")
with FlyteContextManager.with_context(FlyteContextManager.current_context().with_serialization_settings(settings)) as c:
    entities = [entity.to_flyte_idl() for entity in get_registrable_entities(c)]
tasks = [entity.template for entity in entities if hasattr(getattr(entity, "template", None), "container")]
print(json.dumps({task.id.name: list(task.container.args)[-4:] for task in tasks}))
"""


def test_another_project_calls_a_task_of_the_wheel(site: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.py").write_text(STRANGER)
    path = os.pathsep.join([str(site), sysconfig.get_path("purelib")])
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": path}
    command: list[str | Path] = [sys.executable, "-S", "theirs.py"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    name = "slipstream.flyte.tasks.evaluate"
    loader = ["task-module", name, "task-name", "evaluate"]
    assert json.loads(ended.stdout.splitlines()[-1]) == {f"{name}.evaluate": loader}
