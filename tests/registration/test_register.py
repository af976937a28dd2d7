"""The README's commands against a FlyteAdmin on loopback; registered entities run like on a cluster."""

import io
import re
import shlex
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from flyteidl.admin.task_pb2 import TaskSpec
from flyteidl.core.literals_pb2 import LiteralMap

from slipstream.operations.proofs.rehearsal.outcomes import read_outcome
from slipstream.operations.proofs.rehearsal.rendering import primary_container, rendered, values_of
from tests.support import REPOSITORY
from tests.support.dockerfile import instructions
from tests.support.faulty_s3 import FaultyS3
from tests.support.flyte_admin import FlyteAdmin, Key, flyte_admin, write_config
from tests.support.image_root import ImageRoot, image_root, missing
from tests.support.pyflyte_process import Ended, clone, run_pyflyte

SCHEDULED = {"nightly_training", "weekly_collectives"}


def commands() -> tuple[dict[str, str], dict[str, list[str]]]:
    """The README's environment and pyflyte's arguments, by "register", "run" and "package"."""
    section = (REPOSITORY / "README.md").read_text().partition("## On a cluster")[2]
    block = (
        section.partition("```\n")[2].partition("```")[0].replace("s3://…", "s3://bucket/churn/").replace("\\\n", "")
    )
    lines = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
    environment = dict(word.split("=", 1) for line in lines if line[0] == "export" for word in line[1:])
    found = {}
    for words in (line[1:] for line in lines if line[0] == "pyflyte"):
        (name,) = {"register", "run", "package"} & set(words)
        found[name] = [environment["IMAGE"] if word == "$IMAGE" else word for word in words]
    return environment, found


ENVIRONMENT, COMMANDS = commands()


@dataclass
class Site:
    """A clone of the project, and the Flyte that it is registered with."""

    project: Path
    admin: FlyteAdmin

    def run(self, name: str, *more: str) -> Ended:
        ended = run_pyflyte(self.project, *COMMANDS[name], *more, SLIPSTREAM_PROFILE=ENVIRONMENT["SLIPSTREAM_PROFILE"])
        assert ended.returncode == 0, ended.stdout
        return ended

    def registered(self) -> set[Key]:
        return {*self.admin.tasks, *self.admin.workflows, *self.admin.launch_plans}

    def code_of(self, task: TaskSpec) -> set[str]:
        """The files of the code that a task's container unpacks."""
        address = option(primary_container(task.template).command, "--additional-distribution")
        body = self.admin.bucket.read(self.admin.bucket.key_of(address))
        with tarfile.open(fileobj=io.BytesIO(body)) as archive:
            return set(archive.getnames())


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


@pytest.fixture
def site(server: FaultyS3, tmp_path: Path) -> Iterator[Site]:
    (tmp_path / "project").mkdir()
    project = clone(tmp_path / "project")
    with flyte_admin(server) as admin:
        write_config(project / "flyte.config.yaml", admin.endpoint)
        yield Site(project, admin)


def edit(site: Site) -> None:
    """Change the code of one task: what ``measure_collectives`` says."""
    output = site.project / "slipstream/pipeline/collectives/output.py"
    output.write_text(output.read_text().replace('yield f"{count_with_noun(', 'yield f"EDITED {count_with_noun('))
    assert "EDITED" in output.read_text()


@pytest.mark.prove
def test_registered_twice_it_is_the_same_and_changed_it_is_a_new_version(site: Site) -> None:
    site.run("register")
    first = site.registered()
    assert {"tasks.train.train", "workflows.training.train_and_export", *SCHEDULED} <= {key[2] for key in first}
    (version,) = {key[3] for key in first}
    assert not site.admin.active

    site.run("register")
    assert site.registered() == first and not site.admin.active

    edit(site)
    site.run("register", "--activate-launchplans")
    (newer,) = {key[3] for key in site.registered() - first}
    assert first < site.registered() and newer != version
    assert {key[3] for key in site.admin.active} == {newer} and {key[2] for key in site.admin.active} >= SCHEDULED
    # The stages whose code did not change keep their results.
    for task in ("tasks.train.train", "tasks.collectives.benchmark_collectives"):
        old, new = (
            site.admin.tasks[(*key[:3], which)] for key in first if key[2] == task for which in (version, newer)
        )
        assert old.template.metadata.discovery_version == new.template.metadata.discovery_version


def test_run_remote_starts_what_it_registered_with_all_of_the_code(site: Site) -> None:
    (site.project / "nets.py").write_text("def build(signature): ...\n")
    site.run("run")
    ((_, execution),) = site.admin.executions.items()
    assert execution.spec.launch_plan.name == "workflows.training.train_and_export"
    assert execution.inputs.literals["data"].scalar.primitive.string_value == "s3://bucket/churn/"
    (sent,) = {frozenset(site.code_of(task)) for task in site.admin.tasks.values()}
    assert {
        "nets.py",
        "slipstream/pipeline/train/run.py",
        "slipstream/pipeline/report/pages/templates/report.html",
    } <= sent
    assert not {name for name in sent if name.startswith(("tests/", ".venv/"))}
    destinations = {option(primary_container(t.template).command, "--dest-dir") for t in site.admin.tasks.values()}
    assert destinations == {"."}


@pytest.mark.prove
def test_run_remote_gives_another_profile_another_version_and_the_same_none(site: Site, tmp_path: Path) -> None:
    """The profile is a file outside of the code, which a user may edit between two runs."""
    mine = tmp_path / "mine.toml"

    def run(retries: int) -> str:
        mine.write_text(f'extends = "local"\n[default]\nretries = {retries}\n')
        words = COMMANDS["run"][: COMMANDS["run"].index("workflows/training.py")]
        ended = run_pyflyte(site.project, *words, "workflows/collectives.py", "benchmark", SLIPSTREAM_PROFILE=str(mine))
        assert ended.returncode == 0, ended.stdout
        return next(reversed(site.admin.executions.values())).spec.launch_plan.version

    first, other = run(1), run(7)
    registered = site.registered()
    assert {key[3] for key in registered} == {first, other} and other != first
    assert run(1) == first and site.registered() == registered
    retries = {key[3]: spec.template.metadata.retries.retries for key, spec in site.admin.tasks.items()}
    assert retries == {first: 1, other: 7}


@pytest.mark.prove
def test_register_gives_another_profile_and_other_schedules_another_version(site: Site) -> None:
    site.run("register")
    first = site.registered()
    for changed in ({"SLIPSTREAM_PROFILE": "cpu-cluster"}, {"SLIPSTREAM_SCHEDULES": "production"}):
        before = site.registered()
        ended = run_pyflyte(site.project, *COMMANDS["register"], **{"SLIPSTREAM_PROFILE": "local", **changed})
        assert ended.returncode == 0, ended.stdout
        (version,) = {key[3] for key in site.registered() - before}
        assert version not in {key[3] for key in first}


@pytest.mark.prove
def test_a_version_that_is_given_twice_with_another_profile_is_one_line(site: Site) -> None:
    words = ["workflows/collectives.py" if word == "workflows" else word for word in COMMANDS["register"]]
    words += ["--version", "v1"]
    assert run_pyflyte(site.project, *words, SLIPSTREAM_PROFILE="local").returncode == 0
    ended = run_pyflyte(site.project, *words, SLIPSTREAM_PROFILE="cpu-cluster")
    assert ended.returncode == 1 and "Traceback" not in ended.stdout
    (said,) = [line.strip("│ ") for line in ended.stdout.splitlines() if line.startswith("│")]
    assert re.fullmatch(
        rf"Flyte at {site.admin.endpoint} has another tasks\.[\w.-]+ task under this version, of another profile, "
        r"other schedules, another image or other code; leave `--version` out, .* or give a new one",
        said,
    ), ended.stdout
    assert site.admin.calls.count("/flyteidl.service.AdminService/CreateWorkflow") == len(site.admin.workflows)


@pytest.mark.prove
def test_without_copy_all_it_leaves_the_rest_behind(site: Site) -> None:
    """Which is why the README's command has the option."""
    (site.project / "nets.py").write_text("def build(signature): ...\n")
    command = [word for word in COMMANDS["run"] if word not in ("--copy", "all")]
    assert len(command) == len(COMMANDS["run"]) - 2
    ended = run_pyflyte(site.project, *command, SLIPSTREAM_PROFILE="local")
    assert ended.returncode == 0, ended.stdout
    (sent,) = {frozenset(site.code_of(task)) for task in site.admin.tasks.values()}
    assert "tasks/train.py" in sent and not {"nets.py", "slipstream/pipeline/report/pages/templates/report.html"} & sent


@pytest.mark.prove
def test_the_package_is_written_where_the_next_command_looks(site: Site) -> None:
    site.run("package")
    section = (REPOSITORY / "README.md").read_text().partition("flytectl register files ")[2]
    with tarfile.open(site.project / section.split()[0]) as archive:
        assert any(re.search(r"tasks\.train\.train_1\.pb$", name) for name in archive.getnames())
    assert not site.admin.calls


# The registered command in the image


def pod(site: Site, image: ImageRoot, task: str, inputs: LiteralMap) -> tuple[Ended, LiteralMap]:
    """Run the container of a registered task as a pod would be, with S3 for its inputs and outputs."""
    container = primary_container(next(spec.template for key, spec in site.admin.tasks.items() if key[2] == task))
    bucket, place = site.admin.bucket, f"pods/{task}"
    bucket.write(f"{place}/inputs.pb", inputs.SerializeToString())
    arguments = rendered(container.command, values_of(bucket.uri(f"{place}/inputs.pb"), bucket.uri(place)))
    execution = {"FLYTE_INTERNAL_EXECUTION_ID": "f0", "FLYTE_INTERNAL_EXECUTION_PROJECT": "flytesnacks"}
    ended = image.start(arguments, **container.environment, **bucket.environment, **execution)
    verdict, outputs = read_outcome(bucket, place)
    assert verdict.succeeded, ended.stdout
    return ended, LiteralMap(literals=outputs)


@pytest.mark.prove
@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("command", ["register", "run"])
def test_the_registered_command_runs_as_uid_1000_in_the_image(site: Site, tmp_path: Path, command: str) -> None:
    """The image has the code of before the change: all of it is there, and what was registered is what runs."""
    (tmp_path / "image").mkdir()
    small = '{"operations": ["all_reduce"], "smallest": 1024, "largest": 4096, "budget": 0.001, "launches": 1}'
    with image_root(tmp_path / "image", REPOSITORY) as image:
        image.build(instructions(REPOSITORY / "images/cpu.Dockerfile"))
        assert image.user == "1000" and image.start(["id", "--user"]).stdout.strip() == "1000"
        edit(site)
        if command == "run":
            words = COMMANDS["run"][: COMMANDS["run"].index("workflows/training.py")]
            more = ("workflows/collectives.py", "benchmark", "--config", small)
            ended = run_pyflyte(site.project, *words, *more, SLIPSTREAM_PROFILE="local")
            assert ended.returncode == 0, ended.stdout
            inputs = next(iter(site.admin.executions.values())).inputs
        else:
            site.run("register")
            plans = {key[2]: plan for key, plan in site.admin.launch_plans.items()}
            default = plans["workflows.collectives.benchmark"].default_inputs.parameters["config"].default
            inputs = LiteralMap(literals={"config": default})
        _, measured = pod(site, image, "tasks.collectives.measure_collectives", inputs)
        network = LiteralMap(literals={"network": measured.literals["o0"]})
        _, told = pod(site, image, "tasks.report.report_network", network)
        assert "EDITED 2 processes, gloo, " in str(told.literals["o0"])
        owner: Any = image.start(
            ["stat", "--format=%u", "/root/slipstream/pipeline/collectives/output.py"]
        ).stdout.strip()
        assert owner == "1000"
