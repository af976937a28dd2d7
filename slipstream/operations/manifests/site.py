"""Target of the manifests: a profile, its cloud, and the cluster's own names."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.shared.errors import UserError
from slipstream.shared.profiles.needs import pod_placements, profile_cloud
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import Profile

PRODUCTION, RESEARCH = "production", "research"
#: Flyte domain whose namespace a queue uses, by queue.
DOMAINS = {PRODUCTION: "production", RESEARCH: "development"}


@dataclass(frozen=True)
class ClusterSite:
    """Cluster that manifests are made for."""

    profile: Profile
    #: Cloud that creates nodes on demand: "aws", "gcp" or "azure"; "" for existing nodes.
    cloud: str
    #: Flyte's project; namespaces are PROJECT-DOMAIN.
    project: str
    #: Name of the EKS cluster, by which Karpenter finds networks and role.
    cluster: str

    @property
    def stages(self) -> dict[str, Placement]:
        return pod_placements(self.profile)

    @property
    def gpus(self) -> dict[str, Placement]:
        return {name: placement for name, placement in self.stages.items() if int(placement.gpu)}

    @property
    def nvidia(self) -> bool:
        return any(placement.gpu_name.startswith("nvidia.com/") for placement in self.gpus.values())

    def namespace(self, queue: str) -> str:
        return f"{self.project}-{DOMAINS[queue]}"


def profile_site(profile: Profile, project: str, cluster: str) -> ClusterSite:
    """Return the site of a profile.

    If the profile names no cloud, NVIDIA's GPUs are assumed to be on AWS, where Karpenter creates their nodes. Raises
    ``UserError`` if no stage requests a GPU.
    """
    site = ClusterSite(profile, profile_cloud(profile), project, cluster)
    if not site.gpus:
        raise UserError(
            f"profile {profile.name}: no stage asks for a GPU; expected a profile with profile.gpu, such as a100-spot"
        )
    return ClusterSite(profile, "aws", project, cluster) if site.nvidia and not site.cloud else site
