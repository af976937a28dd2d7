"""What manifests are written for: a profile, whose nodes, and the names that a cluster has of its own."""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import UserError
from slipstream.profiles.needs import cloud_of, placements
from slipstream.profiles.placement import Placement
from slipstream.profiles.profile import Profile

PRODUCTION, RESEARCH = "production", "research"
#: Flyte's domain whose namespace each of the two works in.
DOMAINS = {PRODUCTION: "production", RESEARCH: "development"}


@dataclass(frozen=True)
class Site:
    profile: Profile
    #: "aws", "gcp", "azure"; "" for nodes that nobody makes on demand.
    cloud: str
    #: Flyte's project, whose namespaces are PROJECT-DOMAIN.
    project: str
    #: What the EKS cluster is called: by it Karpenter finds networks and role.
    cluster: str

    @property
    def stages(self) -> dict[str, Placement]:
        return placements(self.profile)

    @property
    def gpus(self) -> dict[str, Placement]:
        """The stages that ask for GPUs."""
        return {name: placement for name, placement in self.stages.items() if int(placement.gpu)}

    @property
    def nvidia(self) -> bool:
        return any(placement.gpu_name.startswith("nvidia.com/") for placement in self.gpus.values())

    def namespace(self, queue: str) -> str:
        return f"{self.project}-{DOMAINS[queue]}"


def site_of(profile: Profile, project: str, cluster: str) -> Site:
    """Raises ``UserError`` if no stage of the profile asks for a GPU. NVIDIA's GPUs that may be anyone's are taken to
    be Amazon's, where Karpenter makes nodes for them."""
    site = Site(profile, cloud_of(profile), project, cluster)
    if not site.gpus:
        raise UserError(
            f"profile {profile.name}: no stage asks for a GPU; expected a profile with profile.gpu, such as a100-spot"
        )
    return Site(profile, "aws", project, cluster) if site.nvidia and not site.cloud else site
