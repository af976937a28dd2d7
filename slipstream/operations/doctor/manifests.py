"""Checks of manifests beyond schemas: conflicts with the profile, and settings with known surprises.

Manifests may come from anywhere. Missing or malformed parts are skipped, as Kubernetes' schemas report them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from slipstream.operations.doctor.archive import parse_kubernetes_quantity
from slipstream.operations.doctor.findings import DoctorReport, Finding
from slipstream.operations.doctor.objects import KubernetesManifest, check_autoscaler, check_scaled_object, mappings_in
from slipstream.shared.profiles.needs import NOTICE_S, asked_by, pod_placements, profile_cloud, tolerates_taint
from slipstream.shared.profiles.needs import format_quantity as written
from slipstream.shared.profiles.placement import TYPE_LABEL, Placement
from slipstream.shared.profiles.profile import Profile
from slipstream.shared.stages import DISTRIBUTED
from slipstream.shared.telemetry.prices import built_in_prices

CAPACITY_LABEL = "karpenter.sh/capacity-type"
#: Path of a NodePool's node template, and paths of the taints of nodes by kind.
NODE = ("spec", "template", "spec")
TAINTS = {"NodePool": (*NODE, "taints"), "ResourceFlavor": ("spec", "nodeTaints")}
#: Suffixes of the namespaces of Flyte's default domains, in which the profile's pods run.
FLYTE_DOMAINS = ("-development", "-staging", "-production")
#: Prefixes of quota keys that may contain a slash.
COUNTING = ("requests.", "count/")


def check_manifests(manifests: Sequence[KubernetesManifest], profile: Profile) -> DoctorReport:
    """Compare manifests with a profile."""
    stages = pod_placements(profile)
    findings = list(check_taints(manifests, stages))
    for manifest in manifests:
        findings += check_quotas(manifest, stages)
        findings += check_consolidation(manifest)
        findings += check_scaled_object(manifest)
    served = {str(manifest.at("spec", "group")) for manifest in manifests if manifest.kind == "APIService"}
    findings += [finding for manifest in manifests for finding in check_autoscaler(manifest, served)]
    checked = f"taints, quotas, consolidation and scalers of {len(manifests)} objects against profile {profile.name}"
    report = DoctorReport(tuple(findings), (checked,))
    cloud = profile_cloud(profile) or ("aws" if any(is_amazons(manifest) for manifest in manifests) else "")
    if not cloud:
        return report + DoctorReport(
            unchecked=("grace periods against the notice: the cloud of these nodes is unknown",)
        )
    grace = [finding for manifest in manifests for finding in check_grace(manifest, NOTICE_S[cloud])]
    return report + DoctorReport(tuple(grace), (f"grace periods against a notice of {NOTICE_S[cloud]} s ({cloud})",))


def is_amazons(manifest: KubernetesManifest) -> bool:
    return manifest.kind == "NodePool" and manifest.at(*NODE, "nodeClassRef", "group") == "karpenter.k8s.aws"


# Taints


def check_taints(manifests: Sequence[KubernetesManifest], stages: Mapping[str, Placement]) -> Iterator[Finding]:
    """Yield findings on node groups whose taints keep out every pod of the profile.

    Findings are warnings if other nodes of the same kind accept the profile's pods.
    """
    bothering = {manifest: fewest_taints(manifest, stages) for manifest in manifests if manifest.kind in TAINTS}
    open_to_pods = {sort_of(manifest, stages) for manifest, taints in bothering.items() if not taints}
    for manifest, taints in bothering.items():
        others = sort_of(manifest, stages) in open_to_pods
        if taints:
            yield Finding(
                "warning" if others else "error",
                manifest.where,
                f"no pod of the profile tolerates its taint {', '.join(map(taint_text, taints))}",
                f"none is placed on these nodes{': others are left' if others else ', and all wait as Pending'}",
                "add the toleration to the profile, or take the taint out",
            )


def fewest_taints(manifest: KubernetesManifest, stages: Mapping[str, Placement]) -> list[Mapping[str, Any]]:
    """Return the fewest untolerated taints over the stages that may use such nodes."""
    taints = manifest.listed(*TAINTS[manifest.kind])
    wanted = [each for each in stages.values() if bool(int(each.gpu)) is has_gpus(manifest, stages)]
    if manifest.kind == "ResourceFlavor" or not wanted:
        wanted = list(stages.values())
    return min(([taint for taint in taints if not tolerates_taint(each, taint)] for each in wanted), key=len)


def sort_of(manifest: KubernetesManifest, stages: Mapping[str, Placement]) -> tuple[str, bool]:
    return manifest.kind, manifest.kind == "NodePool" and has_gpus(manifest, stages)


def texts(found: object) -> list[str]:
    return [str(each) for each in found] if isinstance(found, list) else []


def taint_text(taint: Mapping[str, Any]) -> str:
    value = f"={taint['value']}" if taint.get("value") else ""
    return f"{taint.get('key')}{value}:{taint.get('effect')}"


def has_gpus(pool: KubernetesManifest, stages: Mapping[str, Placement]) -> bool:
    """Return True if a pool's requirements or limits imply nodes with GPUs."""
    required = {str(each.get("key")): texts(each.get("values")) for each in pool.listed(*NODE, "requirements")}
    own = {placement.node_selector.get(TYPE_LABEL) for placement in stages.values() if int(placement.gpu)}
    types = set(required.get(TYPE_LABEL, []))
    return (
        any("gpu" in str(key) for key in (*required, *pool.mapping("spec", "limits")))
        or bool(types & own)
        or any(built_in_prices().instances[name].gpus for name in types if name in built_in_prices().instances)
    )


# Quotas


def check_quotas(manifest: KubernetesManifest, stages: Mapping[str, Placement]) -> Iterator[Finding]:
    groups = {name: stages[name] for name in DISTRIBUTED if name in stages}
    if manifest.kind == "ResourceQuota":
        yield from check_keys(manifest)
        if str(manifest.at("metadata", "namespace") or "").endswith(FLYTE_DOMAINS):
            hard = manifest.mapping("spec", "hard")
            yield from unmet_requests(manifest, [hard], ("requests.", "limits.", ""), stages, "its pods are refused")
    elif manifest.kind == "ClusterQueue":
        waits = "its job waits until it may borrow, possibly without end"
        yield from unmet_requests(manifest, flavours(manifest), ("",), groups, waits, missing="0")
    elif manifest.kind == "Queue":
        capability = manifest.mapping("spec", "capability")
        yield from unmet_requests(manifest, [capability], ("",), groups, "its pods wait as Pending")
    elif manifest.kind == "NodePool":
        wanted = has_gpus(manifest, stages)
        fitting = {name: each for name, each in stages.items() if bool(int(each.gpu)) is wanted}
        limits = manifest.mapping("spec", "limits")
        for finding in unmet_requests(manifest, [limits], ("",), fitting, "the pool makes no more nodes for its pods"):
            yield replace(finding, severity="warning")  # other pools may suffice


def flavours(queue: KubernetesManifest) -> list[dict[str, Any]]:
    """Return a queue's quotas by resource name, for every flavour."""
    return [
        {str(each.get("name")): each.get("nominalQuota") for each in mappings_in(flavour.get("resources"))}
        for group in queue.listed("spec", "resourceGroups")
        for flavour in mappings_in(group.get("flavors"))
    ]


def unmet_requests(
    manifest: KubernetesManifest,
    quotas: Sequence[Mapping[str, Any]],
    prefixes: Sequence[str],
    stages: Mapping[str, Placement],
    consequence: str,
    missing: str = "",
) -> Iterator[Finding]:
    """Yield a finding for the largest stage that fits into none of the ``quotas``.

    ``missing`` is the amount of a resource that a quota does not name; "" is unlimited.
    """
    for name in sorted(stages, key=lambda name: -max(asked_by(stages[name]).values())):
        short = [list(shortages(quota, prefixes, asked_by(stages[name]), missing)) for quota in quotas]
        if short and (least := min(short, key=len)):
            key, given, needed = least[0]
            yield Finding(
                "error",
                manifest.where,
                f"{key} {given} is below the {needed} that {name} asks for",
                consequence,
                f"raise it to {needed} or more, or ask for less in the profile",
            )
            return


def shortages(
    quota: Mapping[str, Any], prefixes: Sequence[str], asked: Mapping[str, float], missing: str
) -> Iterator[tuple[str, str, str]]:
    """Yield (key, given, needed) for every key below the request; devices first."""
    for name in sorted(asked, key=lambda name: "/" not in name):
        for prefix in prefixes:
            given = str(quota.get(f"{prefix}{name}", missing))
            amount = parse_kubernetes_quantity(given) if given else None
            if amount is not None and amount < asked[name]:
                yield f"{prefix}{name}", given, written(name, asked[name])


def check_keys(quota: KubernetesManifest) -> Iterator[Finding]:
    for key in map(str, quota.mapping("spec", "hard")):
        if "/" in key and not key.startswith(COUNTING) and ".storageclass." not in key:
            device = key.removeprefix("limits.")
            yield Finding(
                "error",
                quota.where,
                f"the key {key} does not start with requests.",
                "devices are counted by such keys only: this one limits nothing",
                f"call it requests.{device}",
            )


# Node disruption


def check_consolidation(manifest: KubernetesManifest) -> Iterator[Finding]:
    """Yield a finding if the pool may consolidate nodes that run pods.

    Karpenter ignores the policy for a fixed number of nodes.
    """
    policy = manifest.at("spec", "disruption", "consolidationPolicy")
    if manifest.kind == "NodePool" and policy != "WhenEmpty" and manifest.at("spec", "replicas") is None:
        yield Finding(
            "error",
            manifest.where,
            f"consolidationPolicy is {policy or 'not set, and WhenEmptyOrUnderutilized by default'}",
            "pods are moved to fuller nodes, which ends an attempt of every training there",
            "set it to WhenEmpty",
        )


def check_grace(manifest: KubernetesManifest, notice_s: int) -> Iterator[Finding]:
    if manifest.kind == "NodePool":
        key, grace = "terminationGracePeriod", parse_duration(manifest.at(*NODE, "terminationGracePeriod"))
        spot = "spot" in capacities(manifest)
    else:
        pod = pod_of(manifest)
        key, grace = "terminationGracePeriodSeconds", parse_duration(pod.get("terminationGracePeriodSeconds"))
        selector = pod.get("nodeSelector")
        spot = not isinstance(selector, Mapping) or selector.get(CAPACITY_LABEL) != "on-demand"
    if spot and grace > notice_s:
        yield Finding(
            "error",
            manifest.where,
            f"{key} {grace:g} s is longer than the {notice_s} s from a spot machine's notice to its end",
            "work of a pod after that time is lost, such as saving a checkpoint",
            f"set it to {notice_s} s or less, or keep it off spot capacity",
        )


def capacities(pool: KubernetesManifest) -> Iterable[str]:
    """Return the capacity types that a pool may use; on demand by default."""
    for each in pool.listed(*NODE, "requirements"):
        if each.get("key") == CAPACITY_LABEL and each.get("operator") == "In":
            return texts(each.get("values"))
    return ["on-demand"]


def pod_of(manifest: KubernetesManifest) -> Mapping[str, Any]:
    """Return the pod spec of an object; {} without one."""
    if manifest.kind == "Pod":
        return manifest.mapping("spec")
    if manifest.kind == "PodTemplate":
        return manifest.mapping("template", "spec")
    return manifest.mapping("spec", "template", "spec")


def parse_duration(value: object) -> float:
    """Return seconds from 30, "90s", "5m" or "1h30m"; 0 if invalid."""
    if isinstance(value, int):
        return float(f"{value:d}")  # infinity if it is too large
    total, number = 0.0, ""
    for character in value if isinstance(value, str) else "":
        if character.isdecimal():
            number += character
        else:
            total += float(number or 0) * {"h": 3600, "m": 60, "s": 1}.get(character, 0)
            number = ""
    return total
