"""Request of one stage to the cluster, validated; every field is documented below it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import field
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.pod_settings import SecretRequest, Volume, check_access, check_security_context
from slipstream.shared.settings import LARGEST, LARGEST_EXACT, Natural, Positive, Settings, settings, to_dict

#: Default resource name of GPUs, and the only name that Flyte's accelerators support.
NVIDIA = "nvidia.com/gpu"
EFA = "vpc.amazonaws.com/efa"
#: Accelerators of NVIDIA that lack bfloat16, by a part of their names.
BEFORE_AMPERE = {"k80", "m60", "p4", "p100", "v100", "t4"}
#: Label by which all clouds state a node's machine type.
TYPE_LABEL = "node.kubernetes.io/instance-type"
WHOLE = re.compile("[0-9]{1,9}")
#: Upper bounds: a pod that is preempted every minute does no work; no pod costs that many dollars an hour.
MOST_PREEMPTIONS, MOST_DOLLARS = 24 * 60, 1e6
#: GiB of local disk besides the prepared data: outputs, unfinished checkpoints, logs.
DISK_BESIDES_GIB = 20
#: Clouds by the prefix of their nodes' labels and taints.
CLOUD_LABELS = {
    "cloud.google.com/": "gcp",
    "eks.amazonaws.com/": "aws",
    "k8s.amazonaws.com/": "aws",
    "karpenter.k8s.aws/": "aws",
    "kubernetes.azure.com/": "azure",
}
#: Fields that timings depend on.
HARDWARE = (
    *("nodes", "processes", "cpu", "gpu", "gpu_resource", "accelerator", "mig", "mig_strategy", "shared_gpu", "numa"),
    *("efa", "rdma", "hugepages", "node_selector", "affinity", "environment"),
)


@settings
class Toleration(Settings):
    """Kubernetes toleration."""

    section = "profile.tolerations"

    key: str = ""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str = ""
    effect: str = ""


@settings
class Placement(Settings):
    """Request of one stage per pod, in Kubernetes' quantities (``"500m"``, ``"16Gi"``); requests equal limits."""

    section = "profile"

    nodes: Positive = 1
    """Number of parallel pods: the nodes of a process group; for prepare, those that share the work on a table."""
    processes: Natural = 1
    """Processes per node. 0 is one per GPU of the placement; if it names none, one per GPU of the machine on which it
    runs, or two without GPUs. That machine is known only where the stage runs, so 0 requires one node."""
    cpu: str = "1"
    """CPUs, also the number of threads: the processes share these, whatever the node has."""
    memory: str = "2Gi"
    disk: str = ""
    """Ephemeral storage; empty is data_cache_gib + 20 GiB."""

    gpu: str = "0"
    gpu_resource: str = ""
    """Resource that ``gpu`` counts, if it does not follow from the other fields: ``amd.com/gpu`` on AMD."""
    accelerator: str = ""
    """Name of the NVIDIA GPU, spelled as in the node label of Flyte's configuration. Flyte selects nodes by it for
    ``nvidia.com/gpu`` only; for other resources use node_selector."""
    mig: str = ""
    """MIG partition, such as "1g.5gb". A process sees one partition, and NCCL does not join several."""
    mig_strategy: Literal["mixed", "single"] = "mixed"
    """Strategy of the device plugin: with "mixed" every kind of partition is a resource (``nvidia.com/mig-1g.5gb``),
    with "single" partitions count as ``nvidia.com/gpu`` and the accelerator's partition size selects the node."""
    shared_gpu: Literal["", "time-slicing", "mps"] = ""
    """Sharing of a GPU with other pods, as ``nvidia.com/gpu.shared`` (the device plugin's ``renameByDefault``; name it
    in gpu_resource if that is off). Only "mps" guarantees a fraction of its memory."""
    groups: list[Natural] = field(default_factory=list)
    """Supplementary groups by number: on AMD nodes those of ``video`` and ``render``."""

    shared_memory: str = ""
    """Size of /dev/shm, which counts as memory; empty leaves the container's default, 64 MiB."""
    efa: Natural = 0
    """Elastic Fabric Adapters (AWS) per pod of several; a process group on one node asks for none."""
    rdma: dict[str, str] = field(default_factory=dict)
    """Numbers of RDMA devices by the resource name of the cluster's plugin; adds the capability IPC_LOCK."""
    hugepages: str = ""
    """Pages of 2 MiB, in addition to the memory; EFA needs them. Pods of one node ask for none."""
    numa: bool = False
    """Request whole CPUs, which the kubelet's static CPU manager reserves for one pod, on the NUMA nodes of its devices
    if the topology manager is set so. Requests always equal limits, so the pod's class is Guaranteed."""

    interruptible: bool = False
    preemptions_per_day: Annotated[float, Field(ge=0, le=MOST_PREEMPTIONS)] = 0.0
    """Mean number of preemptions of one pod per day; determines ``retries`` if they are not set."""
    retries: Natural = 0
    """Flyte's budget for user failures. If only preemptions_per_day is set, the budget is enough for 99 of 100
    executions of maximum duration, and two for other causes."""
    restarts: Natural = 0
    """Number of restarts of a process group in the same pods after a worker died, before a retry is used."""
    price_per_hour: float = 0.0
    """Dollars per hour of one pod on demand; 0 takes slipstream/shared/telemetry/prices.toml, if that has the node.
    If this is set, the spot price is unknown unless it is set, too."""
    spot_price_per_hour: float = 0.0
    """Dollars per hour of one pod on spot capacity."""
    timeout_minutes: Positive = 60
    """Timeout of one attempt from its creation, including the time in which its pods are Pending. The whole stage ends
    after twice this time over all its attempts, whatever retries are left."""
    grace_seconds: Positive = 30
    """Seconds from SIGTERM to SIGKILL. Training saves within them."""
    notices: Literal["none", "auto", "aws", "gcp", "azure"] = "none"
    """Cloud whose preemption notices a process watches; "auto" finds the cloud by asking its metadata server."""

    tolerations: list[Toleration] = field(default_factory=list)
    node_selector: dict[str, str] = field(default_factory=dict)
    affinity: dict[str, Any] = field(default_factory=dict)
    """As in a pod's manifest: nodeAffinity, podAffinity, podAntiAffinity."""
    scheduler: str = ""
    priority: str = ""
    """The pod's PriorityClass."""
    labels: dict[str, str] = field(default_factory=dict)
    """Labels of the pods. The PyTorchJob itself carries the labels of the execution only."""
    annotations: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables. They stand in Flyte's database as they are: passwords belong into secrets."""
    secrets: list[SecretRequest] = field(default_factory=list)
    volumes: list[Volume] = field(default_factory=list)
    service_account: str = ""
    """Kubernetes service account of the pods; empty is that of the execution."""
    security_context: dict[str, Any] = field(default_factory=dict)
    """Security context with the field names of a pod's manifest. capabilities, allowPrivilegeEscalation, privileged,
    procMount and readOnlyRootFilesystem apply to the container. It replaces the platform's default."""
    runtime_class: str = ""
    pod_template_name: str = ""
    """PodTemplate of the platform in the namespace of the pods; fields of this profile override it."""
    termination_message_policy: Literal["File", "FallbackToLogsOnError"] = "FallbackToLogsOnError"
    """Policy by which Kubernetes shows the end of a failed pod's log."""
    checkpoints: str = ""
    """Directory or store address, reachable from all pods, below which trainings keep their checkpoints. Empty: Flyte's
    raw output; on one machine ``.slipstream``."""
    checkpoint_days: Annotated[float, Field(gt=0)] = 14.0
    """Days after a training's last heartbeat from which its checkpoints may be deleted."""
    data_cache_gib: Annotated[float, Field(gt=0, le=LARGEST)] = 100.0
    """Local disk for prepared data (GiB per node). Data that fits is downloaded before the first step; other data is
    streamed from S3 ahead of use."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes

    @property
    def threads(self) -> int:
        """Threads per process; 0 if ``processes`` is 0."""
        return max(1, int(parse_quantity(self.cpu)) // self.processes) if self.processes else 0

    @property
    def gpu_name(self) -> str:
        """Resource that ``gpu`` counts."""
        partition = f"nvidia.com/mig-{self.mig}" if self.mig and self.mig_strategy == "mixed" else NVIDIA
        return self.gpu_resource or (f"{partition}.shared" if self.shared_gpu else partition)

    @property
    def resources(self) -> dict[str, str]:
        """All resource requests of a container, by Kubernetes' names."""
        asked = {
            "cpu": self.cpu,
            "memory": self.memory,
            "ephemeral-storage": self.disk or f"{math.ceil(self.data_cache_gib) + DISK_BESIDES_GIB}Gi",
            self.gpu_name: self.gpu,
            EFA: str(self.efa) if self.nodes > 1 else "",
            "hugepages-2Mi": self.hugepages if self.nodes > 1 else "",
            **self.rdma,
        }
        return {name: amount for name, amount in asked.items() if amount not in ("", "0")}

    @property
    def cloud(self) -> str:
        """Cloud whose nodes some field requires: "aws", "gcp" or "azure"; "" if none does."""
        return next((cloud for _, cloud in self._clouds()), "")

    @property
    def auto_precision(self) -> str:
        """Precision that "auto" resolves to on this hardware; "gpu" if the profile names no kind of GPU."""
        if not int(self.gpu or 0):
            return "fp32"
        if not self.accelerator:
            return "gpu"
        return "fp16" if BEFORE_AMPERE.intersection(self.accelerator.split("-")) else "bf16"

    @property
    def hardware(self) -> dict[str, object]:
        """Fields that timings depend on, with their values."""
        return {name: value for name, value in to_dict(self).items() if name in HARDWARE}

    def check(self) -> None:
        for name in ("cpu", "memory"):
            self._check_quantity(name)
        for name in ("disk", "shared_memory", "hugepages"):
            if getattr(self, name):
                self._check_quantity(name)
        self._check_gpus()
        if self.processes == 0 and self.nodes > 1:
            raise self.reject("processes", f"a number: with profile.nodes {self.nodes} it is needed at registration")
        if self.numa and not WHOLE.fullmatch(self.cpu):
            raise self.reject("cpu", "whole CPUs with profile.numa, such as 8")
        if self.shared_memory and parse_quantity(self.shared_memory) >= parse_quantity(self.memory):
            raise self.reject("shared_memory", f"less than profile.memory, {self.memory}: it is part of it")
        if self.disk and parse_quantity(self.disk) < self.data_cache_gib * 2**30:
            raise self.reject("disk", f"room for profile.data_cache_gib, {self.data_cache_gib:g}")
        if self.efa and not self.hugepages:
            raise self.reject("hugepages", "an amount with profile.efa, such as 5120Mi")
        for name in ("price_per_hour", "spot_price_per_hour"):
            if not 0 <= getattr(self, name) <= MOST_DOLLARS:
                raise self.reject(name, f"dollars per hour of one pod, 0 if not given, at most {MOST_DOLLARS:,.0f}")
        if self.price_per_hour and self.spot_price_per_hour > self.price_per_hour:
            raise self.reject("spot_price_per_hour", f"at most profile.price_per_hour, {self.price_per_hour:g}")
        kinds = ("nodeAffinity", "podAffinity", "podAntiAffinity")
        if wrong := sorted(set(self.affinity) - set(kinds)):
            raise UserError(f"profile.affinity.{wrong[0]}: unknown setting; allowed here: {', '.join(kinds)}")
        check_access(self.secrets, self.volumes, self.environment)
        check_security_context(self.security_context)
        if self.rdma and "capabilities" in self.security_context and "IPC_LOCK" not in self.added_capabilities:
            raise self.reject(
                "security_context", "IPC_LOCK among capabilities.add with profile.rdma, which pins memory"
            )
        self._check_clouds()

    @property
    def added_capabilities(self) -> Sequence[str]:
        """Capabilities that the security context adds to the container."""
        return self.security_context.get("capabilities", {}).get("add", ())

    def _check_quantity(self, name: str) -> None:
        try:
            parse_quantity(getattr(self, name))
        except ValueError:
            raise self.reject(name, "a Kubernetes quantity, such as 500m or 16Gi") from None

    def _check_gpus(self) -> None:
        if not WHOLE.fullmatch(self.gpu):
            raise self.reject("gpu", "a whole number, such as 8")
        gpus = int(self.gpu)
        for name in ("accelerator", "mig", "shared_gpu", "gpu_resource"):
            if getattr(self, name) and not gpus:
                raise self.reject(name, "none without GPUs; set profile.gpu")
        for name, one in (("mig", "partition"), ("shared_gpu", "shared GPU")):
            if getattr(self, name) and (gpus, self.nodes, self.processes) != (1, 1, 1):
                raise self.reject(
                    name,
                    f"profile.gpu 1, nodes 1 and processes 1 with it, not {gpus}, {self.nodes} and {self.processes}: "
                    f"a process sees one {one}, and NCCL does not join several",
                )
        if self.mig and self.gpu_resource:
            raise self.reject("gpu_resource", "none with profile.mig, which names the resource")
        if self.accelerator and self.gpu_name != NVIDIA:
            raise self.reject(
                "accelerator", f"none with {self.gpu_name}, for which Flyte ignores it; use node_selector"
            )
        if gpus and self.processes > gpus:
            raise self.reject("processes", f"at most one for each of profile.gpu, {gpus}")

    def _check_clouds(self) -> None:
        """Raise ``UserError`` if the fields name nodes of different clouds."""
        named = {cloud: where for where, cloud in self._clouds()}
        if len(named) > 1:
            raise UserError(
                f"profile: {' and '.join(f'{where} ({cloud})' for cloud, where in sorted(named.items()))} are of "
                "different clouds; remove those that are not of yours"
            )

    def _clouds(self) -> Iterator[tuple[str, str]]:
        if self.efa:
            yield "efa", "aws"
        if self.notices not in ("none", "auto"):
            yield f"notices {self.notices}", self.notices
        keys = [("node_selector", key) for key in self.node_selector]
        keys += [("tolerations", toleration.key) for toleration in self.tolerations]
        for where, key in keys:
            for beginning, cloud in CLOUD_LABELS.items():
                if key.startswith(beginning):
                    yield f"{where} {key}", cloud


#: Number of percentiles of simulated trainings that describe an amount: the 5th, the 50th and the 95th.
QUANTILES = 3


@settings
class Planned(Settings):
    """Plan of one training, from its first attempt to its end, including the waits for capacity between attempts."""

    section = "profile.plan"

    take: str
    """Chosen instance and capacity type."""
    rows: Annotated[int, Field(ge=1, le=LARGEST_EXACT)]
    """Number of training rows, over all epochs."""
    hours: list[float]
    dollars: list[float]
    interruptions: float

    def check(self) -> None:
        for name in ("hours", "dollars"):
            self._check_quantiles(name, getattr(self, name))
        if self.interruptions < 0:
            raise self.reject("interruptions", "a mean of at least 0")

    def _check_quantiles(self, name: str, values: Sequence[float]) -> None:
        rising = all(low <= high for low, high in pairwise([0.0, *values]))
        if len(values) != QUANTILES or not rising or not all(map(math.isfinite, values)):
            raise self.reject(name, "three rising numbers of at least 0: the 5th, 50th and 95th percentiles")
