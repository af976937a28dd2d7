"""Manifests of the shipped profiles, as trees."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from slipstream.operations.manifests.build import ManifestFile, build_manifests
from slipstream.operations.manifests.site import ClusterSite, profile_site
from slipstream.operations.manifests.triton import TritonService
from slipstream.shared.profiles.profile import load_profile, parse_profile

#: All that have GPUs.
PROFILES = ("a100-mig", "a100-spot", "h100-efa-spot", "l4-spot", "mi300x", "t4-shared")
MODELS = "s3://bucket/triton"


@cache
def files(profile: str, keda: bool = False, cluster: str = "mine") -> tuple[ManifestFile, ...]:
    """With a model in service."""
    return tuple(build_manifests(profile_site(load_profile(profile), "churn", cluster), TritonService(MODELS, keda)))


def objects(profile: str, keda: bool = False) -> list[dict[str, Any]]:
    """All but the values of a chart, which are no object."""
    return [tree for file in files(profile, keda) if not file.path.startswith("helm/") for tree in trees(file)]


def trees(file: ManifestFile) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load_all(file.text)


def named(profile: str, kind: str, name: str = "", keda: bool = False) -> dict[str, Any]:
    """The object of this kind and name; the only one of its kind if none is given."""
    found = [
        each
        for each in objects(profile, keda)
        if each["kind"] == kind and (not name or each["metadata"]["name"] == name)
    ]
    (tree,) = found
    return tree


#: Eight whole GPUs, as a placement.
GPUS = {"processes": 8, "gpu": "8", "cpu": "88", "memory": "1000Gi", "accelerator": "nvidia-a100-80gb"}


def site(**distributed: Any) -> ClusterSite:
    """Of a profile whose process groups ask for ``GPUS``, and for these."""
    return profile_site(parse_profile("mine", {"distributed": {**GPUS, **distributed}}), "churn", "mine")


def of_kind(site: ClusterSite, kind: str) -> list[dict[str, Any]]:
    found = [tree for file in build_manifests(site, None) for tree in trees(file)]
    return [tree for tree in found if tree.get("kind") == kind]


def requirement(pool: dict[str, Any], key: str) -> list[str]:
    """What a NodePool requires of this label."""
    (found,) = [each for each in pool["spec"]["template"]["spec"]["requirements"] if each["key"] == key]
    values: list[str] = found["values"]
    return values
