"""Model in service: values for Triton's Deployment and its autoscaler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.operations.manifests.pools import CAPACITY_LABEL, ON_DEMAND
from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.artifacts.records import from_tree
from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import GIB, NOTICE_S, about_spot, format_quantity, instance_cloud
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.settings import to_dict
from slipstream.shared.storage import read_below

IMAGE = "nvcr.io/nvidia/tritonserver:25.08-py3"
PROMETHEUS = "http://prometheus-operated.monitoring.svc:9090"
#: Maximum seconds from SIGTERM to SIGKILL; and seconds that a pod still answers until routing to it stops.
GRACE_S, DRAIN_S = 30, 5


#: Node label of the instance type.
INSTANCE_LABEL = "node.kubernetes.io/instance-type"
LARGEST_PLAN = 16 << 20
#: Least and largest planned utilisation that an autoscaler keeps.
LEAST_BUSY, MOST_BUSY = 0.01, 0.9
#: Threads of a model whose plan does not name them: the default of ``export.threads``.
THREADS = 1
#: CPUs of the server per thread of a model: assumed. Without this share, a busy replica uses 91 % of its request. As an
#: HPA adds replicas only above 1.1 times its target (Kubernetes' default), the target is at most 80 %.
SERVER_CPUS = 0.1
MOST_CPU = 0.8


@dataclass(frozen=True)
class PlannedService:
    """Section ``service`` of the JSON of ``slipstream plan serve``.

    ``least`` and ``most`` are replicas; ``busy`` is the utilisation of the most in their busiest minute.
    """

    REMEDY = "write it with slipstream plan serve --json"

    variant: str
    instance: str
    least: int
    most: int
    busy: float
    #: Threads of a call, size of the instance, and replicas on each; 0 if unknown.
    threads: int = 0
    cpus: int = 0
    memory_gib: float = 0.0
    of_each: int = 0


#: Replicas without a plan: two, so that losing one is harmless, and a utilisation of 70 %.
UNPLANNED = PlannedService("", "", 2, 8, 0.7)


@dataclass(frozen=True)
class TritonService:
    #: Address of Triton's model repository, as ``slipstream triton`` writes it.
    models: str
    #: True to scale by Triton's queue with KEDA, False to scale by the pods' CPU use.
    keda: bool
    plan: PlannedService = UNPLANNED

    @property
    def busy_percent(self) -> int:
        """Target of the replicas' utilisation."""
        return round(100 * min(max(self.plan.busy, LEAST_BUSY), MOST_BUSY))

    @property
    def cpu_percent(self) -> int:
        """Target of the pods' CPU use."""
        return min(self.busy_percent, round(100 * MOST_CPU))

    @property
    def queue_ratio(self) -> str:
        """Target of queue time per second of computing, as in a queue with constant computing times (M/D/1)."""
        busy = self.busy_percent / 100
        return f"{busy / (2 * (1 - busy)):.3g}"

    def resources(self, placement: Placement) -> dict[str, str]:
        """Return the requests of a replica on ``placement``; without a GPU, only the CPUs that one model uses."""
        if int(placement.gpu):
            return placement.resources
        cpus = (self.plan.threads or THREADS) * (1 + SERVER_CPUS)
        return placement.resources | {"cpu": format_quantity("cpu", cpus)}

    def fit(self, replicas: int, placement: Placement) -> bool:
        """Return False if the planned instance is known to be too small for the replicas."""
        requests, sizes = self.resources(placement), {"cpu": self.plan.cpus, "memory": self.plan.memory_gib * GIB}
        # The system's pods take a part of every node.
        return all(not size or replicas * parse_quantity(requests[name]) < size for name, size in sizes.items())


def read_plan(path: Path) -> PlannedService:
    """Read the planned service; raise ``UserError`` for anything else."""
    content = read_below(str(path.parent), path.name, LARGEST_PLAN)
    try:
        found = parse_json(content)["service"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--plan {path}: is not a serving plan; {PlannedService.REMEDY}") from None
    plan = from_tree(found, PlannedService, path)
    if not 1 <= plan.least <= plan.most or min(plan.busy, plan.threads, plan.cpus, plan.memory_gib, plan.of_each) < 0:
        raise UserError(
            f"--plan {path}: {plan.least} to {plan.most} replicas, {plan.busy:g} busy: is not possible; "
            f"{PlannedService.REMEDY}"
        )
    return plan


def needs_keda(site: ClusterSite, serving: TritonService) -> bool:
    """Return True if KEDA scales: on request, and for GPU pods, whose load does not show in CPU use."""
    return serving.keda or bool(int(site.profile.asked("export").gpu))


def check_instance(site: ClusterSite, serving: TritonService) -> None:
    """Raise ``UserError`` if the planned instance is another cloud's or too small."""
    plan, placement = serving.plan, site.profile.asked("export")
    if not plan.instance:
        return
    cloud = instance_cloud(plan.instance)
    if site.cloud not in ("", cloud):
        raise UserError(
            f"--plan: {plan.instance} is an instance of {cloud}, but profile {site.profile.name} is for {site.cloud}; "
            f"expected a plan with --instance of {site.cloud}, or a profile for {cloud}"
        )
    if not serving.fit(1, placement):
        requests = serving.resources(placement)
        raise UserError(
            f"--plan: {plan.instance} with {plan.cpus} CPUs and {plan.memory_gib:g}Gi is too small for a replica, "
            f"which requests {requests['cpu']} CPUs and {requests['memory']}; expected less in [stages.export] of "
            f"profile {site.profile.name}, or a plan with another --instance"
        )


def triton_values(site: ClusterSite, serving: TritonService) -> dict[str, Any]:
    """Return the values of the template ``60-triton.yaml``."""
    check_instance(site, serving)
    # Variants were timed on this placement, so the model card's figures hold for such pods.
    placement = site.profile.asked("export")
    grace = min(GRACE_S, NOTICE_S.get(site.cloud, GRACE_S))
    tolerated = [each for each in placement.tolerations if not about_spot(each.key, each.value)]
    return {
        "image": IMAGE,
        "prometheus": PROMETHEUS,
        "models": serving.models,
        "keda": needs_keda(site, serving),
        "grace_s": grace,
        "drain_s": DRAIN_S,
        "least": serving.plan.least,
        "most": serving.plan.most,
        "planned": serving.plan != UNPLANNED,
        "cpu_percent": serving.cpu_percent,
        "busy_percent": serving.busy_percent,
        "queue_ratio": serving.queue_ratio,
        "node_selector": node_selector(site, placement, serving.plan.instance),
        "tolerations": [{name: value for name, value in to_dict(each).items() if value} for each in tolerated],
        "resources": serving.resources(placement),
    }


def node_selector(site: ClusterSite, placement: Placement, instance: str) -> dict[str, str]:
    on_demand = {CAPACITY_LABEL: ON_DEMAND} if site.cloud == "aws" else {}
    own = {key: value for key, value in placement.node_selector.items() if not about_spot(key, value)}
    return own | on_demand | ({INSTANCE_LABEL: instance} if instance else {})
