"""The cache's version tells what pods run: code and releases travel there, and a pod with others refuses."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flyteidl.core.literals_pb2 import Literal

from slipstream.config import RunConfig
from slipstream.flyte import metadata
from slipstream.flyte.metadata import VERSIONS, refuse_other_versions, registered_version, registered_versions
from slipstream.flyte.stage import map_errors
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.propeller import NodeFailed
from slipstream.operations.proofs.rehearsal.rehearsal import (
    TARGET,
    Rehearsal,
    literal,
    package_workflows,
    rehearsal,
    write_table,
)
from slipstream.shared.artifacts import versions
from slipstream.shared.artifacts.versions import installed_releases, pinned_releases, version_of
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import Profile, parse_profile
from slipstream.shared.stages import STAGES
from slipstream.subcommands import slipstream
from tests.support import REPOSITORY
from tests.support.command_line import invoke
from tests.support.wording import refuses

CACHED = [name for name, stage in STAGES.items() if stage.engines and not stage.finds_earlier]


@pytest.fixture(autouse=True)
def asked_again() -> Iterator[None]:
    refuse_other_versions.cache_clear()
    yield
    refuse_other_versions.cache_clear()


def registered(monkeypatch: pytest.MonkeyPatch, profile: Profile, stage: str = "train") -> str:
    monkeypatch.setattr(metadata, "current_profile", lambda: profile)
    return registered_version(stage)


def test_only_the_release_of_a_library_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(number: str) -> dict[str, str]:
        monkeypatch.setattr(versions, "version", lambda library: number)
        return installed_releases(("torch",))

    assert [installed(f"2.13.0{build}") for build in ("", "+cpu", "+cu130", "a0+x.rocm7.1")] == [
        {"torch": "2.13.0"}
    ] * 4
    assert pinned_releases(("torch",), "torch == 2.13.0+cpu  # or another build\n") == {"torch": "2.13.0"}
    assert pinned_releases(("onnxruntime", "scipy"), "onnxruntime_gpu==1.31.1\n") == {
        "onnxruntime": "1.31.1",
        "scipy": "absent",
    }


def test_the_constraints_pin_every_library_that_results_depend_on() -> None:
    libraries = {library for stage in STAGES.values() for library in stage.libraries}
    pinned = pinned_releases(libraries, (REPOSITORY / "constraints.txt").read_text())
    assert not [name for name, release in pinned.items() if release == "absent"]


def test_flytekit_and_its_plugin_have_one_release() -> None:
    pinned = pinned_releases(("flytekit", "flytekitplugins-kfpytorch"), (REPOSITORY / "constraints.txt").read_text())
    assert len(set(pinned.values())) == 1


def test_what_is_registered_does_not_depend_on_the_libraries_of_the_laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    before = registered_version("train")
    monkeypatch.setattr(versions, "version", lambda library: "0.1")
    assert registered_version("train") == before


def test_another_torch_in_the_file_of_the_profile_is_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = invoke(slipstream, tmp_path, ["versions"], {})
    assert ended.returncode == 0 and re.search(r"^torch==[\d.]+$", ended.stdout, re.MULTILINE)
    found = []
    for number in ("2.13.0", "2.12.1"):
        (tmp_path / "image.txt").write_text(re.sub(r"(?m)^torch==.*", f"torch=={number}+cu130", ended.stdout))
        profile = parse_profile("mine", {"versions": str(tmp_path / "image.txt")})
        found.append(registered(monkeypatch, profile))
    assert found[0] != found[1]
    (tmp_path / "image.txt").unlink()
    with refuses(UserError):
        registered(monkeypatch, profile)


def test_a_profile_with_another_group_or_precision_has_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**place: object) -> str:
        return registered(monkeypatch, parse_profile("mine", {"distributed": place}))

    made = [
        of(processes=2),
        of(processes=2, nodes=2),
        of(processes=2, gpu="2", accelerator="nvidia-tesla-a100"),
        of(processes=2, gpu="2", accelerator="nvidia-tesla-t4"),
    ]
    assert len(set(made)) == 4
    assert of(processes=2, gpu="2", accelerator="nvidia-h100-80gb") == made[2]
    assert of(processes=2, cpu="3", memory="9Gi") == made[0]


@map_errors
def started() -> str:
    return "started"


def pod_with(monkeypatch: pytest.MonkeyPatch, **changed: object) -> None:
    travelled = {**registered_versions("export")._asdict(), **changed}
    monkeypatch.setenv(VERSIONS, json.dumps(travelled))


def test_a_pod_with_what_was_registered_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = installed_releases(STAGES["export"].libraries)
    pod_with(monkeypatch, libraries=libraries)
    assert started() == "started"


@pytest.mark.parametrize("changed", ["code", "library"])
def test_a_pod_with_other_code_or_another_library_refuses(changed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = installed_releases(STAGES["export"].libraries)
    if changed == "code":
        pod_with(monkeypatch, libraries=libraries, code="0123456789abcdef")
    else:
        pod_with(monkeypatch, libraries={**libraries, "torch": "2.12.1"})
    with pytest.raises(UserError, match="0123456789abcdef" if changed == "code" else r"but 2\.12\.1 was"):
        started()


def test_a_library_that_a_pod_lacks_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = installed_releases(STAGES["export"].libraries)
    pod_with(monkeypatch, libraries=libraries)
    monkeypatch.setattr(metadata, "installed_releases", lambda names: dict.fromkeys(names, "absent"))
    assert started() == "started"


def test_every_cached_task_carries_its_versions(package_for: Callable[[str], RegistrationArchive]) -> None:
    for name, task in package_for("local").tasks.items():
        carried = {pair.key: pair.value for pair in task.container.env}.get(VERSIONS)
        assert carried or not task.metadata.discoverable, name
        if carried and task.metadata.discoverable:
            version = json.loads(carried)
            assert version["stage"] in CACHED and task.metadata.discovery_version.startswith(
                version_of(version["code"], version["libraries"])
            )


PREPARE = "workflows.training.prepare"


def inputs_of(place: Rehearsal) -> dict[str, Literal]:
    return {
        "data": literal(write_table(place.bucket)),
        "target": literal(TARGET),
        "config": literal(RunConfig()),
    }


@pytest.mark.prove
def test_a_stale_file_of_versions_is_refused_on_the_cluster(tmp_path: Path) -> None:
    installed = versions.installed_constraints()
    stale = tmp_path / "image.txt"
    stale.write_text(re.sub(r"(?m)^numpy==.*", "numpy==1.0", installed))
    (tmp_path / "place").mkdir()
    with rehearsal(tmp_path / "place", parse_profile("stale", {"versions": str(stale)})) as place:
        with pytest.raises(NodeFailed, match=r"numpy [\d.]+, but 1\.0 was registered"):
            place.execution("first").run(PREPARE, inputs_of(place))
        assert not place.catalog.entries


@pytest.mark.prove
def test_another_build_hits_on_the_cluster_and_old_code_in_the_image_is_refused(tmp_path: Path) -> None:
    builds = tmp_path / "builds.txt"
    builds.write_text(re.sub(r"(?m)^(\S+==[\d.]+)$", r"\1+cu130", versions.installed_constraints()))
    for name in ("place", "again"):
        (tmp_path / name).mkdir()
    with rehearsal(tmp_path / "place", parse_profile("mine", {})) as place:
        inputs = inputs_of(place)
        place.execution("first").run(PREPARE, inputs)
        place.package = package_workflows(tmp_path / "again", parse_profile("mine", {"versions": str(builds)}))
        again = place.execution("another-build")
        again.run(PREPARE, inputs)
        assert again.record.cached and again.record.hits == again.record.cached

        registered_with_other_code(place.package, "0123456789abcdef")
        edited, entries = place.execution("edited"), dict(place.catalog.entries)
        with pytest.raises(NodeFailed) as refused:
            edited.run(PREPARE, inputs)
        installed = registered_versions("prepare").code
        assert "0123456789abcdef" in str(refused.value) and installed in str(refused.value)
        assert not refused.value.outcome.recoverable and not edited.record.hits
        assert place.catalog.entries == entries


def registered_with_other_code(package: RegistrationArchive, code: str) -> None:
    """Change the tasks to those of a laptop whose code has the digest ``code``."""
    for template in package.tasks.values():
        for pair in template.container.env:
            if pair.key == VERSIONS:
                carried = json.loads(pair.value)
                pair.value = json.dumps({**carried, "code": code})
                version = version_of(carried["code"], carried["libraries"])
                template.metadata.discovery_version = template.metadata.discovery_version.replace(
                    version, version_of(code, carried["libraries"])
                )
