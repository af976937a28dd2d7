"""Machines on EKS: Karpenter's EC2NodeClass, one object per kind of pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slipstream.operations.manifests.documents import KubernetesObject, Tree, kubernetes_object, yaml_text
from slipstream.operations.manifests.pools import NodePool
from slipstream.operations.manifests.site import ClusterSite
from slipstream.shared.machine.limits import parse_quantity
from slipstream.shared.profiles.needs import GIB, MIB

GROUP = "karpenter.k8s.aws"
#: GiB of a node's disk for images, besides the pods' requests.
IMAGES_GIB = 60
BOUNDARY = "==slipstream=="


def class_name(pool: NodePool) -> str:
    return f"slipstream-{pool.kind}"


def node_classes(site: ClusterSite, made: list[NodePool]) -> Iterator[KubernetesObject]:
    """Yield an EC2NodeClass for every kind of pool; spot and on-demand pools share it."""
    for pool in {pool.kind: pool for pool in made}.values():
        yield node_class(site, pool)


def node_class(site: ClusterSite, pool: NodePool) -> KubernetesObject:
    disk = max(parse_quantity(placement.resources["ephemeral-storage"]) for placement in pool.stages.values())
    notices = any(placement.notices in ("auto", "aws") for placement in pool.stages.values())
    found = [{"tags": {"karpenter.sh/discovery": site.cluster}}]
    spec: Tree = {
        "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "role": f"KarpenterNodeRole-{site.cluster}",
        "subnetSelectorTerms": found,
        "securityGroupSelectorTerms": found,
        "metadataOptions": {
            "httpEndpoint": "enabled",
            "httpTokens": "required",
            "httpPutResponseHopLimit": 1 + notices,
        },
        "instanceStorePolicy": "RAID0",
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/xvda",
                "rootVolume": True,
                "ebs": {
                    "volumeSize": f"{math.ceil(disk / GIB) + IMAGES_GIB}Gi",
                    "volumeType": "gp3",
                    "encrypted": True,
                    "deleteOnTermination": True,
                },
            }
        ],
    }
    efa = max(placement.efa for placement in pool.stages.values())
    spec |= {"networkInterfaces": interfaces(pool.pods_per_node * efa)} if efa else {}
    data = user_data(pool)
    spec |= {"userData": data} if data else {}
    text = (
        f"Machines of the pools {class_name(pool)}-*. Karpenter finds subnets, security groups and role by the name "
        f"of the cluster, {site.cluster}. Local disks of the machine, if any, form one volume for pods. "
    )
    if notices:
        text += (
            "Pods read preemption notices from the metadata server, one hop further than the node; it also gives "
            "them the node's role, so grant that role few permissions. "
        )
    if efa:
        text += "A network interface for each Elastic Fabric Adapter; the EFA device plugin assigns them to pods. "
    if whole_cpus(pool):
        text += "CPUs are exclusive to one pod, on the NUMA node of its devices if possible. "
    if bytes_of_pages(pool):
        text += "Pages of 2 MiB are reserved before the kubelet counts them. "
    return KubernetesObject(text, kubernetes_object(f"{GROUP}/v1", "EC2NodeClass", class_name(pool), spec=spec))


def interfaces(adapters: int) -> list[Tree]:
    first = {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    return [
        first,
        *({"networkCardIndex": n, "deviceIndex": 1, "interfaceType": "efa-only"} for n in range(adapters)),
    ]


def bytes_of_pages(pool: NodePool) -> float:
    """Return the bytes of 2 MiB pages for all pods of a node."""
    return pool.pods_per_node * max(parse_quantity(each.hugepages or "0") for each in pool.stages.values())


def whole_cpus(pool: NodePool) -> bool:
    return any(placement.numa for placement in pool.stages.values())


def user_data(pool: NodePool) -> str:
    """Return a machine's user data: a script that reserves 2 MiB pages, and kubelet settings; "" without either."""
    parts = []
    if size := bytes_of_pages(pool):
        script = f"#!/bin/bash\nsysctl -w vm.nr_hugepages={math.ceil(size / (2 * MIB))}\n"
        parts.append(("text/x-shellscript", script))
    if whole_cpus(pool):
        policies = {"cpuManagerPolicy": "static", "topologyManagerPolicy": "best-effort"}
        config: Tree = {"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig"}
        config["spec"] = {"kubelet": {"config": policies}}
        parts.append(("application/node.eks.aws", yaml_text(config)))
    if not parts:
        return ""
    mime = "".join(f"--{BOUNDARY}\nContent-Type: {kind}\n\n{text}\n" for kind, text in parts)
    head = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{BOUNDARY}"\n\n'
    return f"{head}{mime}--{BOUNDARY}--\n"
