"""The doctor's questions to a cluster, answered by a kubectl that reads files."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.doctor import raw_outputs
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.operations.doctor.cluster import check_cluster
from slipstream.operations.doctor.findings import DoctorReport
from slipstream.operations.doctor.kubectl import kubectl, list_names
from slipstream.operations.doctor.propeller import CONTAINERS, admin_limits, components
from slipstream.operations.proofs.rehearsal.bucket import S3Bucket
from slipstream.shared.storage import lifecycle_rules
from slipstream.shared.storage.s3 import client_of
from tests.support import fake_kubectl as fake
from tests.support import flyte_charts as flyte
from tests.support.faulty_s3 import FaultyS3
from tests.support.wording import same_wording

GPU = {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}
BIG: dict[str, Any] = {"cpu": "96", "memory": "1300Gi", "gpu": "8", "disk": "900Gi"}
TRAIN = "tasks.train.train"
#: Two nodes with GPUs and four without, on which everything fits.
NODES = [
    *(fake.node(f"gpu-{i}", GPU, ("nvidia.com/gpu", "slipstream/spot"), **BIG) for i in range(2)),
    *(fake.node(f"cpu-{i}", {}, cpu="32", memory="128Gi", disk="500Gi") for i in range(4)),
]


@pytest.fixture
def look(healthy: RegistrationArchive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., DoctorReport]:
    def check(
        change: Callable[[RegistrationArchive], None] = lambda _: None,
        rules: Sequence[dict[str, Any]] = (),
        **lists: list[dict[str, Any]],
    ) -> DoctorReport:
        answers = {
            "customresourcedefinitions": [fake.definition()],
            "deployments": [fake.operator(gang="scheduler-plugins-scheduler"), flyte.binary()],
            "configmaps": settings(),
            "nodes": NODES,
            "resourcequotas": [],
            "priorityclasses": [{"metadata": {"name": "system-node-critical"}}],
        }
        monkeypatch.setenv("PATH", fake.install(tmp_path / "bin", **{**answers, **lists}))
        monkeypatch.setattr(raw_outputs, "lifecycle_rules", lambda uri: rules)
        change(healthy)
        return check_cluster(healthy)

    return check


def test_a_cluster_on_which_everything_fits(look: Callable[..., DoctorReport]) -> None:
    report = look()
    assert report.findings == () and report.unchecked == ()
    assert "the cluster of kubectl's context test-cluster" in report.checked
    assert any("of 1.9 or newer, kubeflow/training-operator:v1-5170a36" in line for line in report.checked)
    assert any("6 nodes with 16 nvidia.com/gpu allocatable" in line for line in report.checked)
    assert any("max-workflow-retries, 100000 by the ConfigMaps of deployment" in line for line in report.checked)


RETRIES = "propeller:\n  max-workflow-retries: 100000\n"
ON_DEMAND = (
    "plugins:\n  k8s:\n    non-interruptible-node-selector-requirement: {key: capacity, operator: In, values: [a]}\n"
)
BINARY = "deployment flyte/flyte-binary"


def settings(**sections: str) -> list[dict[str, Any]]:
    """flyte-binary's ConfigMap with a longer ``kf-operator.timeout`` or ``max-cache-age``."""
    texts = {
        "timeout": "  kf-operator:\n    timeout: {}\n",
        "age": "catalog-cache:\n  max-cache-age: {}\n",
    }
    return [
        flyte.binary_config(
            inline=RETRIES + ON_DEMAND + "".join(texts[name].format(text) for name, text in sections.items())
        )
    ]


def whats(report: DoctorReport, where: str = TRAIN) -> list[str]:
    return [finding.what for finding in report.findings if finding.where == where]


QUOTA = fake.quota("churn-production", **{"requests.cpu": "8"})
VOLCANO = [fake.operator(gang="volcano"), flyte.binary()]


@pytest.mark.parametrize(
    "lists",
    [{"resourcequotas": [QUOTA]}, {"deployments": VOLCANO}, {"resourcequotas": [QUOTA], "deployments": VOLCANO}],
)
def test_a_timeout_of_propeller_that_is_shorter_than_a_job_may_wait(
    look: Callable[..., DoctorReport], lists: dict[str, list[dict[str, Any]]]
) -> None:
    report = look(**lists)
    assert len(report.findings) == len(lists) and {finding.where for finding in report.findings} == {BINARY}
    for finding in report.findings:
        same_wording(finding.what)
        same_wording(finding.fix)


@pytest.mark.parametrize("timeout", ["10000m", "200h", "1000000000000000", "199h59m60s"])
def test_a_timeout_as_long_as_the_package_waits(look: Callable[..., DoctorReport], timeout: str) -> None:
    report = look(resourcequotas=[QUOTA], deployments=VOLCANO, configmaps=settings(timeout=timeout))
    assert not report.findings and any("kf-operator.timeout" in line for line in report.checked)


@pytest.mark.parametrize(
    "quota", [fake.quota("kube-system", pods="1"), fake.quota("churn-production", services="1", **{"count/jobs": "2"})]
)
def test_a_quota_that_refuses_no_pod_of_flytes(look: Callable[..., DoctorReport], quota: dict[str, Any]) -> None:
    assert not look(resourcequotas=[quota]).findings


def test_a_timeout_that_is_none(look: Callable[..., DoctorReport]) -> None:
    report = look(resourcequotas=[QUOTA], configmaps=settings(timeout="soon"))
    assert not report.findings
    assert report.unchecked == (f"propeller's settings: {BINARY}: plugins.kf-operator.timeout is not a duration",)


ALONE = [fake.operator(), flyte.binary()]


def test_two_jobs_that_do_not_fit_at_once_without_a_gang_scheduler(look: Callable[..., DoctorReport]) -> None:
    report = look(deployments=ALONE)
    (what,) = whats(report)
    same_wording(what)
    assert not report.failed


def test_two_jobs_that_fit_at_once_without_a_gang_scheduler(look: Callable[..., DoctorReport]) -> None:
    assert not look(deployments=ALONE, nodes=[*NODES[:1] * 4, *NODES[2:]]).findings


MONTH = {"ID": "month", "Status": "Enabled", "Filter": {"Prefix": "data/"}, "Expiration": {"Days": 30}}


@pytest.mark.parametrize(
    ("rule", "age"),
    [
        (MONTH, ""),
        (MONTH, "720h"),
        ({**MONTH, "Filter": {}}, ""),
        ({**MONTH, "Filter": {"And": {"Prefix": "da", "Tags": []}}}, ""),
        ({"Status": "Enabled", "Prefix": "data/kt/", "Expiration": {"Date": "2026-01-01"}}, ""),
    ],
)
def test_a_lifecycle_rule_that_deletes_what_the_cache_names(
    look: Callable[..., DoctorReport], rule: dict[str, Any], age: str
) -> None:
    (finding,) = look(rules=[rule], configmaps=settings(**({"age": age} if age else {}))).findings
    assert finding.severity == "warning" and finding.where == BINARY
    same_wording(finding.what)
    same_wording(finding.fix)


@pytest.mark.parametrize(
    ("rule", "age"),
    [
        (MONTH, "480h"),
        ({**MONTH, "Status": "Disabled"}, ""),
        ({**MONTH, "Filter": {"Prefix": "metadata/"}}, ""),
        ({"Status": "Enabled", "Filter": {}, "AbortIncompleteMultipartUpload": {"DaysAfterInitiation": 1}}, ""),
    ],
)
def test_a_lifecycle_rule_that_leaves_it(look: Callable[..., DoctorReport], rule: dict[str, Any], age: str) -> None:
    report = look(rules=[rule], configmaps=settings(**({"age": age} if age else {})))
    assert not report.findings and any("lifecycle rules of s3://bucket/data" in line for line in report.checked)


def test_lifecycle_rules_that_may_not_be_read_were_not_checked(
    healthy: RegistrationArchive, server: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the real client, from a bucket with a rule, without one, and from none."""
    for name, value in (bucket := S3Bucket(server.url, "lifetimes")).environment.items():
        monkeypatch.setenv(name, value)
    client_of.cache_clear()
    assert lifecycle_rules(bucket.uri("data")) == []
    bucket.s3.put_bucket_lifecycle_configuration(Bucket=bucket.name, LifecycleConfiguration={"Rules": [MONTH]})
    assert [rule["ID"] for rule in lifecycle_rules(bucket.uri("data"))] == ["month"]
    (propeller,) = components(flyte.binary(), CONTAINERS)
    check = raw_outputs.lifetime_check(healthy.uses())
    (line,) = check(propeller, [{"propeller": {"rawoutput-prefix": "s3://not-there/data"}}]).unchecked
    assert "there is no bucket 'not-there'" in line
    (line,) = check(propeller, [{"propeller": {"rawoutput-prefix": "gs://bucket/data"}}]).unchecked
    assert line == "lifecycle rules of raw outputs at gs://bucket/data: only those of S3 are read"
    client_of.cache_clear()


def test_without_the_operators_resource_no_job_is_ever_made(look: Callable[..., DoctorReport]) -> None:
    report = look(customresourcedefinitions=[fake.definition("trainjobs.trainer.kubeflow.org")])
    (what,) = whats(report)
    assert report.failed and "no pytorchjobs.kubeflow.org, only Kubeflow Trainer v2" in what


def test_an_old_operator_and_one_that_does_not_run(look: Callable[..., DoctorReport]) -> None:
    old = fake.definition(generator="v0.12.0", policy=("cleanPodPolicy",))
    waiting = {"metadata": {"name": "f1-n0-0"}}
    report = look(customresourcedefinitions=[old], deployments=[], **{fake.JOBS: [waiting]})
    assert whats(report, "the cluster") == [
        "the cluster's pytorchjobs.kubeflow.org is older than 1.8",
        "no deployment runs the training operator, and the job f1-n0-0 has no status",
    ]


@pytest.mark.parametrize("jobs", [[], [{"metadata": {"name": "f1-n0-0"}, "status": {"startTime": "2026-11-27"}}]])
def test_an_operator_that_is_not_seen_is_not_checked(
    look: Callable[..., DoctorReport], jobs: list[dict[str, Any]]
) -> None:
    """It may run otherwise than by the charts' deployments."""
    report = look(deployments=[flyte.binary()], **{fake.JOBS: jobs})
    assert not whats(report, "the cluster")
    (line,) = [line for line in report.unchecked if "training operator" in line]
    same_wording(line)


# Pods on demand

TOLERATED = "plugins:\n  k8s:\n    interruptible-tolerations: [{key: slipstream/spot, operator: Exists}]\n"


def without_tolerations(package: RegistrationArchive) -> None:
    for task in package.tasks.values():
        task.k8s_pod.pod_spec.update({"tolerations": []})


def selecting_spot(package: RegistrationArchive) -> None:
    without_tolerations(package)
    package.tasks[TRAIN].k8s_pod.pod_spec.update({"nodeSelector": {"cloud.google.com/gke-spot": "true"}})


def on_demand(package: RegistrationArchive) -> None:
    for workflow in package.workflows.values():
        workflow.metadata_defaults.interruptible = False
    for task in package.tasks.values():
        task.metadata.interruptible = False


def nothing(package: RegistrationArchive) -> None:
    """Leave the package unchanged: its pods tolerate spot nodes themselves."""


@pytest.mark.parametrize(
    ("change", "entries", "where"),
    [
        (nothing, "", BINARY),
        (nothing, TOLERATED, BINARY),
        (nothing, ON_DEMAND, None),
        (without_tolerations, TOLERATED, None),
        (without_tolerations, "", BINARY),
        (selecting_spot, ON_DEMAND, TRAIN),
        (on_demand, "", None),
    ],
)
def test_pods_on_demand_that_may_run_on_spot_nodes(
    look: Callable[..., DoctorReport],
    change: Callable[[RegistrationArchive], None],
    entries: str,
    where: str | None,
) -> None:
    report = look(change, configmaps=[flyte.binary_config(inline=RETRIES + entries)])
    found = [finding for finding in report.findings if "on a spot node" in finding.consequence]
    assert [finding.where for finding in found] == ([where] if where else [])
    for finding in found:
        same_wording(f"{finding.what}: {finding.fix}")


# Objects that pods name


def name_objects(package: RegistrationArchive) -> None:
    task = package.tasks["tasks.train.train"]
    task.metadata.pod_template_name = "platform"
    task.security_context.secrets.add(group="signing", key="private.pem")
    volumes = [{"name": "data", "persistentVolumeClaim": {"claimName": "datasets"}}]
    task.k8s_pod.pod_spec.update({"serviceAccountName": "trainer", "volumes": volumes})


def test_what_pods_name_and_no_namespace_has_is_an_error(look: Callable[..., DoctorReport]) -> None:
    there = [{"metadata": {"name": "default"}}]
    kinds = ("serviceaccounts", "podtemplates", "persistentvolumeclaims", "secrets")
    report = look(name_objects, **dict.fromkeys(kinds, there))
    assert {finding.what: finding.where for finding in report.findings if finding.severity == "error"} == {
        "the cluster has no serviceaccount trainer": TRAIN,
        "the cluster has no podtemplate platform": TRAIN,
        "the cluster has no persistentvolumeclaim datasets": TRAIN,
        "the cluster has no secret signing": TRAIN,
    }


def test_what_pods_name_and_the_cluster_has_is_checked(look: Callable[..., DoctorReport]) -> None:
    names = {
        "serviceaccounts": "trainer",
        "podtemplates": "platform",
        "persistentvolumeclaims": "datasets",
        "secrets": "signing",
    }
    report = look(name_objects, **{kind: [{"metadata": {"name": name}}] for kind, name in names.items()})
    assert not report.findings
    assert any("podtemplate platform" in line and "secret signing" in line for line in report.checked)


def test_objects_that_may_not_be_listed_are_not_checked(look: Callable[..., DoctorReport]) -> None:
    report = look(name_objects)
    assert not report.findings and len([line for line in report.unchecked if "kubectl get" in line]) == 4


def test_values_of_secrets_are_never_asked_for() -> None:
    asked: list[tuple[str, ...]] = []

    def ask(*arguments: str) -> str:
        asked.append(arguments)
        return "secret/signing\nsecret/other"

    assert list_names(ask, "secrets") == {"signing", "other"}
    assert asked == [("get", "secrets", "--all-namespaces", "--output", "name")]


# Limits of FlyteAdmin


def limits_of(monkeypatch: pytest.MonkeyPatch, place: Path, inline: str | None) -> Any:
    lists = {"deployments": [flyte.binary()]}
    if inline is not None:
        lists["configmaps"] = [flyte.binary_config(inline=inline)]
    monkeypatch.setenv("PATH", fake.install(place / "bin", **lists))
    return admin_limits(kubectl)


def test_the_limits_are_those_of_flyteadmin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inline = "task_resources:\n  limits:\n    cpu: 96\n    memory: 1100Gi\n    ephemeralStorage: 1Ti\n"
    found = limits_of(monkeypatch, tmp_path, inline)
    assert (found.cpu, found.memory, found.gpu, found.ephemeral_storage) == ("96", "1100Gi", "1", "1Ti")


def test_a_limit_of_zero_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = limits_of(monkeypatch, tmp_path, "task_resources:\n  limits:\n    cpu: 0\n    memory: 0\n    gpu: 0\n")
    assert (found.of("cpu"), found.of("memory"), found.of("gpu")) == ("", "", "")


def test_limits_that_cannot_be_read_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert limits_of(monkeypatch, tmp_path, None) is None


def test_the_operator_of_1_8_is_known_by_its_generator(look: Callable[..., DoctorReport]) -> None:
    report = look(customresourcedefinitions=[fake.definition(generator="v0.14.0", policy=())])
    assert not report.findings and any("pytorchjobs.kubeflow.org of 1.8," in line for line in report.checked)


@pytest.mark.parametrize(
    "nodes",
    [
        [fake.node("a", {}, **BIG)] * 2,
        [fake.node("a", GPU, ("reserved",), **BIG)] * 2,
        [fake.node("a", GPU, **{**BIG, "gpu": "4"})] * 4,
        [fake.node("a", GPU, **BIG), fake.node("b", GPU, cordoned=True, **BIG)],
        [fake.node("a", GPU, **BIG)],
        [],
    ],
)
def test_nodes_that_training_does_not_fit(look: Callable[..., DoctorReport], nodes: list[dict[str, Any]]) -> None:
    report = look(nodes=nodes)
    (what,) = whats(report)
    assert not report.failed
    same_wording(what)


def test_a_selector_that_no_node_has(look: Callable[..., DoctorReport]) -> None:
    def select(package: RegistrationArchive) -> None:
        package.tasks[TRAIN].k8s_pod.pod_spec.get_or_create_struct("nodeSelector")["pool"] = "training"

    same_wording(whats(look(select))[0])


def test_affinity_is_left_to_the_scheduler(look: Callable[..., DoctorReport]) -> None:
    def near(package: RegistrationArchive) -> None:
        package.tasks[TRAIN].k8s_pod.pod_spec.get_or_create_struct("affinity").get_or_create_struct("podAffinity")

    assert look(near).unchecked == ("the affinity of pods, which only the scheduler can evaluate",)


def test_a_priority_class_that_does_not_exist(look: Callable[..., DoctorReport]) -> None:
    def important(package: RegistrationArchive) -> None:
        package.tasks[TRAIN].k8s_pod.pod_spec["priorityClassName"] = "important"

    report = look(important)
    assert report.failed and whats(report) == ["the cluster has no priority class important"]


def test_a_priority_class_that_exists(look: Callable[..., DoctorReport]) -> None:
    def critical(package: RegistrationArchive) -> None:
        package.tasks[TRAIN].k8s_pod.pod_spec["priorityClassName"] = "system-node-critical"

    assert not look(critical).findings


def test_what_the_cluster_does_not_answer_was_not_checked(
    healthy: RegistrationArchive, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PATH", fake.install(tmp_path / "bin", nodes=NODES))
    report = check_cluster(healthy)
    assert [line for line in report.unchecked if "the server does not answer about get customresource" in line]
    assert any("6 nodes" in line for line in report.checked)


def test_without_a_context_or_without_kubectl_it_says_so(
    healthy: RegistrationArchive, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setenv("PATH", path := fake.install(tmp_path / "bin"))
    Path(path, "answers/context").unlink()
    same_wording(check_cluster(healthy).unchecked[0])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_cluster(healthy).unchecked == ("the cluster: no kubectl on PATH",)
