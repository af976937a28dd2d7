"""Priorities and quotas: priority classes, and queues of Kueue or Volcano."""

from __future__ import annotations

from slipstream.operations.manifests.documents import KubernetesObject, ManifestFile, Tree, kubernetes_object
from slipstream.operations.manifests.pools import ON_DEMAND, SPOT, NodePool, node_pools
from slipstream.operations.manifests.site import DOMAINS, PRODUCTION, RESEARCH, ClusterSite
from slipstream.shared.profiles.needs import at_once, format_quantity

VOLCANO = "volcano"
COHORT = "slipstream"
#: Name of the LocalQueue in both namespaces, which executions state in a label.
QUEUE = "slipstream"
KUEUE_API = "kueue.x-k8s.io/v1beta2"
KUEUE_WHY = (
    "Kueue admits a job when there is quota for all of its pods. Its configuration must enable the integration "
    "kubeflow.org/pytorchjob, and waitForPodsReady; otherwise two jobs can each hold half of the nodes."
)
PRIORITIES = {PRODUCTION: 100_000, RESEARCH: 10_000}
#: PriorityClass of serving, which is above all training, as callers wait for answers.
SERVING, SERVING_PRIORITY = "slipstream-serving", 200_000


def queue_name(queue: str) -> str:
    return f"slipstream-{queue}"


# Priorities


def priority_classes_file(serve: bool) -> ManifestFile:
    classes = [
        priority(queue_name(PRODUCTION), PRIORITIES[PRODUCTION], "Trainings and scoring that production waits for."),
        priority(queue_name(RESEARCH), PRIORITIES[RESEARCH], "Trials: they wait for capacity and preempt no pod."),
    ]
    classes += [priority(SERVING, SERVING_PRIORITY, "Served models.")] if serve else []
    return ManifestFile("20-priorities.yaml", "PriorityClasses, for `priority` of a profile", tuple(classes))


def priority(name: str, value: int, text: str) -> KubernetesObject:
    policy = "Never" if name == queue_name(RESEARCH) else "PreemptLowerPriority"
    tree = kubernetes_object(
        *("scheduling.k8s.io/v1", "PriorityClass", name),
        value=value,
        globalDefault=False,
        preemptionPolicy=policy,
        description=text,
    )
    return KubernetesObject(text, tree)


# Queues


def queue_files(site: ClusterSite) -> list[ManifestFile]:
    """Return the files of Kueue's queues, or of Volcano's if the profile names that scheduler.

    With Kueue's queues, Volcano's are in a folder, as an alternative.
    """
    if any(placement.scheduler == VOLCANO for placement in site.stages.values()):
        return [ManifestFile("30-volcano.yaml", "queues for research and production (needs Volcano)", volcano(site))]
    return [
        ManifestFile("30-kueue.yaml", "queues for research and production (needs Kueue)", kueue(site), KUEUE_WHY),
        ManifestFile("instead-of-kueue/volcano.yaml", "the same for clusters with Volcano instead", volcano(site)),
    ]


def kueue(site: ClusterSite) -> tuple[KubernetesObject, ...]:
    # CPU pools first: a pod with a GPU has no quota there and gets the next flavour.
    flavours = sorted(node_pools(site), key=lambda pool: pool.has_gpus)
    documents = [flavour(site, pool) for pool in flavours]
    for queue in (PRODUCTION, RESEARCH):
        documents += [workload_priority(queue), cluster_queue(site, queue, flavours), local_queue(site, queue)]
    return tuple(documents)


def flavour(site: ClusterSite, pool: NodePool) -> KubernetesObject:
    labels = {"karpenter.sh/nodepool": pool.name} if site.cloud == "aws" else dict(pool.placement.node_selector)
    spec: Tree = {"nodeLabels": labels} if labels else {}
    spec |= {"nodeTaints": pool.taints} if pool.taints else {}
    text = (
        f"Nodes for {', '.join(pool.stages)}: Kueue adds the labels to the node selector of the pods that it admits "
        "there."
    )
    return KubernetesObject(text, kubernetes_object(KUEUE_API, "ResourceFlavor", pool.name, spec=spec))


def workload_priority(queue: str) -> KubernetesObject:
    text = f"Priority of a job among those waiting in {queue}, set by its label kueue.x-k8s.io/priority-class."
    tree = kubernetes_object(
        KUEUE_API, "WorkloadPriorityClass", queue_name(queue), value=PRIORITIES[queue], description=text
    )
    return KubernetesObject(text, tree)


def cluster_queue(site: ClusterSite, queue: str, flavours: list[NodePool]) -> KubernetesObject:
    covered = list(at_once(site.stages))
    text = "Resources that one main job needs at a time"
    if queue == PRODUCTION:
        both = {SPOT, ON_DEMAND} <= {pool.capacity for pool in flavours}
        text += ", on spot and the same amount on demand" if both else ""
        text += ". Research may borrow idle resources and returns them as soon as a production job waits."
        preemption = {"withinClusterQueue": "LowerPriority", "reclaimWithinCohort": "Any"}
    else:
        text += "; on demand without those that run on spot. Jobs waiting here preempt no pod."
        preemption = {"withinClusterQueue": "Never", "reclaimWithinCohort": "Never"}
    spec = {
        "cohortName": COHORT,
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": site.namespace(queue)}},
        "queueingStrategy": "BestEffortFIFO",
        "preemption": preemption,
        "resourceGroups": [
            {
                "coveredResources": covered,
                "flavors": [{"name": pool.name, "resources": quotas(pool, queue, covered)} for pool in flavours],
            }
        ],
    }
    text += (
        " Pods that request a resource that is not covered are never admitted, so all resources of the profile are "
        "covered."
    )
    return KubernetesObject(text, kubernetes_object(KUEUE_API, "ClusterQueue", queue_name(queue), spec=spec))


def quotas(pool: NodePool, queue: str, covered: list[str]) -> list[Tree]:
    stages = pool.stages
    if queue == RESEARCH and pool.capacity == ON_DEMAND:
        stages = {name: placement for name, placement in stages.items() if not placement.interruptible}
    needs = at_once(stages)
    return [{"name": name, "nominalQuota": format_quantity(name, needs.get(name, 0.0))} for name in covered]


def local_queue(site: ClusterSite, queue: str) -> KubernetesObject:
    text = f"pyflyte run --remote --labels kueue.x-k8s.io/queue-name={QUEUE} …, in Flyte's domain {DOMAINS[queue]}."
    spec = {"clusterQueue": queue_name(queue)}
    return KubernetesObject(text, kubernetes_object(KUEUE_API, "LocalQueue", QUEUE, site.namespace(queue), spec=spec))


def volcano(site: ClusterSite) -> tuple[KubernetesObject, ...]:
    needs = at_once(site.stages)
    both = {name: format_quantity(name, len(DOMAINS) * amount) for name, amount in needs.items()}
    one = {name: format_quantity(name, amount) for name, amount in needs.items()}
    text = (
        "Flyte cannot name the queue of a PyTorchJob: Volcano uses the queue in the annotation of the namespace "
        "(00-namespaces.yaml). "
    )
    documents = []
    for queue, weight in ((PRODUCTION, 4), (RESEARCH, 1)):
        spec = {"weight": weight, "reclaimable": queue == RESEARCH, "deserved": one, "capability": both}
        also = (
            "Borrowed resources are not reclaimed."
            if queue == PRODUCTION
            else "Production reclaims the resources that it lent."
        )
        documents.append(
            KubernetesObject(
                text + also, kubernetes_object("scheduling.volcano.sh/v1beta1", "Queue", queue_name(queue), spec=spec)
            )
        )
    return tuple(documents)
