"""Every patch is for the installed versions, is needed by them, and leaves the types and tasks of others alone."""

import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from slipstream.flyte import compat
from slipstream.flyte.compat import Patch
from tests.support import REPOSITORY
from tests.support.proving import first_few

PATCHES = {name: value for name, value in vars(compat).items() if isinstance(value, Patch)}


PLUGINS = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["entry-points"]["flytekit.plugins"]
#: Entry points of flytekit in this release and in those of before, which images and editable installations may have.
ENTRIES = (PLUGINS["slipstream"], "slipstream.sessions")


def installed(place: Path, entry: str) -> str:
    """Return a folder in which this project is installed with an entry point of flytekit; without, if it is ""."""
    about = place / "slipstream-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Name: slipstream\nVersion: 0\n")
    (about / "entry_points.txt").write_text(f"[flytekit.plugins]\nslipstream = {entry}\n" if entry else "")
    return str(place)


def run_script(script: Path, *modules: str, path: Sequence[str]) -> list[str]:
    """Run a script with the folders ``path`` before the environment's own, and return its lines."""
    # Flytekit's local cache is below the home directory.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "HOME": str(script.parent)}
    command = [sys.executable, str(script), *modules]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def plainly(code: str, script: Path) -> str:
    """Run code under flytekit alone, and return its last line."""
    script.write_text(code)
    return run_script(script, path=[installed(script.parent / "alone", "")])[-1]


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_it_is_for_the_installed_versions(patch: Patch) -> None:
    for each in map(Requirement, patch.versions):
        assert version(each.name) in each.specifier, f"{patch.place}: check whether {each.name} still needs it"


# Upstream needs them. Each code prints True as long as it does; the rest is the interpreter's own work.

DATACLASSES = """
from dataclasses import dataclass, field
@dataclass
class Inner:
    x: int = 1
@dataclass
class Outer:
    inner: Inner = field(default_factory=Inner)
    a: int = 2
    b: str = "b"
"""
NEEDS = {
    "DESCRIPTIONS": DATACLASSES
    + """
import mashumaro.jsonschema as schema
counts, build = [], schema.build_json_schema
schema.build_json_schema = lambda of: counts.append(of) or build(of)
from flytekit.core.type_engine import TypeEngine
TypeEngine.to_literal_type(Outer), TypeEngine.to_literal_type(Outer)
print(counts.count(Outer) == 2)
""",
    "DEFAULTS": DATACLASSES
    + """
import mashumaro.core.meta.code.builder as builder
from mashumaro.jsonschema import build_json_schema
made, compile_ = [], builder.CodeBuilder.compile
builder.CodeBuilder.compile = lambda self: made.append(self.cls) or compile_(self)
build_json_schema(Outer)
print(len(made) >= 3)
""",
    "ANNOTATIONS": DATACLASSES
    + """
import mashumaro.core.meta.code.builder as builder
from mashumaro.jsonschema import build_json_schema
made, original = [], builder.get_annotations
builder.get_annotations = lambda of, **how: made.append(of) or original(of, **how)
build_json_schema(Outer)
print(made.count(Outer) > 1)
""",
    "ERROR_TEXT": """
from flytekit.bin.entrypoint import get_traceback_str
print(not get_traceback_str(ValueError("the cause")).startswith(("the cause", "ValueError")))
""",
    "OPTIONS": """
import json
from dataclasses import dataclass
from flytekit.interaction.click_types import JsonParamType
@dataclass
class Mine:
    x: int = 1
print(JsonParamType(Mine).convert(json.dumps({"x": 2, "unknown": 3}), None, None) == Mine(2))
""",
    "HELP": """
import inspect
from flytekit.clis.sdk_in_container.run import WorkflowCommand
print("loaded_entity.__doc__" in inspect.getsource(WorkflowCommand._create_command))
""",
    "BACKEND_ERRORS": """
import inspect
from flytekit.clis.sdk_in_container import utils
print("requests" not in inspect.getsource(utils.pretty_print_exception))
""",
    "REMOTE_DEFAULTS": """
import inspect
from flytekit.clis.sdk_in_container.run import DynamicEntityLaunchCommand as Command
print("self._get_params(ctx, entity.interface.inputs, types)" in inspect.getsource(Command.get_params))
""",
    "VERSION": """
import inspect
from flytekit.remote import FlyteRemote
print(list(inspect.signature(FlyteRemote._version_from_hash).parameters)[:3] ==
      ["md5_bytes", "serialization_settings", "default_inputs"])
""",
    "WAITING": """
import inspect
from flytekit.clis.sdk_in_container import run
print("execution.closure.error.message" in inspect.getsource(run.run_remote))
""",
    "NESTED_CONDITIONS": """
from flytekit import conditional, task, workflow
ran = []
@task
def say(word: str) -> str:
    ran.append(word)
    return word
@workflow
def inner(size: str) -> str:
    return conditional("size").if_(size == "given").then(say(word="given")).else_().then(say(word="searched"))
@workflow
def outer(method: str, size: str) -> str:
    return conditional("method").if_(method == "none").then(say(word="none")).else_().then(inner(size=size))
try:
    for method, size in (("none", "given"), ("prune", "given"), ("prune", "searched")):
        outer(method=method, size=size)
except Exception as error:
    ran.append(error)
print(ran != ["none", "given", "searched"])
""",
    "HITS": """
from flytekit import task
ran = []
@task(cache=True, cache_version="1")
def count(x: int) -> int:
    ran.append(x)
    return x
count(x=1), count(x=1)
print(ran == [1])
""",
    "RESULTS": """
import inspect
from flytekit.core.base_task import Task
print("LocalTaskCache.set(" in inspect.getsource(Task.local_execute))
""",
    "LAUNCHER": """
import inspect
from flytekitplugins.kfpytorch import Elastic
from flytekitplugins.kfpytorch.task import PytorchElasticFunctionTask
print("forkserver" not in inspect.getsource(PytorchElasticFunctionTask) and "start_method" in
      inspect.signature(Elastic).parameters)
""",
}


def test_there_is_a_proof_for_every_patch() -> None:
    assert NEEDS.keys() == PATCHES.keys()


@pytest.mark.prove
@pytest.mark.parametrize("name", NEEDS)
def test_upstream_still_needs_it(name: str, tmp_path: Path) -> None:
    assert plainly(NEEDS[name], tmp_path / "alone.py") == "True", (
        f"{PATCHES[name].place}: upstream has changed; drop the patch"
    )


@pytest.mark.prove
def test_torch_still_loads_lazy_modules(tmp_path: Path) -> None:
    code = "import sys, flytekit, torch; print('pandas._libs' in sys.modules)"
    assert plainly(code, tmp_path / "alone.py") == "True"


def test_the_lazy_modules_are_flytekits(tmp_path: Path) -> None:
    code = "import sys, flytekit; print([n for n, m in sys.modules.items() if type(m).__name__ == '_LazyModule'])"
    lazy = ast.literal_eval(plainly(code, tmp_path / "alone.py"))
    assert set(compat.LAZY) == set(lazy)


# Patching


def test_it_is_applied_once_and_a_block_restores_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    patch = Patch("json:dumps", (), "")

    def wrapper(original: Callable[..., str]) -> Callable[..., str]:
        return lambda *values: f"<{original(*values)}>"

    with patch.applied(wrapper):
        patch.apply(wrapper)
        with patch.applied(wrapper):
            assert json.dumps(1) == "<1>"
        assert json.dumps(1) == "<1>"
    assert json.dumps(1) == "1"


def test_no_other_module_patches_what_is_listed() -> None:
    places = {patch.place.rpartition(":")[2].rpartition(".")[2] for patch in PATCHES.values()}
    for folder in ("slipstream", "tasks", "workflows"):
        for path in (REPOSITORY / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert path.name == "compat.py" or not [name for name in places if f".{name} = " in text], path


@pytest.mark.parametrize("patch", PATCHES.values(), ids=PATCHES)
def test_its_place_is_there(patch: Patch) -> None:
    owner, name = patch._owner()
    assert callable(getattr(owner, name)) and patch.upstream


# Others

STRANGER = DATACLASSES + (
    """
import hashlib, json, sys
for name in sys.argv[1:]:
    __import__(name)
import flytekit.bin.entrypoint as entrypoint, mashumaro.jsonschema.schema as schema
from flytekit import FlyteContextManager, task
from flytekit.core.type_engine import TypeEngine
from torch.distributed.launcher import api

@task
def count(outer: Outer) -> int:
    return outer.a

context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(Outer)
interface = count.interface.to_flyte_idl().SerializeToString(deterministic=True)
literal = TypeEngine.to_literal(context, Outer(), Outer, kind).to_flyte_idl()
print(json.dumps([interface.hex(), literal.SerializeToString(deterministic=True).hex(),
    entrypoint.get_traceback_str(ValueError("wrong\\nin two lines")),
    schema._default.__module__, api.elastic_launch.__module__]))
print("slipstream.flyte" in sys.modules)
"""
)


def heard_by_a_stranger(place: Path, entry: str, *modules: str) -> str:
    """Return what :data:`STRANGER` says with this project installed, after importing modules."""
    script = place / "stranger.py"
    script.write_text(STRANGER)
    text, loaded = run_script(script, *modules, path=[installed(place / f"with-{entry}", entry), str(REPOSITORY)])
    assert loaded == str(bool(entry or modules))
    return text


@pytest.fixture(scope="module")
def under_plain_flytekit(tmp_path_factory: pytest.TempPathFactory) -> str:
    return heard_by_a_stranger(tmp_path_factory.mktemp("plain"), "")


@pytest.mark.parametrize("entry", first_few(ENTRIES, 1))
def test_a_project_that_only_has_this_one_installed_has_plain_flytekit(
    entry: str, under_plain_flytekit: str, tmp_path: Path
) -> None:
    assert heard_by_a_stranger(tmp_path, entry) == under_plain_flytekit


@pytest.mark.parametrize("imported", first_few(["tasks.export", "slipstream", "slipstream.flyte.elastic"]))
def test_types_and_errors_of_others_are_flytekits(imported: str, under_plain_flytekit: str, tmp_path: Path) -> None:
    """Of a project that imports a module of this one."""
    assert heard_by_a_stranger(tmp_path, ENTRIES[0], imported) == under_plain_flytekit
