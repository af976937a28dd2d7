"""Node pools for groups of stages whose pods may share nodes, MIG partitions, and values of the GPU operator."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.needs import about_spot, at_once
from slipstream.shared.profiles.placement import EFA, TYPE_LABEL, Placement, Toleration
from slipstream.shared.settings import to_dict
from slipstream.shared.telemetry.prices import built_in_prices

Tree = dict[str, Any]
SPOT, ON_DEMAND = "spot", "on-demand"
CAPACITY_LABEL = "karpenter.sh/capacity-type"
#: Resources that Karpenter can predict for a new node.
COUNTED = ("cpu", "memory", "ephemeral-storage", "nvidia.com/gpu", "amd.com/gpu", EFA)
#: GPUs of the largest instances, if the price list has no number.
LARGEST_NODE = 8
#: Node labels that select a GPU operator's configuration.
MIG_LABEL, SHARING_LABEL = "nvidia.com/mig.config", "nvidia.com/device-plugin.config"
#: Taints that Kubernetes and Karpenter put on failing nodes.
CONDITIONS = ("node.kubernetes.io/", "karpenter.sh/")
#: Node labels by which Flyte's propeller selects nodes for ``accelerator``, by default.
FLYTE_ACCELERATOR, FLYTE_PARTITION = "k8s.amazonaws.com/accelerator", "k8s.amazonaws.com/gpu-partition-size"


@dataclass(frozen=True)
class NodePool:
    """Nodes for ``stages``; ``capacity`` is "spot", "on-demand", or "" for existing nodes."""

    kind: str
    capacity: str
    stages: Mapping[str, Placement]

    @property
    def name(self) -> str:
        return "-".join(filter(None, ("slipstream", self.kind, self.capacity)))

    @property
    def placement(self) -> Placement:
        """Placement of the largest stage; all stages agree in the settings that select nodes."""
        return max(self.stages.values(), key=lambda placement: (placement.nodes, placement.timeout_minutes))

    @property
    def has_gpus(self) -> bool:
        return bool(int(self.placement.gpu))

    @property
    def needs(self) -> dict[str, float]:
        """Maximum resources that the stages of a main job request at a time."""
        return at_once(self.stages)

    @property
    def uncounted(self) -> tuple[str, ...]:
        """Requested resources that Karpenter cannot predict for a new node, so that it creates no nodes."""
        return tuple(name for name in self.needs if name not in COUNTED)

    @property
    def taints(self) -> list[Tree]:
        """Taints that reserve the nodes for the pods, from the pods' tolerations.

        On-demand nodes lack the spot taint, and nodes without GPUs the GPU taint.
        """
        tolerated = [
            taint_of(toleration)
            for toleration in self.placement.tolerations
            if toleration.key
            and not toleration.key.startswith(CONDITIONS)
            and (self.capacity != ON_DEMAND or not about_spot(toleration.key, toleration.value))
            and (self.has_gpus or not toleration.key.endswith("/gpu"))
        ]
        return list({(taint["key"], taint["effect"]): taint for taint in tolerated}.values())

    @property
    def instance_types(self) -> list[str]:
        """EC2 instance types with the requested GPUs, by profile and price list; empty if unknown."""
        if named := self.placement.node_selector.get(TYPE_LABEL, ""):
            return [named]
        known, placement = built_in_prices(), self.placement
        like = known.instances.get(known.accelerators.get(placement.accelerator, ""))
        gpu = like.gpu if like else ""
        gpus = find_partition(placement.mig, gpu).gpus if placement.mig else (gpu,)
        return [
            name
            for name, each in known.instances.items()
            if "." in name and each.gpu and each.gpu in gpus and each.gpus >= int(placement.gpu)
        ]

    @property
    def gpus_per_node(self) -> int:
        """Maximum number of GPUs of a node in the pool."""
        instances = built_in_prices().instances
        known = [instances[name].gpus for name in self.instance_types if name in instances]
        return max(known, default=LARGEST_NODE)

    @property
    def pods_per_node(self) -> int:
        """Maximum number of pods that share a node's GPUs."""
        return max(1, self.gpus_per_node // max(1, int(self.placement.gpu)))

    @property
    def operator_labels(self) -> dict[str, str]:
        """Node labels by which the GPU operator divides or shares GPUs."""
        labels = {MIG_LABEL: mig_config(self.placement)} if self.placement.mig else {}
        return labels | ({SHARING_LABEL: self.placement.shared_gpu} if self.placement.shared_gpu else {})

    @property
    def flyte_labels(self) -> dict[str, str]:
        placement = self.placement
        labels = {FLYTE_ACCELERATOR: placement.accelerator} if placement.accelerator else {}
        single = placement.accelerator and placement.mig and placement.mig_strategy == "single"
        return labels | ({FLYTE_PARTITION: placement.mig} if single else {})


def mig_config(placement: Placement) -> str:
    return f"slipstream-{placement.mig}"


def taint_of(toleration: Toleration) -> Tree:
    value = {"value": toleration.value} if toleration.value else {}
    return {"key": toleration.key, **value, "effect": toleration.effect or "NoSchedule"}


def node_pools(site: ClusterSite) -> list[NodePool]:
    """Return the pools: GPUs first, and spot first within a kind.

    Stages whose node selector names one capacity type have no pool of the other.
    """
    return list(each_pool(site))


def each_pool(site: ClusterSite) -> Iterator[NodePool]:
    for kind, wanted in (("gpu", site.gpus), ("cpu", {k: v for k, v in site.stages.items() if k not in site.gpus})):
        for number, stages in enumerate(group_alike_stages(wanted), 1):
            name = kind if number == 1 else f"{kind}-{number}"
            if site.cloud != "aws":
                yield NodePool(name, "", stages)
                continue
            spot = {stage: placement for stage, placement in stages.items() if placement.interruptible}
            selected = next(iter(stages.values())).node_selector
            only_spot = any(about_spot(key, value) for key, value in selected.items())
            if (spot or only_spot) and selected.get(CAPACITY_LABEL) != ON_DEMAND:
                yield NodePool(name, SPOT, spot or stages)
            if not only_spot:
                yield NodePool(name, ON_DEMAND, stages)


def group_alike_stages(stages: Mapping[str, Placement]) -> list[dict[str, Placement]]:
    """Group stages whose pods may run on the same nodes."""
    found: dict[str, dict[str, Placement]] = {}
    for stage, placement in stages.items():
        asked = to_dict(placement)
        same = ("gpu_resource", "accelerator", "mig", "mig_strategy", "shared_gpu", "node_selector", "tolerations")
        found.setdefault(json.dumps([asked[name] for name in same]), {})[stage] = placement
    return list(found.values())


@dataclass(frozen=True)
class Partition:
    #: GPUs that have the partition, named as in ``slipstream/operations/plan/gpus.toml``.
    gpus: tuple[str, ...]
    #: Number of partitions of this kind on one GPU.
    number: int


A100_40, A100_80, H100, H200 = "A100-40GB", "A100-80GB", "H100", "H200"
#: Partitions by their name in the profile and the device plugin. 1g.10gb on an A100-40GB (four) is not listed.
PARTITIONS = {
    "1g.5gb": Partition((A100_40,), 7),
    "2g.10gb": Partition((A100_40,), 3),
    "3g.20gb": Partition((A100_40,), 2),
    "4g.20gb": Partition((A100_40,), 1),
    "7g.40gb": Partition((A100_40,), 1),
    "1g.10gb": Partition((A100_80, H100), 7),
    "1g.20gb": Partition((A100_80, H100), 4),
    "2g.20gb": Partition((A100_80, H100), 3),
    "3g.40gb": Partition((A100_80, H100), 2),
    "4g.40gb": Partition((A100_80, H100), 1),
    "7g.80gb": Partition((A100_80, H100), 1),
    "1g.18gb": Partition((H200,), 7),
    "1g.35gb": Partition((H200,), 4),
    "2g.35gb": Partition((H200,), 3),
    "3g.71gb": Partition((H200,), 2),
    "4g.71gb": Partition((H200,), 1),
    "7g.141gb": Partition((H200,), 1),
}


def find_partition(name: str, gpu: str = "") -> Partition:
    """Return the partition ``name`` of ``gpu``, or of any GPU if ``gpu`` is "".

    Raises ``UserError`` if it is unknown.
    """
    known = {each: found for each, found in PARTITIONS.items() if not gpu or gpu in found.gpus}
    if name not in known:
        of = f" of {gpu}" if gpu else ""
        expected = f"one of {', '.join(known)}" if known else "another accelerator"
        raise UserError(f"profile.mig: {name}: not a known partition{of}; expected {expected}")
    return Partition((gpu,), known[name].number) if gpu else known[name]


VALUES = "helm/gpu-operator.yaml"
#: Number of pods that share a GPU; profiles have no setting for it.
SHARES = 4
#: Clouds whose node images include driver and container toolkit.
BRING_DRIVER = ("aws", "azure")


def operator_values(site: ClusterSite) -> dict[str, Any]:
    """Return the templates' values about the GPU operator.

    Empty without NVIDIA's GPUs, and on GKE, which brings driver, device plugin and DCGM itself.
    """
    if not site.nvidia or site.cloud == "gcp":
        return {}
    placements = site.gpus.values()
    divided = {mig_config(placement): placement for placement in placements if placement.mig}
    return {
        "brings_driver": site.cloud in BRING_DRIVER,
        "shares": SHARES,
        "shared": {placement.shared_gpu: placement for placement in placements if placement.shared_gpu},
        "divided": divided,
        "partitions": {name: find_partition(placement.mig).number for name, placement in divided.items()},
        "mixed": any(placement.mig_strategy == "mixed" for placement in divided.values()),
        "tolerations": gpu_tolerations(site),
    }


def gpu_tolerations(site: ClusterSite) -> list[Tree]:
    """Return tolerations of all taints of nodes with GPUs."""
    found: list[Tree] = []
    for pool in node_pools(site):
        for taint in pool.taints if pool.has_gpus else ():
            operator = {"operator": "Equal" if "value" in taint else "Exists"}
            toleration = {"key": taint["key"], **operator, **taint}
            found += [] if toleration in found else [toleration]
    return found
