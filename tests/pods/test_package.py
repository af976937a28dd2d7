"""Settings of a packaged workflow: resources, spot, retries, caching, timeouts, the shape of the PyTorchJobs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict

from slipstream.flyte.metadata import STAGE
from slipstream.operations.doctor.archive import RegistrationArchive, workflow_nodes
from slipstream.operations.proofs.rehearsal.record import short
from slipstream.operations.proofs.rehearsal.rendering import primary_container
from slipstream.shared.machine.limits import CPU, MEMORY
from slipstream.shared.profiles.profile import RESOLVED, load_profile, profile_names
from tests.support.fake_nvml import see_four_gpus
from tests.support.package import IMAGE, package

STAGES = {
    "tasks.inputs.resolve_inputs": "export",
    "tasks.inputs.open_inputs": "export",
    "tasks.prepare.list_data": "fingerprint",
    "tasks.config.read_config": "fingerprint",
    **{
        f"tasks.prepare.{name}": "prepare"
        for name in (
            "prepare",
            "parse_share",
            "open_shares",
            "scan_share",
            "fit_shares",
            "encode_share",
            "merge_partition",
            "assemble",
        )
    },
    "tasks.train.train": "train",
    "tasks.train.fine_tune": "train",
    "tasks.compress.propose": "compress",
    "tasks.compress.choose": "compress",
    "tasks.promote.judge": "promote",
    "tasks.promote.put_in_service": "promote",
    "tasks.export.export": "export",
    "tasks.evaluate.evaluate": "evaluate",
    "tasks.collectives.benchmark_collectives": "collectives",
    "tasks.collectives.measure_collectives": "collectives",
    "tasks.collectives.compare_collectives": "collectives",
    "tasks.collectives.tune_collectives": "collectives",
    "tasks.report.report": "report",
    "tasks.report.report_compression": "report",
    "tasks.report.report_data": "report",
    "tasks.report.report_network": "report",
    "tasks.report.report_tuning": "report",
}
CACHED = {"prepare", "train", "evaluate", "export"}
NEVER_CACHED = {"tasks.inputs.resolve_inputs", "tasks.inputs.open_inputs"}
DISTRIBUTED = {"train", "collectives"}
WORKFLOW = "workflows.training.train_and_export"
#: By the numbers of Flyte's ResourceName.
RESOURCES = {1: "cpu", 2: "nvidia.com/gpu", 3: "memory", 5: "ephemeral-storage"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in ("a100-spot", "local") else pytest.mark.prove)
        for name in profile_names()
    ],
)
def packaged(
    request: pytest.FixtureRequest, package_for: Callable[[str], RegistrationArchive]
) -> tuple[str, RegistrationArchive]:
    return request.param, package_for(request.param)


def test_every_task_carries_its_metadata(packaged: tuple[str, RegistrationArchive]) -> None:
    name, made = packaged
    profile = load_profile(name)
    assert set(STAGES) <= set(made.tasks)
    for task_name, stage in STAGES.items():
        template, place = made.tasks[task_name], profile.asked(stage)
        metadata = template.metadata
        own = metadata.interruptible if metadata.WhichOneof("interruptible_value") else None
        assert own == (None if place.interruptible == profile.default.interruptible else place.interruptible), task_name
        assert metadata.retries.retries == place.retries, task_name
        assert metadata.timeout.seconds == place.timeout_minutes * 60, task_name
        cached = stage in CACHED and task_name not in NEVER_CACHED
        assert metadata.discoverable == bool(metadata.discovery_version) == cached, task_name
        # Where data lies makes no difference: what it is comes from the fingerprint.
        ignored = {"tasks.prepare.prepare": ["listing"], "tasks.train.train": ["most_parameters"]}
        assert list(metadata.cache_ignore_input_vars) == ignored.get(task_name, []), task_name
        environment = primary_container(template).environment
        if template.HasField("container"):
            image, resources = template.container.image, template.container.resources
            for entries in (resources.limits, resources.requests):
                assert {RESOURCES[entry.name]: entry.value for entry in entries} == place.resources, task_name
        else:
            primary = pod_of(template)["containers"][0]
            image, resources = primary["image"], primary["resources"]
            assert resources["limits"] == resources["requests"] == place.resources, task_name
        assert image == IMAGE
        assert json.loads(environment[RESOLVED])["name"] == name, task_name
        # What limits the threads of every library, and the processes, whatever the node has.
        assert (environment[CPU], environment[MEMORY]) == (place.cpu, place.memory), task_name
        assert environment.get("OMP_NUM_THREADS") == (str(place.threads) if place.threads else None), task_name
        assert place.environment.items() <= environment.items(), task_name


def test_what_is_timed_is_kept_for_the_machine_that_it_was_timed_on(
    package_for: Callable[[str], RegistrationArchive],
) -> None:
    """A task that is never cached, with the export's own placement, tells the export's key which machine that is."""
    tasks, asked = package_for("a100-spot").tasks, load_profile("a100-spot").asked("export")
    for first in ("resolve_inputs", "open_inputs"):
        template = tasks[f"tasks.inputs.{first}"]
        assert not template.metadata.discoverable and "machine" in template.interface.outputs.variables
        primary = pod_of(template)["containers"][0]
        assert primary["resources"]["limits"] == asked.resources
    export = tasks["tasks.export.export"]
    assert export.metadata.discoverable and "machine" in export.interface.inputs.variables
    assert "machine" not in export.metadata.cache_ignore_input_vars


def test_a_main_job_has_seven_pods_and_three_the_second_time(package_for: Callable[[str], RegistrationArchive]) -> None:
    """Counted in what is registered; ``tests/pods/test_whole_workflow.py`` counts the pods that run."""
    made = package_for("local")
    names = [
        node.task_node.reference_id.name
        for workflow in (WORKFLOW, "workflows.compression.train_alone")
        for _, node in workflow_nodes(made.workflows[workflow])
        if node.HasField("task_node")
    ]
    never = ["benchmark_collectives", "report", "resolve_inputs"]
    assert sorted(map(short, names)) == sorted([*never, "evaluate", "export", "prepare", "train"])
    assert sorted(short(name) for name in names if not made.tasks[name].metadata.discoverable) == never


@pytest.mark.prove
def test_the_machine_that_registers_is_not_asked_for_its_gpus(
    tmp_path: Path, package_for: Callable[[str], RegistrationArchive], monkeypatch: pytest.MonkeyPatch
) -> None:
    """``local`` leaves open how many processes there are; it stays so until a pod runs."""
    here = package_for("local").tasks
    see_four_gpus(monkeypatch)
    elsewhere = package(tmp_path, "local").tasks
    assert here.keys() == elsewhere.keys()
    for name, task in here.items():
        assert task.SerializeToString(deterministic=True) == elsewhere[name].SerializeToString(deterministic=True), name


def test_distributed_stages_are_pytorchjobs_where_the_profile_has_several_nodes(
    packaged: tuple[str, RegistrationArchive],
) -> None:
    name, made = packaged
    for task_name, stage in STAGES.items():
        template, place = made.tasks[task_name], load_profile(name).placement(stage)
        if stage not in DISTRIBUTED or place.nodes == 1:
            assert template.type == "python-task", task_name
            continue
        assert template.type == "pytorch"
        custom = MessageToDict(template.custom)
        assert custom["workerReplicas"]["replicas"] == place.nodes
        elastic = custom["elasticConfig"]
        assert (elastic["minReplicas"], elastic["maxReplicas"]) == (place.nodes, place.nodes)
        assert elastic["nprocPerNode"] == place.processes


def test_pods_are_as_the_profile_says(packaged: tuple[str, RegistrationArchive]) -> None:
    name, made = packaged
    for task_name, stage in STAGES.items():
        template, place = made.tasks[task_name], load_profile(name).asked(stage)
        extended = template.extended_resources
        assert extended.gpu_accelerator.device == place.accelerator, task_name
        assert extended.shared_memory.size_limit == place.shared_memory, task_name
        if template.HasField("container"):
            assert not (place.tolerations or place.node_selector or place.labels or place.annotations), task_name
            assert place.grace_seconds == 30, task_name
            continue
        pod = pod_of(template)
        assert [t["key"] for t in pod.get("tolerations", [])] == [t.key for t in place.tolerations], task_name
        assert pod.get("nodeSelector", {}) == place.node_selector, task_name
        assert pod["terminationGracePeriodSeconds"] == place.grace_seconds, task_name
        assert pod["containers"][0]["terminationMessagePolicy"] == "FallbackToLogsOnError", task_name
        assert pod.get("securityContext", {}).get("supplementalGroups", []) == place.groups, task_name
        assert dict(template.k8s_pod.metadata.annotations) == place.annotations, task_name


def test_an_element_that_may_fail_ends_by_itself(packaged: tuple[str, RegistrationArchive]) -> None:
    """Propeller never aborts the last failing element of a map task with ``min_success_ratio``."""
    name, made = packaged
    for stage in ("collectives", "sweep"):
        place = load_profile(name).asked(stage)
        deadlines = set()
        for task in made.tasks.values():
            if primary_container(task).environment.get(STAGE) == stage and "map_" in task.id.name:
                spec = MessageToDict(task.k8s_pod).get("podSpec", {})
                policy = MessageToDict(task.custom).get("runPolicy", {})
                deadlines.add((policy if task.type == "pytorch" else spec).get("activeDeadlineSeconds"))
        assert deadlines == {place.timeout_minutes * 60}, stage
    train = made.tasks["tasks.train.train"]
    assert "activeDeadlineSeconds" not in str(train)


def test_every_workflow_has_the_profiles_interruptibility(packaged: tuple[str, RegistrationArchive]) -> None:
    name, made = packaged
    spot = load_profile(name).default.interruptible
    assert {workflow.metadata_defaults.interruptible for workflow in made.workflows.values()} == {spot}


def test_a_table_is_prepared_by_as_many_pods_as_the_profile_says(packaged: tuple[str, RegistrationArchive]) -> None:
    name, made = packaged
    place = load_profile(name).placement("prepare")
    for workflow in (WORKFLOW, "workflows.training.prepare"):
        nodes = made.workflows[workflow].nodes
        branches = [node.branch_node.if_else for node in nodes if node.HasField("branch_node")]
        alone = [n for n in nodes if n.task_node.reference_id.name == "tasks.prepare.prepare"]
        if place.nodes == 1:
            assert (len(branches), len(alone)) == (0, 1)
            continue
        assert (len(branches), len(alone)) == (1, 0)
        divided = [
            case.then_node.workflow_node.sub_workflow_ref.name for case in (branches[0].case, *branches[0].other)
        ]
        assert divided == ["tasks.prepare.prepare_by_units", "tasks.prepare.prepare_by_files"]
        assert branches[0].else_node.task_node.reference_id.name == "tasks.prepare.prepare"
        for by, tasks in zip(divided, (3, 4), strict=True):
            mapped = [node.array_node for node in made.workflows[by].nodes if node.HasField("array_node")]
            assert len(mapped) == tasks
            for node in mapped:
                assert (node.parallelism, node.min_success_ratio) == (place.nodes, 1.0)
                assert node.node.metadata.retries.retries == place.retries
                own = node.node.metadata.WhichOneof("interruptible_value")
                assert own is None and made.workflows[by].metadata_defaults.interruptible == place.interruptible
                task = made.tasks[node.node.task_node.reference_id.name]
                assert task.metadata.discoverable and task.metadata.retries.retries == place.retries
                assert json.loads(primary_container(task).environment[RESOLVED])["name"] == name
                tolerations = MessageToDict(task.k8s_pod).get("podSpec", {}).get("tolerations", [])
                assert {toleration["key"] for toleration in tolerations} == {t.key for t in place.tolerations}


def test_no_input_is_a_path_into_a_structure(packaged: tuple[str, RegistrationArchive]) -> None:
    """Flyte writes such an input again for every execution, in random order, so the cache never hits."""
    bindings = [
        (workflow, identity, binding)
        for workflow, template in packaged[1].workflows.items()
        for identity, node in workflow_nodes(template)
        for binding in node.inputs
    ]
    assert len(bindings) > 50
    for workflow, node, binding in bindings:
        assert "attr_path" not in json.dumps(MessageToDict(binding.binding, preserving_proto_field_name=True)), (
            f"{workflow}, {node}: {binding.var}"
        )


def pod_of(task: Any) -> dict[str, Any]:
    return MessageToDict(task.k8s_pod)["podSpec"]


def test_a_network_that_cannot_be_measured_loses_no_training(packaged: tuple[str, RegistrationArchive]) -> None:
    name, made = packaged
    mapped = [node.array_node for node in made.workflows[WORKFLOW].nodes if node.HasField("array_node")]
    assert [node.min_success_ratio for node in mapped] == [0.0]
    element = made.tasks[mapped[0].node.task_node.reference_id.name]
    assert element.type == ("python-task" if load_profile(name).asked("collectives").nodes == 1 else "pytorch")
    alone = made.tasks["tasks.collectives.benchmark_collectives"]
    assert element.custom == alone.custom and element.metadata.retries == alone.metadata.retries


def test_the_two_distributed_stages_never_run_side_by_side(packaged: tuple[str, RegistrationArchive]) -> None:
    nodes = {node.id: node for node in packaged[1].workflows[WORKFLOW].nodes}
    by_task = {node.metadata.name: node for node in nodes.values()}

    def waits_for(node: object, target: str, seen: frozenset[str] = frozenset()) -> bool:
        upstream = set(node.upstream_node_ids) - seen  # type: ignore[attr-defined]
        return target in upstream or any(
            waits_for(nodes[name], target, seen | upstream) for name in upstream if name in nodes
        )

    training = "workflows.compression.train_as_asked"
    (train,) = (node for node in nodes.values() if node.workflow_node.sub_workflow_ref.name == training)
    (network,) = (node for name, node in by_task.items() if name.startswith("tasks.collectives.map_benchmark"))
    assert waits_for(network, train.id) or waits_for(train, network.id)


def test_each_night_looks_at_the_data_afresh(packaged: tuple[str, RegistrationArchive]) -> None:
    """The cached stage depends on an uncached one, which reads the data's bytes."""
    made = packaged[1]
    outer = {node.id: node for node in made.workflows[WORKFLOW].nodes}
    nodes = [node for _, node in workflow_nodes(made.workflows[WORKFLOW])]
    sources = [b.binding.promise for node in nodes for b in node.inputs if b.binding.promise.var == "source"]
    assert len(sources) == (1 if load_profile(packaged[0]).asked("prepare").nodes == 1 else 3)
    for source in sources:
        assert outer[source.node_id].task_node.reference_id.name == "tasks.inputs.resolve_inputs"
    assert not made.tasks["tasks.inputs.resolve_inputs"].metadata.discoverable
