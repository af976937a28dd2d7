"""Promises of the images, read from their Dockerfiles; a fake pip records their installing steps."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
from flytekit.clis.sdk_in_container.register import register
from flytekit.clis.sdk_in_container.run import run

from tests.support import REPOSITORY
from tests.support.dockerfile import Instruction, copied, ignored, instructions

IMAGES = {path.stem: instructions(path) for path in sorted((REPOSITORY / "images").glob("*.Dockerfile"))}
CODE = {"slipstream", "tasks", "workflows"}


@pytest.fixture(params=IMAGES)
def image(request: pytest.FixtureRequest) -> list[Instruction]:
    return IMAGES[request.param]


def places(image: list[Instruction], name: str, pattern: str) -> list[int]:
    return [place for place, (kind, value) in enumerate(image) if kind == name and re.search(pattern, value)]


def test_the_code_is_copied_after_what_it_depends_on(image: list[Instruction]) -> None:
    copies = [place for place, instruction in enumerate(image) if instruction.name == "COPY"]
    of_code = [place for place in copies if CODE & set(copied(image[place]))]
    assert {source for place in of_code for source in copied(image[place])} >= CODE
    (dependencies,) = places(image, "RUN", "pip install .*--requirement")
    (package,) = places(image, "RUN", r"pip install .*\.$")
    assert dependencies < min(of_code) and max(copies) < package
    assert "--no-deps" in image[package].value
    before = {source for place in copies if place < dependencies for source in copied(image[place])}
    assert before == {"pyproject.toml", "constraints.txt", "images/requirements.py"}


def test_it_runs_as_a_user_by_number_who_owns_home_and_working_directory(image: list[Instruction]) -> None:
    (user,) = places(image, "USER", "")
    assert image[user].value == "1000" and user == len(image) - 1
    (workdir,), (home,) = places(image, "WORKDIR", ""), places(image, "ENV", "HOME=")
    directory = image[workdir].value
    (owner,) = places(image, "RUN", rf"chown 1000 .*{directory}$")
    assert "HOME=/home/flyte" in image[home].value
    assert re.search(r"useradd --create-home|chown 1000 /home/flyte", image[owner].value)
    for place in places(image, "COPY", "slipstream|tasks|workflows"):
        assert "--chown=1000" in image[place].value


def test_registered_code_is_unpacked_over_the_images_own(image: list[Instruction]) -> None:
    """Uid 1000 may write there. Code sent by ``run --remote`` finds the rest in the same directory."""
    (workdir,) = places(image, "WORKDIR", "")
    by_register, by_run = (
        next(option.default for option in command.params if option.name == "destination_dir")
        for command in (register, run)
    )
    assert image[workdir].value == by_register and by_run == "."
    for place in places(image, "COPY", "slipstream|tasks|workflows"):
        (source,) = copied(image[place])
        assert image[place].value.split()[-1] == source


def test_what_is_copied_exists_and_reaches_the_builder(image: list[Instruction]) -> None:
    for instruction in image:
        for source in copied(instruction) if instruction.name == "COPY" else ():
            assert (REPOSITORY / source).exists() and not ignored(source), source
    for path in (
        "slipstream/config.py",
        "workflows/schedules/development.toml",
        "slipstream/shared/profiles/built_in/local.toml",
    ):
        assert (REPOSITORY / path).exists() and not ignored(path)
    assert not ignored("nets.py") and not ignored("mine/nets.py") and ignored("churn.parquet")
    for path in (".git", ".git/HEAD", ".venv", ".slipstream", "runs", "tests", "tasks/__pycache__", "docs/report.png"):
        assert ignored(path), path


# What wheels lack


def test_the_cuda_image_has_what_nccl_and_triton_load() -> None:
    image = IMAGES["cuda"]
    (place,) = places(image, "RUN", "^apt-get")
    packages = set(image[place].value.split())
    assert {"libibverbs1", "ibverbs-providers"} <= packages, "NCCL falls back to sockets"
    assert {"gcc", "libc6-dev"} <= packages, "check_compiler refuses training.compile"
    (dependencies,) = places(image, "RUN", "--requirement")
    assert place < dependencies


@pytest.mark.parametrize("plugin", [True, False])
def test_the_cuda_image_brings_the_plugin_of_efa_if_it_is_asked_for(tmp_path: Path, plugin: bool) -> None:
    """The step is run with programs that take notes, and an installer that brings the plugin or not."""
    image = IMAGES["cuda"]
    (argument,), (place,) = places(image, "ARG", "^EFA="), places(image, "RUN", "efa_installer")
    assert argument < place and shlex.split(image[argument].value) == ["EFA="]
    programs = tmp_path / "programs"
    programs.mkdir()
    installer = "#!/bin/sh\n" + ("mkdir -p ../amazon/lib && touch ../amazon/lib/libnccl-net-ofi.so\n" if plugin else "")
    tar = f"mkdir aws-efa-installer && cd aws-efa-installer && printf %s {shlex.quote(installer)} >efa_installer.sh"
    lines = {"apt-get": "", "curl": "", "ldconfig": "", "tar": f"{tar} && chmod +x efa_installer.sh"}
    for name, does in lines.items():
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >>{tmp_path}/notes\ncd {tmp_path}\n{does}\n')
        (programs / name).chmod(0o755)
    step = image[place].value.replace("/tmp/aws", f"{tmp_path}/aws").replace("/opt/amazon", f"{tmp_path}/amazon")
    step = step.replace("/usr/local/lib", str(tmp_path)).replace("/var/lib/apt/lists/*", "")
    (tmp_path / "amazon").mkdir()

    def run_step(version: str) -> int:
        environment = {**os.environ, "EFA": version, "PATH": f"{programs}:{os.environ['PATH']}"}
        return subprocess.run(["sh", "-c", step], cwd=tmp_path, env=environment, timeout=60).returncode

    assert run_step("") == 0 and not (tmp_path / "notes").exists()
    assert (run_step("1.47.0") == 0) == plugin
    assert (
        "curl --fail --location https://efa-installer.amazonaws.com/aws-efa-installer-1.47.0.tar.gz"
        in (tmp_path / "notes").read_text()
    )
    if plugin:
        assert (tmp_path / "libnccl-net.so").resolve() == tmp_path / "amazon/lib/libnccl-net-ofi.so"


# The installing step


class Step(NamedTuple):
    """How the step ended, what it said, and with what it asked pip to install, if it came to that."""

    status: int
    said: str
    requirements: list[str]
    constraints: list[str]


def install(directory: Path, name: str, torch: str, *, cuda: str | None = None, hip: str | None = None) -> Step:
    """Run the step that installs dependencies, in a base whose torch is of the given version and builds.

    All of it runs but pip, which notes its arguments.
    """
    image = IMAGES[name]
    (place,) = places(image, "RUN", "--requirement")
    for source in (s for instruction in image[:place] if instruction.name == "COPY" for s in copied(instruction)):
        shutil.copy(REPOSITORY / source, directory)
    base = directory / "site-packages"
    (base / "torch").mkdir(parents=True)
    (base / "torch" / "__init__.py").write_text("from torch import version\n__version__ = version.__version__\n")
    (base / "torch" / "version.py").write_text(f"__version__, cuda, hip = {torch!r}, {cuda!r}, {hip!r}\n")
    metadata = base / f"torch-{torch}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {torch}\n")
    python = directory / "bin" / "python"
    python.parent.mkdir()
    real = shlex.quote(sys.executable)
    python.write_text(f'#!/bin/sh\nif [ "$1 $2" = "-m pip" ]; then echo "$@" >pip.txt; else exec {real} "$@"; fi\n')
    python.chmod(0o755)
    ended = subprocess.run(
        ["sh", "-c", image[place].value],
        cwd=directory,
        env={**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "PYTHONPATH": str(base)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    if not (directory / "pip.txt").exists():
        return Step(ended.returncode, ended.stderr, [], [])
    asked = (directory / "pip.txt").read_text().split()
    files = (directory / asked[asked.index(option) + 1] for option in ("--requirement", "--constraint"))
    return Step(ended.returncode, ended.stderr, *(file.read_text().splitlines() for file in files))


PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["text"]]
CONSTRAINTS = (REPOSITORY / "constraints.txt").read_text().splitlines()


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_a_plain_python_gets_every_dependency_as_constrained(tmp_path: Path, name: str) -> None:
    step = install(tmp_path, name, "2.13.0", cuda="13.0")
    assert step.status == 0, step.said
    assert step.requirements == DEPENDENCIES
    assert sorted(step.constraints) == sorted(CONSTRAINTS)


def test_the_torch_of_the_rocm_base_is_neither_asked_for_nor_replaced(tmp_path: Path) -> None:
    step = install(tmp_path, "rocm", "2.13.0+rocm7.1", hip="7.1.25424")
    assert step.status == 0, step.said
    assert step.requirements == [line for line in DEPENDENCIES if line != "torch>=2.11"]
    assert len(step.requirements) == len(DEPENDENCIES) - 1
    assert [line for line in step.constraints if line.startswith("torch==")] == ["torch==2.13.0+rocm7.1"]
    rest = [line for line in CONSTRAINTS if not line.startswith("torch==")]
    assert step.constraints[:-1] == rest and len(rest) == len(CONSTRAINTS) - 1


@pytest.mark.parametrize(("name", "lacks"), [("rocm", "ROCm"), ("cuda", "CUDA")])
def test_the_build_fails_where_torch_became_one_for_cpus(tmp_path: Path, name: str, lacks: str) -> None:
    step = install(tmp_path, name, "2.13.0+cpu")
    assert step.status != 0
    assert f"torch 2.13.0+cpu was built without {lacks}" in step.said


def test_the_build_fails_where_the_torch_of_the_rocm_base_is_too_old(tmp_path: Path) -> None:
    step = install(tmp_path, "rocm", "2.9.1+rocm7.1", hip="7.1.25424")
    assert step.status != 0 and not step.requirements
    assert "BASE: has torch 2.9.1+rocm7.1; expected torch>=2.11; choose another base image" in step.said


def test_a_torch_that_the_vendor_built_before_its_release_counts_as_that(tmp_path: Path) -> None:
    assert install(tmp_path, "rocm", "2.13.0a0+git1c6d2f", hip="7.1.25424").status == 0


def test_the_build_fails_where_the_rocm_base_has_no_torch(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\ndependencies = ["torch"]\noptional-dependencies = {text = []}\n'
    )
    (tmp_path / "constraints.txt").write_text("torch==2.13.0\n")
    script = REPOSITORY / "images" / "requirements.py"
    ended = subprocess.run([sys.executable, "-S", script, "torch"], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode != 0 and "No package metadata was found for torch" in ended.stderr
    assert not (tmp_path / "image-requirements.txt").exists()
