"""Every finding both ways: a healthy package has none, and every damage is found where it was done."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.literals_pb2 import Binding, BindingData
from flyteidl.core.tasks_pb2 import Resources, TaskTemplate
from flyteidl.core.types_pb2 import INTEGER, STRUCT

from slipstream.operations.doctor.archive import Limits, RegistrationArchive
from slipstream.operations.doctor.findings import Finding
from slipstream.operations.doctor.package import SaveTime, check_package
from tests.support.wording import same_wording

TRAIN, EVALUATE = "tasks.train.train", "tasks.evaluate.evaluate"
NIGHTLY = "nightly_training"
MAIN = "workflows.training.train_and_export"
UNITS = "tasks.prepare.prepare_by_units"
LARGE = Limits(cpu="96", memory="1100Gi", gpu="8", ephemeral_storage="1Ti")
SIX_SECONDS = SaveTime(6.0, "measured in a test")


def found(package: RegistrationArchive, limits: Limits = LARGE, save: SaveTime = SIX_SECONDS) -> list[Finding]:
    return list(check_package(package, limits, save, []).findings)


def pod(package: RegistrationArchive, task: str = TRAIN) -> Any:
    return package.tasks[task].k8s_pod.pod_spec


def container(package: RegistrationArchive, task: str = TRAIN) -> Any:
    return pod(package, task)["containers"][0]


def node(package: RegistrationArchive, workflow: str, task: str) -> Any:
    return next(n for n in package.workflows[workflow].nodes if n.task_node.reference_id.name == task)


def test_a_healthy_package_has_no_findings(healthy: RegistrationArchive) -> None:
    report = check_package(healthy, LARGE, SIX_SECONDS, [])
    assert report.findings == () and not report.failed
    assert report.text(None).endswith("nothing found")
    assert any("96 cpu, 1100Gi memory, 8 gpu" in line for line in report.checked)
    assert any("users" in line for line in report.unchecked)


def test_jobs_whose_pods_may_be_started_one_by_one_are_named(healthy: RegistrationArchive) -> None:
    package = copy.deepcopy(healthy)
    said = [line for line in check_package(package, LARGE, SIX_SECONDS, []).unchecked if "or none" in line]
    assert len(said) == 1 and TRAIN in said[0] and "two jobs can each hold a part of the nodes" in said[0]
    for task in package.tasks.values():
        if task.HasField("k8s_pod"):
            task.k8s_pod.pod_spec["schedulerName"] = "scheduler-plugins-scheduler"
    assert not [line for line in check_package(package, LARGE, SIX_SECONDS, []).unchecked if "or none" in line]


def no_retries(package: RegistrationArchive) -> None:
    package.tasks[TRAIN].metadata.retries.retries = 0
    for workflow in package.workflows.values():
        for each in workflow.nodes:
            if each.task_node.reference_id.name == TRAIN:
                each.metadata.retries.retries = 0


def short_grace(package: RegistrationArchive) -> None:
    pod(package)["terminationGracePeriodSeconds"] = 5


def no_gpus(package: RegistrationArchive) -> None:
    for kind in ("requests", "limits"):
        del container(package)["resources"][kind]["nvidia.com/gpu"]


def no_disk(package: RegistrationArchive) -> None:
    del container(package)["resources"]["requests"]["ephemeral-storage"]


def latest(package: RegistrationArchive) -> None:
    container(package)["image"] = "registry.example:5000/slipstream:latest"


def untagged(package: RegistrationArchive) -> None:
    container(package)["image"] = "registry.example:5000/slipstream"


def user_name(package: RegistrationArchive) -> None:
    container(package).get_or_create_struct("securityContext")["runAsUser"] = "flyte"


def root_against_itself(package: RegistrationArchive) -> None:
    pod(package).get_or_create_struct("securityContext").update({"runAsUser": 0, "runAsNonRoot": True})


def too_much(package: RegistrationArchive) -> None:
    for kind in ("requests", "limits"):
        container(package)["resources"][kind]["cpu"] = "96500m"


def no_quantity(package: RegistrationArchive) -> None:
    container(package)["resources"]["requests"]["memory"] = "much"


def over_its_own_limit(package: RegistrationArchive) -> None:
    container(package)["resources"]["limits"]["memory"] = "900Gi"


def overridden(package: RegistrationArchive) -> None:
    resources = node(package, MAIN, EVALUATE).task_node.overrides.resources
    resources.requests.add(name=Resources.CPU, value="97")
    resources.limits.add(name=Resources.CPU, value="97")


def impatient(package: RegistrationArchive) -> None:
    package.tasks[TRAIN].metadata.timeout.seconds = 3600
    package.tasks[TRAIN].metadata.retries.retries = 10


def february(package: RegistrationArchive) -> None:
    scheduled(package, "0 2 30 2 *")


@pytest.mark.parametrize(
    ("harm", "severity", "where"),
    [
        (no_retries, "error", TRAIN),
        (short_grace, "error", TRAIN),
        (no_gpus, "error", TRAIN),
        (no_disk, "warning", TRAIN),
        (latest, "warning", TRAIN),
        (untagged, "warning", TRAIN),
        (user_name, "error", TRAIN),
        (root_against_itself, "error", TRAIN),
        (too_much, "error", TRAIN),
        (no_quantity, "error", TRAIN),
        (over_its_own_limit, "error", TRAIN),
        (overridden, "error", f"{MAIN}/n"),
        (impatient, "warning", TRAIN),
        (february, "error", NIGHTLY),
    ],
)
def test_what_was_broken_is_found_and_nothing_else(
    healthy: RegistrationArchive, harm: Callable[[RegistrationArchive], None], severity: str, where: str
) -> None:
    harm(healthy)
    findings = found(healthy)
    assert findings and {finding.severity for finding in findings} == {severity}
    for finding in findings:
        assert finding.where.startswith(where)
        same_wording(finding.what)
        assert finding.consequence and finding.fix


def test_a_single_pod_on_spot_needs_no_retries(healthy: RegistrationArchive) -> None:
    evaluate = healthy.tasks["tasks.evaluate.evaluate"]
    evaluate.metadata.retries.retries = 0
    (use,) = [use for use in healthy.uses() if use.where == "tasks.evaluate.evaluate"]
    assert use.interruptible and not use.is_job and not found(healthy)


def test_an_unmeasured_save_is_assumed_and_said(healthy: RegistrationArchive) -> None:
    pod(healthy)["terminationGracePeriodSeconds"] = 20
    (finding,) = found(healthy, save=SaveTime())
    assert finding.severity == "warning"
    same_wording(finding.what)
    pod(healthy)["terminationGracePeriodSeconds"] = 120
    report = check_package(healthy, LARGE, SaveTime(), [])
    assert not report.findings and "grace periods against a save of 30 s (assumed)" in report.checked


def test_a_digest_does_not_move(healthy: RegistrationArchive) -> None:
    container(healthy)["image"] = "registry.example/slipstream@sha256:" + "0" * 64
    assert not found(healthy)


def test_flytes_own_limits_refuse_this_package_and_would_quietly_take_its_gpus(healthy: RegistrationArchive) -> None:
    said = {finding.what: finding.consequence for finding in found(healthy, Limits())}
    same_wording(said["cpu 4 is over the platform's 2"])
    same_wording(said["nvidia.com/gpu 8 is over the platform's 1"])


def test_what_a_node_overrides_is_not_looked_at_by_admin(healthy: RegistrationArchive) -> None:
    overridden(healthy)
    assert all(
        finding.consequence.endswith("propeller gives the pod 96 without a message") for finding in found(healthy)
    )


def test_a_task_in_a_plain_container() -> None:
    task = TaskTemplate(type="python-task")
    task.id.name = "mine"
    task.container.image = "registry.example/mine:1"
    task.container.resources.requests.add(name=Resources.CPU, value="2")
    task.container.resources.requests.add(name=Resources.EPHEMERAL_STORAGE, value="1Gi")
    package = RegistrationArchive({"mine": task}, {}, {})
    assert not found(package, Limits())
    task.container.resources.requests[0].value = "2001m"
    task.extended_resources.gpu_accelerator.device = "nvidia-l4"
    del task.container.resources.requests[1]
    whats = [finding.what for finding in found(package, Limits())]
    assert [what.split()[0] for what in whats] == ["cpu", "accelerator", "no"]


# Attribute paths


def promise(source: str, variable: str, *path: str | int) -> BindingData:
    data = BindingData()
    data.promise.node_id, data.promise.var = source, variable
    for step in path:
        data.promise.attr_path.add(**{"string_value" if isinstance(step, str) else "int_value": step})
    return data


def direct(package: RegistrationArchive) -> None:
    node(package, MAIN, EVALUATE).inputs[0].binding.CopyFrom(promise("", "config", "training"))


def in_a_list(package: RegistrationArchive) -> None:
    binding = node(package, MAIN, EVALUATE).inputs[0].binding
    binding.collection.bindings.append(promise("", "config", "training"))


def in_a_map(package: RegistrationArchive) -> None:
    node(package, MAIN, EVALUATE).inputs[0].binding.map.bindings["a"].CopyFrom(promise("", "config", "training"))


def in_a_branch(package: RegistrationArchive) -> None:
    choice = next(n for n in package.workflows[MAIN].nodes if n.HasField("branch_node")).branch_node.if_else
    choice.else_node.inputs[0].binding.CopyFrom(promise("", "config", "training"))


def in_an_array_node(package: RegistrationArchive) -> None:
    mapped = next(n for n in package.workflows[UNITS].nodes if n.HasField("array_node")).array_node.node
    mapped.inputs[0].binding.CopyFrom(promise("", "config", "training"))


def below_a_list(package: RegistrationArchive) -> None:
    """The first stage of the list that ``report`` gets, and a field of that."""
    kind = package.workflows[MAIN].interface.inputs.variables["data"].type
    kind.Clear()
    kind.collection_type.simple = STRUCT
    node(package, MAIN, EVALUATE).inputs[0].binding.CopyFrom(promise("", "data", 0, "name"))


@pytest.mark.parametrize("harm", [direct, in_a_list, in_a_map, in_a_branch, in_an_array_node, below_a_list])
def test_a_path_into_a_structure_is_found_wherever_it_is_bound(
    healthy: RegistrationArchive, harm: Callable[[RegistrationArchive], None]
) -> None:
    harm(healthy)
    (finding,) = found(healthy)
    assert finding.severity == "error"
    same_wording(finding.consequence)
    assert "/" in finding.where
    same_wording(finding.what)


def test_a_path_into_a_structure_that_a_sub_workflow_gets(healthy: RegistrationArchive) -> None:
    choice = next(n for n in healthy.workflows[MAIN].nodes if n.HasField("branch_node")).branch_node.if_else
    choice.case.then_node.inputs[0].binding.CopyFrom(promise("n1", "config", "split"))
    (finding,) = found(healthy)
    assert finding.severity == "error" and "n1.config.split" in finding.what


def test_a_path_into_a_structure_that_nothing_cached_gets(healthy: RegistrationArchive) -> None:
    workflow = healthy.workflows[MAIN]
    node(healthy, MAIN, "tasks.report.report").inputs[0].binding.CopyFrom(promise("", "config", "data"))
    workflow.outputs.append(Binding(var="part", binding=promise("", "config", "data")))
    findings = found(healthy)
    assert [finding.severity for finding in findings] == ["warning"] * 2
    assert findings[1].where == f"{MAIN}, its outputs"


def test_an_element_of_a_list_is_no_structure(healthy: RegistrationArchive) -> None:
    kind = healthy.workflows[MAIN].interface.inputs.variables["data"].type
    kind.Clear()
    kind.collection_type.simple = INTEGER
    node(healthy, MAIN, EVALUATE).inputs[0].binding.CopyFrom(promise("", "data", 0))
    assert not found(healthy)


# Images


@pytest.mark.parametrize(
    ("dockerfile", "user"),
    [
        ("FROM base\nUSER 1000\n", ""),
        ("FROM base\nUSER 1000:1000\n", ""),
        ("FROM base\nUSER flyte\nRUN true\n", "flyte"),
        ("FROM a AS build\nUSER 1000\nFROM b\nRUN true\n", "root"),
    ],
)
def test_the_user_of_an_image(healthy: RegistrationArchive, tmp_path: Path, dockerfile: str, user: str) -> None:
    file = tmp_path / "cpu.Dockerfile"
    file.write_text(dockerfile)
    findings = check_package(healthy, LARGE, SIX_SECONDS, [file]).findings
    assert [finding.what for finding in findings] == ([f"the image's user is {user}, by name"] if user else [])
    assert all(finding.severity == "warning" for finding in findings)
    pod(healthy).get_or_create_struct("securityContext")["runAsNonRoot"] = True
    findings = check_package(healthy, LARGE, SIX_SECONDS, [file]).findings
    assert all(finding.severity == "error" for finding in findings)


def test_the_images_of_this_project_have_a_number(healthy: RegistrationArchive) -> None:
    files = sorted((Path(__file__).parents[2] / "images").glob("*.Dockerfile"))
    assert files and not check_package(healthy, LARGE, SIX_SECONDS, files).findings


# Schedules


def scheduled(package: RegistrationArchive, cron: str) -> RegistrationArchive:
    package.launch_plans[NIGHTLY].entity_metadata.schedule.cron_schedule.schedule = cron
    return package


@pytest.mark.parametrize("cron", ["*/5 0 1 1 mon", "@daily", "@every 6h", "CRON_TZ=Europe/Paris 0 2 29 2 ?"])
def test_schedules_that_fire(healthy: RegistrationArchive, cron: str) -> None:
    assert not found(scheduled(healthy, cron))


@pytest.mark.parametrize("cron", ["0 2 * *", "61 2 * * *", "TZ=UTC 0 0 31 4 *"])
def test_schedules_that_do_not(healthy: RegistrationArchive, cron: str) -> None:
    assert [finding.where for finding in found(scheduled(healthy, cron))] == [NIGHTLY]


def test_the_package_itself_stays_as_it_was(healthy: RegistrationArchive) -> None:
    before = copy.deepcopy(healthy)
    found(healthy)
    assert healthy == before
