"""Registered workflows and launch plans are started by name, from a process that imports none of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE, STDOUT
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import Literal as LiteralProto
from flytekit import FlyteContextManager
from flytekit.configuration import Config
from flytekit.core.type_engine import TypeEngine
from flytekit.models.interface import Variable
from flytekit.models.literals import Literal
from flytekit.remote import FlyteRemote

from slipstream.config import FineTuneConfig, RunConfig
from slipstream.flyte.command_line.options import TO_UPLOAD, refuse_local_path
from slipstream.flyte.settings_type import TAG
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import RESOLVED, current_profile, parse_profile
from slipstream.shared.settings import Settings, settings_schema, to_dict
from slipstream.shared.source.config import DataConfig
from slipstream.shared.spelling import users_schema
from tests.support import REPOSITORY
from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import FlyteAdmin, flyte_admin, register_package, write_config
from tests.support.proving import diagonal, first_few

PYFLYTE = "from flytekit.clis.sdk_in_container.pyflyte import main; main()"
Ended = subprocess.CompletedProcess[str]
PLAN, FINE_TUNING = "retrain_now", "workflows.training.fine_tune"
WORKFLOW = "workflows.training.train_and_export"


@pytest.fixture(scope="module")
def admin(server: FaultyS3, archive_for: Callable[[str], Path]) -> Iterator[FlyteAdmin]:
    with flyte_admin(server) as made:
        register_package(made, archive_for("local"))
        yield made


def started(admin: FlyteAdmin, directory: Path, *arguments: str) -> Ended:
    """``pyflyte run ARGUMENTS`` in a directory without code, where the project is installed."""
    directory.mkdir(exist_ok=True)
    config = write_config(directory / "flyte.yaml", admin.endpoint)
    command = [sys.executable, "-c", PYFLYTE, "--config", str(config), "run", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "COLUMNS": "600"}
    return subprocess.run(command, cwd=directory, env=environment, stdout=PIPE, stderr=STDOUT, text=True, timeout=300)


def config_of(admin: FlyteAdmin, name: str = "config") -> Any:
    """The configuration of the latest execution, as its first task decodes it; ``None`` if the plan's holds."""
    given = next(reversed(admin.executions.values())).inputs.literals
    return decoded(given[name]) if name in given else None


def decoded(literal: LiteralProto, kind: type[Settings] = RunConfig) -> Any:
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), Literal.from_flyte_idl(literal), kind)


def default_of(admin: FlyteAdmin, plan: str) -> Any:
    (spec,) = [spec for key, spec in admin.launch_plans.items() if key[2] == plan]
    return decoded(spec.default_inputs.parameters["config"].default)


# Every registered interface


def registered_types(made: RegistrationArchive) -> dict[str, Variable]:
    """The different types of the inputs and outputs of all tasks and workflows, each with a place where it is."""
    found: dict[bytes, tuple[str, Variable]] = {}
    for name, template in {**made.tasks, **made.workflows}.items():
        for side in (template.interface.inputs, template.interface.outputs):
            for key, variable in side.variables.items():
                kind = variable.type.SerializeToString(deterministic=True)
                found.setdefault(kind, (f"{name}.{key}", Variable.from_flyte_idl(variable)))
    return dict(found.values())


@pytest.mark.prove
def test_flytekit_rebuilds_every_registered_interface(package_for: Callable[[str], RegistrationArchive]) -> None:
    found, registered = set(), registered_types(package_for("local"))
    for place, kind in TypeEngine.guess_python_types(registered).items():
        structure = registered[place].type.structure
        if structure and structure.tag.startswith(TAG):
            assert issubclass(kind, Settings) and kind.__name__ == structure.tag.removeprefix(TAG), place
            found.add(kind.__name__)
    assert {"RunConfig", "DataConfig", "ModelConfig", "TrainingConfig", "CollectivesConfig"} <= found
    assert found <= {"RunConfig", "FineTuneConfig", *settings_schema(RunConfig)["$defs"]}


def without_type(node: Any, where: str) -> Iterator[str]:
    """The nodes of a JSON schema that say neither a type nor variants."""
    if "type" not in node and "anyOf" not in node:
        yield f"{where}: {node}"
    for name, child in node.get("properties", {}).items():
        yield from without_type(child, f"{where}.{name}")
    for child in node.get("anyOf", []):
        yield from without_type(child, f"{where} (variant)")
    for key in ("items", "additionalProperties"):
        if isinstance(node.get(key), dict):
            yield from without_type(node[key], f"{where}.{key}")


def test_every_node_of_every_registered_schema_has_a_type(package_for: Callable[[str], RegistrationArchive]) -> None:
    registered = registered_types(package_for("local"))
    schemas = {place: variable.type.metadata for place, variable in registered.items() if variable.type.metadata}
    assert len(schemas) > 15
    for place, schema in schemas.items():
        assert not list(without_type(schema, place))


def nested_names(tree: dict[str, Any], path: str = "") -> set[str]:
    return {path}.union(*(nested_names(child, f"{path}.{name}") for name, child in tree.items()))


def test_no_setting_is_left_out_of_the_registered_schema() -> None:
    def names(node: Any, schema: Any) -> dict[str, Any]:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node
        return {key: names(child, schema) for key, child in node.get("properties", {}).items()}

    metadata, schema = TypeEngine.to_literal_type(RunConfig).metadata, settings_schema(RunConfig)
    users = users_schema(schema)
    assert names(metadata, {}) == names(users, users)
    assert nested_names(names(schema, schema)) < nested_names(names(users, users))


# Both commands


COMMANDS = [("remote-launchplan", PLAN), ("remote-workflow", WORKFLOW)]


@pytest.mark.prove
@pytest.mark.parametrize(("command", "name"), first_few(COMMANDS))
def test_its_help_shows_the_defaults(admin: FlyteAdmin, tmp_path: Path, command: str, name: str) -> None:
    ended = started(admin, tmp_path / "client", command, name, "--help")
    assert ended.returncode == 0, ended.stdout
    said = " ".join(ended.stdout.replace("│", " ").split())
    assert "[default: (all defaults)]" in said and '"properties"' not in said


GIVEN = {
    "default": None,
    "partial": {"training": {"epochs": 3}, "model": {"arguments": {"widths": [16, 8]}}},
    "full": to_dict(RunConfig.from_dict({"training": {"accumulation": "auto"}})),
}


@pytest.mark.parametrize(("given", "entity"), diagonal(GIVEN, COMMANDS))
def test_it_starts_with_a_configuration(admin: FlyteAdmin, tmp_path: Path, given: str, entity: tuple[str, str]) -> None:
    command, name = entity
    more = () if GIVEN[given] is None else ("--config", json.dumps(GIVEN[given]))
    ended = started(admin, tmp_path / "client", command, name, *more)
    assert ended.returncode == 0, ended.stdout
    expected = default_of(admin, name) if GIVEN[given] is None else RunConfig.from_dict(GIVEN[given])
    assert config_of(admin) in (expected, None)


def test_a_workflow_starts_with_the_defaults_of_its_plan(admin: FlyteAdmin, tmp_path: Path) -> None:
    """Not with those of any run: fine-tuning trains adapters."""
    base, config = ("--base", "s3://bucket/base"), ("--config", '{"data": {"length": 2048}}')
    ended = started(admin, tmp_path / "client", "remote-workflow", FINE_TUNING, *base, *config)
    assert ended.returncode == 0, ended.stdout
    found = decoded(next(reversed(admin.executions.values())).inputs.literals["config"], FineTuneConfig)
    assert found == FineTuneConfig(data=DataConfig(length=2048)) and found.model.lora.rank == 16


@pytest.mark.parametrize("command", first_few(["remote-launchplan", "remote-workflow"], 1))
def test_a_base_on_this_machine_is_refused_before_it_starts(admin: FlyteAdmin, tmp_path: Path, command: str) -> None:
    before = len(admin.executions)
    ended = started(admin, tmp_path / "client", command, FINE_TUNING, "--base", "../qwen")
    assert ended.returncode != 0 and len(admin.executions) == before
    (said,) = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert said.startswith("--base: ../qwen: pods cannot read this machine's disk or cache; expected"), ended.stdout
    assert "upload the directory with config.json, the safetensors and the tokenizer" in said


def test_data_on_this_machine_are_refused_before_they_start(admin: FlyteAdmin, tmp_path: Path) -> None:
    """Also where a run registers itself, as `pyflyte run --remote` does."""
    (tmp_path / "client").mkdir(exist_ok=True)
    (tmp_path / "client/t.csv").write_text("a,y\n1,2\n")
    before = len(admin.executions)
    ended = started(admin, tmp_path / "client", "remote-workflow", WORKFLOW, "--data", "t.csv", "--target", "y")
    assert ended.returncode != 0 and len(admin.executions) == before
    (said,) = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert said.startswith("--data: t.csv: pods cannot read this machine's disk"), ended.stdout
    assert "upload the files" in said


@pytest.mark.parametrize("option", sorted(TO_UPLOAD))
def test_a_path_on_a_volume_of_the_profile_is_taken(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    volumes = {"volumes": [{"path": "/mnt/data", "claim": "datasets"}]}
    monkeypatch.setenv(RESOLVED, parse_profile("mine", {"stages": {"prepare": volumes}}).to_json())
    current_profile.cache_clear()
    for path in ("/mnt/data/churn", "/mnt/data", "s3://bucket/churn", ""):
        refuse_local_path(f"--{option}", path, TO_UPLOAD[option])
    for path in ("/mnt/database", "churn", "file:///churn"):
        with pytest.raises(UserError, match=path):
            refuse_local_path(f"--{option}", path, TO_UPLOAD[option])
    current_profile.cache_clear()


@pytest.mark.parametrize("command", first_few(["remote-launchplan", "remote-workflow"]))
def test_a_wrong_setting_is_one_line(admin: FlyteAdmin, tmp_path: Path, command: str) -> None:
    before = len(admin.executions)
    ended = started(admin, tmp_path / "client", command, WORKFLOW, "--config", '{"training": {"epoch": 3}}')
    assert ended.returncode != 0 and "Traceback" not in ended.stdout
    (said,) = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert said.startswith("training.epoch: unknown setting; did you mean 'epochs'?")
    assert len(admin.executions) == before


# FlyteRemote


@pytest.fixture
def remote(admin: FlyteAdmin, tmp_path: Path) -> FlyteRemote:
    config = Config.auto(str(write_config(tmp_path / "flyte.yaml", admin.endpoint)))
    return FlyteRemote(config, default_project="flytesnacks", default_domain="development")


@pytest.mark.parametrize("given", first_few(["partial", "full"], 1))
def test_a_client_in_python_gives_a_mapping_or_the_class(admin: FlyteAdmin, remote: FlyteRemote, given: str) -> None:
    plan, expected = remote.fetch_launch_plan(name=PLAN), RunConfig.from_dict(GIVEN[given])
    for value in (GIVEN[given], expected, json.dumps(GIVEN[given])):
        remote.execute(plan, {"config": value})
        assert config_of(admin) == expected
    with pytest.raises(UserError, match=r"^trainin: "):
        remote.execute(plan, {"config": {"trainin": {}}})


# Several profiles


@pytest.mark.prove
def test_two_profiles_are_registered_side_by_side(
    server: FaultyS3, archive_for: Callable[[str], Path], tmp_path: Path
) -> None:
    """One version each: plans of both start, and neither replaces the other."""
    with flyte_admin(server) as both:
        for profile in ("local", "a100-spot"):
            register_package(both, archive_for(profile), f"v1-{profile}")
        for profile, gpus in (("local", False), ("a100-spot", True)):
            ended = started(both, tmp_path / profile, "remote-launchplan", f"{PLAN}:v1-{profile}")
            assert ended.returncode == 0, ended.stdout
            plan = next(reversed(both.executions.values())).spec.launch_plan
            assert (plan.name, plan.version) == (PLAN, f"v1-{profile}")
            (train,) = [spec for key, spec in both.tasks.items() if key[2:] == ("tasks.train.train", f"v1-{profile}")]
            assert ("nvidia.com/gpu" in str(train.template)) == gpus
