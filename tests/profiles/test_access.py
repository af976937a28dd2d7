"""Secrets, volumes, accounts, security contexts and templates of a profile reach pods of both kinds."""

import json
from pathlib import Path
from typing import Any

import pytest
from flyteidl.core.security_pb2 import Secret
from flyteidl.core.tasks_pb2 import TaskTemplate
from google.protobuf.json_format import MessageToDict

from slipstream.flyte.metadata import STAGE
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.proofs.rehearsal.rendering import primary_container
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import RESOLVED, load_profile, parse_profile
from tests.support.package import package as package_workflows
from tests.support.wording import refuses

#: Value that may stand in the environment of one stage only.
MARKED = "marked-2fd0c1"
PROFILE = f"""
[default]
service_account = "trainer"
runtime_class = "gvisor"
pod_template_name = "platform"

[default.security_context]
runAsNonRoot = true
runAsUser = 1000
seccompProfile = {{ type = "RuntimeDefault" }}
allowPrivilegeEscalation = false
capabilities = {{ drop = ["ALL"] }}

[[default.secrets]]
group = "Tokens"
key = "HUB"
variable = "HF_TOKEN"

[distributed]
nodes = 2
processes = 1

[[distributed.volumes]]
path = "/mnt/data"
claim = "datasets"
read_only = true

[[distributed.volumes]]
path = "/mnt/scratch"
size = "20Gi"

[stages.train.environment]
PROXY = "{MARKED}"

[[stages.promote.secrets]]
group = "signing"
key = "private.pem"
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> RegistrationArchive:
    directory = tmp_path_factory.mktemp("profile")
    (directory / "access.toml").write_text(PROFILE)
    return package_workflows(directory, str(directory / "access.toml"))


def spec_of(task: TaskTemplate) -> dict[str, Any]:
    spec: dict[str, Any] = MessageToDict(task.k8s_pod.pod_spec)
    return spec


@pytest.mark.parametrize("stage", ["report", "train"])
def test_pods_of_both_kinds_have_them(package: RegistrationArchive, stage: str) -> None:
    task = package.tasks[f"tasks.{stage}.{stage}"]
    assert (task.type == "pytorch") == (stage == "train")
    assert task.metadata.pod_template_name == "platform"
    spec = spec_of(task)
    (container,) = spec["containers"]
    assert (spec["serviceAccountName"], spec["runtimeClassName"]) == ("trainer", "gvisor")
    assert spec["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    (secret,) = task.security_context.secrets
    assert (secret.group, secret.key, secret.env_var) == ("Tokens", "HUB", "HF_TOKEN")
    assert secret.mount_requirement == Secret.ENV_VAR
    assert not [name for name in primary_container(task).environment if name == "HF_TOKEN"]


def test_volumes_are_mounted(package: RegistrationArchive) -> None:
    spec = spec_of(package.tasks["tasks.train.train"])
    claimed, scratch = spec["volumes"][:2]
    assert claimed["persistentVolumeClaim"] == {"claimName": "datasets", "readOnly": True}
    assert scratch["emptyDir"] == {"sizeLimit": "20Gi"}
    mounts = spec["containers"][0]["volumeMounts"][:2]
    assert [(each["name"], each["mountPath"], each.get("readOnly", False)) for each in mounts] == [
        (claimed["name"], "/mnt/data", True),
        (scratch["name"], "/mnt/scratch", False),
    ]
    assert "volumes" not in spec_of(package.tasks["tasks.report.report"])


def test_a_secret_without_a_variable_is_a_file(package: RegistrationArchive) -> None:
    tasks = [each for each in package.tasks.values() if primary_container(each).environment.get(STAGE) == "promote"]
    task = tasks[0]
    (secret,) = task.security_context.secrets
    assert secret.mount_requirement == Secret.FILE
    (asked,) = load_profile_of(task).asked("promote").secrets
    assert asked.path == "/etc/flyte/secrets/signing/private.pem"


def load_profile_of(task: TaskTemplate) -> Any:
    data = json.loads(primary_container(task).environment[RESOLVED])
    return parse_profile(data["name"], data)


def test_a_stages_environment_reaches_no_other_stage(package: RegistrationArchive) -> None:
    """Every byte of the package is searched."""
    found = {
        name
        for kind in (package.tasks, package.workflows, package.launch_plans)
        for name, message in kind.items()
        if MARKED.encode() in message.SerializeToString()
    }
    stages = {name: primary_container(task).environment.get(STAGE) for name, task in package.tasks.items()}
    assert found == {name for name, stage in stages.items() if stage == "train"} > {"tasks.train.train"}


@pytest.mark.parametrize(
    "tables",
    [
        {"volumes": [{"path": "data", "claim": "a"}]},
        {"volumes": [{"path": "/data"}]},
        {"volumes": [{"path": "/data", "claim": "a", "size": "1Gi"}]},
        {"volumes": [{"path": "/dev/shm", "size": "1Gi"}]},
        {"volumes": [{"path": "/data", "claim": "a"}, {"path": "/data", "claim": "b"}]},
        {"volumes": [{"path": "/data", "size": "1Gi", "read_only": True}]},
        {"volumes": [{"path": "/data", "claim": "a", "medium": "Memory"}]},
        {"volumes": [{"path": "/data", "size": "much"}]},
        {"volumes": [{"path": "/etc/flyte/secrets/mine", "claim": "a"}]},
        {"secrets": [{"group": "a", "key": "b", "variable": "1"}]},
        {"secrets": [{"group": "a", "key": ""}]},
        {"secrets": [{"group": "a", "key": "b", "variable": "X"}], "environment": {"X": "1"}},
        {"security_context": {"runAsRoot": True}},
        {"security_context": {"runAsNonRoot": True, "runAsUser": 0}},
        {"security_context": {"capabilities": {"drop": ["ALL"]}}, "rdma": {"rdma/hca": "1"}},
    ],
    ids=str,
)
def test_what_cannot_work_is_one_line(tables: dict[str, Any]) -> None:
    with refuses(UserError):
        parse_profile("mine", {"default": tables})


def test_a_restricted_namespace_takes_the_pods(package: RegistrationArchive) -> None:
    """The rules of Kubernetes' PodSecurity ``restricted``, in a few lines."""
    for name in ("tasks.train.train", "tasks.report.report"):
        spec = spec_of(package.tasks[name])
        (container,) = spec["containers"]
        of_container, of_pod = container["securityContext"], spec["securityContext"]
        assert of_container["allowPrivilegeEscalation"] is False and of_container["capabilities"]["drop"] == ["ALL"]
        assert not set(of_container["capabilities"].get("add", [])) - {"NET_BIND_SERVICE"}
        assert of_pod["runAsNonRoot"] and of_pod["runAsUser"] != 0
        assert of_pod["seccompProfile"]["type"] in ("RuntimeDefault", "Localhost")
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
        assert not kinds - {"emptyDir", "persistentVolumeClaim", "configMap", "secret", "projected", "downwardAPI"}
        assert not (spec.get("hostNetwork") or spec.get("hostPID") or spec.get("hostIPC"))


@pytest.mark.parametrize("name", ["a100-spot", "local"])
def test_a_profile_without_them_asks_for_none(name: str) -> None:
    asked = load_profile(name).asked("train")
    assert not (asked.secrets or asked.volumes or asked.security_context or asked.service_account)


def test_the_parsed_profile_is_the_written_one(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(PROFILE)
    profile = load_profile(str(tmp_path / "access.toml"))
    assert profile.asked("train").environment == {"PROXY": MARKED}
    travelled = json.loads(profile.to_json("report"))
    assert MARKED not in profile.to_json("report") and parse_profile("x", travelled).asked("train").volumes
