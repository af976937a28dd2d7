"""What all stages of a profile need together of a cluster: amounts, taints that they tolerate, whose nodes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from slipstream.machine.limits import parse_quantity
from slipstream.profiles.placement import TYPE_LABEL, Placement, Toleration
from slipstream.profiles.profile import Profile
from slipstream.stages import STAGES

#: Seconds from the notice of a preemption until the machine is gone; Google's node leaves pods 15 of its 30.
NOTICE_S = {"aws": 120, "gcp": 15, "azure": 30}
#: How Azure's types of machines begin; in Amazon's is a dot, in no other cloud's.
AZURE_TYPE = "Standard_"
MIB, GIB = 2.0**20, 2.0**30

#: Amounts by the resource's name: bytes, CPUs or devices.
Amounts = dict[str, float]


def placements(profile: Profile) -> dict[str, Placement]:
    """What each stage with pods of its own asks for."""
    return {name: profile.asked(name) for name, stage in STAGES.items() if not stage.pod_of}


def asked_by(placement: Placement) -> Amounts:
    """What all pods of the placement ask for together."""
    return {name: placement.nodes * parse_quantity(amount) for name, amount in placement.resources.items()}


def at_once(stages: Mapping[str, Placement]) -> Amounts:
    """The most that one main job asks for at a time: of each resource what the largest stage does, and beside it the
    largest of those that are no process group, as the export runs beside the benchmark."""
    grouped = {name for name in stages if STAGES[name].distributed or STAGES[name].trains_alone}
    largest = most(stages.values())
    beside = most(placement for name, placement in stages.items() if name not in grouped)
    if not grouped:
        return largest
    return {name: amount + beside.get(name, 0.0) for name, amount in largest.items()}


def most(asking: Iterable[Placement]) -> Amounts:
    """Of each resource the most that one of the placements asks for."""
    found: Amounts = {}
    for placement in asking:
        for name, amount in asked_by(placement).items():
            found[name] = max(amount, found.get(name, 0.0))
    return found


def quantity(name: str, amount: float) -> str:
    """An amount as Kubernetes writes it, rounded up: whole GiB or MiB, thousandths of a CPU, devices."""
    if not amount:
        return "0"
    if name in ("memory", "ephemeral-storage") or name.startswith("hugepages-"):
        return f"{amount / GIB:.0f}Gi" if amount % GIB == 0 else f"{math.ceil(amount / MIB)}Mi"
    return f"{amount:.0f}" if amount == int(amount) else f"{math.ceil(amount * 1000)}m"


def tolerates(placement: Placement, taint: Mapping[str, object]) -> bool:
    """Whether a pod of the placement may run beside the taint; one that only prefers others keeps nobody away."""
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


def cloud_of(profile: Profile) -> str:
    """Whose nodes the profile speaks of, "" if they may be anyone's."""
    for placement in placements(profile).values():
        if placement.cloud:
            return placement.cloud
        if kind := placement.node_selector.get(TYPE_LABEL, ""):
            return "aws" if "." in kind else "azure" if kind.startswith(AZURE_TYPE) else "gcp"
    return ""
