"""What machines on EKS are like: Karpenter's EC2NodeClass, an object for each kind of pool."""

from __future__ import annotations

import math
from collections.abc import Iterator

from slipstream.machine.limits import parse_quantity
from slipstream.manifests.documents import Document, Tree, kube, text_of
from slipstream.manifests.pools import Pool
from slipstream.manifests.site import Site
from slipstream.profiles.needs import GIB, MIB

GROUP = "karpenter.k8s.aws"
#: GiB of a node's disk besides what pods ask for: the images.
IMAGES_GIB = 60
BOUNDARY = "==slipstream=="


def class_name(pool: Pool) -> str:
    return f"slipstream-{pool.kind}"


def classes(site: Site, made: list[Pool]) -> Iterator[Document]:
    """One for each kind of pool, whatever its capacity."""
    for pool in {pool.kind: pool for pool in made}.values():
        yield node_class(site, pool)


def node_class(site: Site, pool: Pool) -> Document:
    disk = max(parse_quantity(placement.resources["ephemeral-storage"]) for placement in pool.stages.values())
    found = [{"tags": {"karpenter.sh/discovery": site.cluster}}]
    spec: Tree = {
        "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "role": f"KarpenterNodeRole-{site.cluster}",
        "subnetSelectorTerms": found,
        "securityGroupSelectorTerms": found,
        "metadataOptions": {"httpEndpoint": "enabled", "httpTokens": "required", "httpPutResponseHopLimit": 2},
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
    placement = pool.placement
    spec |= {"networkInterfaces": interfaces(pool.pods_per_node * placement.efa)} if placement.efa else {}
    data = user_data(pool)
    spec |= {"userData": data} if data else {}
    text = (
        f"Machines of the pools {class_name(pool)}-*. Karpenter finds subnets, security groups and role by the name of "
        f"the cluster, {site.cluster}. Pods ask the metadata server for notices through one more hop than the node. "
        "Local disks of the machine are one volume for pods, where it has any. "
    )
    if placement.efa:
        text += "A network interface for each Elastic Fabric Adapter; the EFA device plugin hands them to pods. "
    if placement.numa:
        text += "CPUs are given to one pod alone, near its devices if they fit there. "
    if placement.hugepages:
        text += "Pages of 2 MiB are set aside before the kubelet counts them. "
    return Document(text, kube(f"{GROUP}/v1", "EC2NodeClass", class_name(pool), spec=spec))


def interfaces(adapters: int) -> list[Tree]:
    first = {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    return [
        first,
        *({"networkCardIndex": n, "deviceIndex": 1, "interfaceType": "efa-only"} for n in range(adapters)),
    ]


def user_data(pool: Pool) -> str:
    """What the machine does at its start: a script for pages, and the kubelet's settings; "" if there is nothing."""
    placement, parts = pool.placement, []
    if placement.hugepages:
        pages = math.ceil(pool.pods_per_node * parse_quantity(placement.hugepages) / (2 * MIB))
        parts.append(("text/x-shellscript", f"#!/bin/bash\nsysctl -w vm.nr_hugepages={pages}\n"))
    if placement.numa:
        policies = {"cpuManagerPolicy": "static", "topologyManagerPolicy": "best-effort"}
        config: Tree = {"apiVersion": "node.eks.aws/v1alpha1", "kind": "NodeConfig"}
        config["spec"] = {"kubelet": {"config": policies}}
        parts.append(("application/node.eks.aws", text_of(config)))
    if not parts:
        return ""
    mime = "".join(f"--{BOUNDARY}\nContent-Type: {kind}\n\n{text}\n" for kind, text in parts)
    head = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{BOUNDARY}"\n\n'
    return f"{head}{mime}--{BOUNDARY}--\n"
