"""Requirements of all stages of a profile on a cluster: amounts, tolerated taints, cloud."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.placement import TYPE_LABEL, Placement, Toleration
from slipstream.shared.profiles.profile import Profile
from slipstream.shared.stages import STAGES

#: Seconds from the preemption notice until pods are killed; Google's node gives pods 15 of its 30.
NOTICE_S = {"aws": 120, "gcp": 15, "azure": 30}
#: Prefix of Azure's machine types; Amazon's contain a dot, Google's do not.
AZURE_TYPE = "Standard_"
#: Key in ``plugins`` of propeller's configuration, with a requirement for pods that are not interruptible.
ON_DEMAND_ENTRY = "k8s.non-interruptible-node-selector-requirement"
#: Requirement of a pod that must not run on a spot node, by the label that the cloud or Karpenter puts on its nodes.
ON_DEMAND_ONLY: Mapping[str, Mapping[str, object]] = {
    "aws": {"key": "karpenter.sh/capacity-type", "operator": "NotIn", "values": ["spot"]},
    "gcp": {"key": "cloud.google.com/gke-spot", "operator": "DoesNotExist"},
    "azure": {"key": "kubernetes.azure.com/scalesetpriority", "operator": "NotIn", "values": ["spot"]},
}
MIB, GIB = 2.0**20, 2.0**30

#: Amounts by the resource's name: bytes, CPUs or devices.
Amounts = dict[str, float]


def pod_placements(profile: Profile) -> dict[str, Placement]:
    """Return the placement of every stage with pods of its own."""
    return {name: profile.asked(name) for name, stage in STAGES.items() if not stage.pod_of}


def asked_by(placement: Placement) -> Amounts:
    """Return the total request of all pods of the placement."""
    return {name: placement.nodes * parse_quantity(amount) for name, amount in placement.resources.items()}


def at_once(stages: Mapping[str, Placement]) -> Amounts:
    """Return the maximum that one main job requests at a time, by resource.

    This is the largest stage's request plus the largest outside process groups, as export runs in parallel to the
    collectives benchmark.
    """
    grouped = {name for name in stages if STAGES[name].distributed or STAGES[name].trains_alone}
    largest = largest_requests(stages.values())
    beside = largest_requests(placement for name, placement in stages.items() if name not in grouped)
    if not grouped:
        return largest
    return {name: amount + beside.get(name, 0.0) for name, amount in largest.items()}


def largest_requests(asking: Iterable[Placement]) -> Amounts:
    found: Amounts = {}
    for placement in asking:
        for name, amount in asked_by(placement).items():
            found[name] = max(amount, found.get(name, 0.0))
    return found


def format_quantity(name: str, amount: float) -> str:
    """Format an amount as Kubernetes does, rounded up: whole GiB or MiB, thousandths of a CPU, devices."""
    if not amount:
        return "0"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return f"{amount / GIB:.0f}Gi" if amount % GIB == 0 else f"{math.ceil(amount / MIB)}Mi"
    return f"{amount:.0f}" if amount == int(amount) else f"{math.ceil(amount * 1000)}m"


def tolerates_taint(placement: Placement, taint: Mapping[str, object]) -> bool:
    """Return True if a pod of the placement may run despite the taint; PreferNoSchedule excludes no pod."""
    if taint.get("effect") == "PreferNoSchedule":
        return True
    return any(matches(toleration, taint) for toleration in placement.tolerations)


def matches(toleration: Toleration, taint: Mapping[str, object]) -> bool:
    if toleration.effect and toleration.effect != taint.get("effect"):
        return False
    if not toleration.key:
        return toleration.operator == "Exists"
    if toleration.key != taint.get("key"):
        return False
    return toleration.operator == "Exists" or toleration.value == (taint.get("value") or "")


def about_spot(*words: str) -> bool:
    """Return True if a word of a label, taint or toleration names spot nodes."""
    return any("spot" in word.lower() for word in words)


def profile_cloud(profile: Profile) -> str:
    """Return the cloud whose nodes the profile names; "" if it names none."""
    for placement in pod_placements(profile).values():
        if placement.cloud:
            return placement.cloud
        if kind := placement.node_selector.get(TYPE_LABEL, ""):
            return instance_cloud(kind)
    return ""


def instance_cloud(kind: str) -> str:
    """Return the cloud of an instance type."""
    return "aws" if "." in kind else "azure" if kind.startswith(AZURE_TYPE) else "gcp"
