"""Command ``slipstream manifests``: writes the objects that a profile needs in a cluster besides Flyte."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from slipstream.operations.manifests.build import MARK, ManifestFile, build_manifests
from slipstream.operations.manifests.karpenter import static_pools
from slipstream.operations.manifests.pools import SHARES, VALUES, node_pools
from slipstream.operations.manifests.site import ClusterSite, profile_site
from slipstream.operations.manifests.triton import IMAGE, PROMETHEUS, UNPLANNED, TritonService, needs_keda, read_plan
from slipstream.shared.artifacts.workspaces import temporary_workspace
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import aligned_table
from slipstream.shared.profiles.needs import ON_DEMAND_ENTRY, ON_DEMAND_ONLY, about_spot, profile_cloud
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.storage.local import writing_to

NODES = {"aws": "EKS", "gcp": "GKE", "azure": "AKS", "": "existing nodes"}
#: Allowed names: of a namespace, with room for Flyte's domain; of an EKS cluster, with room for the role's prefix.
PROJECT = re.compile(r"[a-z0-9]([a-z0-9-]{0,48}[a-z0-9])?")
CLUSTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,45}")


@click.command()
@click.argument("profile")
@click.option(
    "--out", required=True, type=click.Path(path_type=Path), help="Output directory, written completely or not at all."
)
@click.option("--project", default="flytesnacks", show_default=True, help="Flyte project whose namespaces are used.")
@click.option("--cluster", default="slipstream", show_default=True, help="Name of the EKS cluster.")
@click.option("--serve", is_flag=True, help="Also write the manifests of a Triton server.")
@click.option(
    "--models",
    default="s3://slipstream-models/triton",
    show_default=True,
    help="Triton's model repository (with --serve).",
)
@click.option("--keda", is_flag=True, help="Scale by Triton's queue (KEDA) instead of CPU use (HPA); requires --serve.")
@click.option("--plan", type=click.Path(path_type=Path), help="JSON of slipstream plan serve; requires --serve.")
def main(  # noqa: PLR0913 - an argument for each option
    profile: str, out: Path, project: str, cluster: str, serve: bool, models: str, keda: bool, plan: Path | None
) -> None:
    """Write manifests for PROFILE (a name or the path of a .toml): nodes, queues, quotas, the GPU operator.

    Example: slipstream manifests a100-spot --out manifests --serve
    """
    if not PROJECT.fullmatch(project):
        raise UserError(
            f"--project: {project!r} is not allowed; expected lower-case letters, digits and '-', at most 50"
        )
    if not CLUSTER.fullmatch(cluster):
        raise UserError(f"--cluster: {cluster!r} is not allowed; expected letters, digits, '-' and '_', at most 46")
    for option, given in (("--keda", keda), ("--plan", plan)):
        if given and not serve:
            raise UserError(f"{option}: applies to a served model only; expected --serve with it")
    site = profile_site(load_profile(profile), project, cluster)
    serving = TritonService(models, keda, read_plan(plan) if plan else UNPLANNED) if serve else None
    files = build_manifests(site, serving)
    write_manifests(files, out)
    click.echo(said(site, files, out))
    click.echo("\n".join([*assumed(site, serving), *left_out(site), *next_steps(site, profile, files, out)]))


def said(site: ClusterSite, files: Sequence[ManifestFile], out: Path) -> str:
    rows = [[file.path, file.purpose] for file in files]
    return f"{out}, for {site.profile.name} on {NODES[site.cloud]}:\n" + aligned_table(
        ("file", "purpose"), rows, left=("file", "purpose")
    )


def assumed(site: ClusterSite, serving: TritonService | None) -> Iterator[str]:
    """Yield the assumptions that neither the profile nor the user stated."""
    yield f"assumed: Flyte's project {site.project} (--project), its domains development and production"
    if site.cloud == "aws":
        why = "" if profile_cloud(site.profile) else "Amazon's nodes, as the profile names no cloud; "
        yield f"assumed: {why}the cluster's name {site.cluster} (--cluster)"
    if any(pool.has_gpus and not pool.instance_types for pool in node_pools(site) if site.cloud == "aws"):
        yield "assumed: any instance type with such GPUs, as the profile does not name the GPU"
    if any(placement.shared_gpu for placement in site.gpus.values()):
        yield f"assumed: {SHARES} pods share a GPU"
    if serving:
        server = f", Prometheus at {PROMETHEUS}" if needs_keda(site, serving) else ""
        yield f"assumed: models at {serving.models} (--models), the image {IMAGE}{server}"
        requests = serving.resources(placement := site.profile.asked("export"))
        if not serving.plan.threads and not int(placement.gpu):
            yield f"assumed: 1 thread per model (export.threads), so {requests['cpu']} CPUs per replica"
        if serving.plan.instance and not (serving.plan.cpus and serving.plan.memory_gib):
            yield (
                f"assumed: {serving.plan.instance}, whose size is not known, has more than {requests['cpu']} CPUs and "
                f"{requests['memory']}, the requests of a replica"
            )
        if not serving.fit(serving.plan.of_each, placement):
            yield (
                f"not as planned: {serving.plan.instance} holds fewer than {serving.plan.of_each} replicas with "
                f"{requests['cpu']} CPUs and {requests['memory']}, so more instances are paid for"
            )
        if serving.plan == UNPLANNED:
            target = (
                f"a queue of {serving.queue_ratio} s per s of computing" if needs_keda(site, serving) else "70 % CPU"
            )
            yield f"assumed: {UNPLANNED.least} to {UNPLANNED.most} replicas on any instance, {target} (--plan)"


def left_out(site: ClusterSite) -> Iterator[str]:
    if site.cloud != "aws":
        yield "not included: node pools, which are written for Karpenter on EKS only"
    if any("nodeAffinity" in placement.affinity for placement in site.stages.values()):
        yield "not included: the node affinity of the profile; add its labels or requirements to the pools"
    if any(placement.efa for placement in site.stages.values()):
        yield "not included: AWS's device plugin for Elastic Fabric Adapters (the chart aws-efa-k8s-device-plugin)"
    if named := sorted({name for placement in site.stages.values() for name in placement.rdma}):
        yield f"not included: the device plugin for {', '.join(named)}"
    if not site.nvidia:
        yield "not included: the GPU operator and its settings, as these GPUs are not NVIDIA's"
    elif site.cloud == "gcp":
        yield "not included: the GPU operator and its settings, as GKE brings driver, device plugin and DCGM itself"


def next_steps(site: ClusterSite, profile: str, files: Sequence[ManifestFile], out: Path) -> Iterator[str]:
    where = shlex.quote(str(out))
    yield f"check: slipstream doctor {where} --profile {shlex.quote(profile)}"
    yield f"apply: kubectl apply -f {where}"
    if any(file.path == VALUES for file in files):
        yield (
            "then: helm upgrade --install gpu-operator nvidia/gpu-operator --namespace gpu-operator "
            f"--values {shlex.quote(str(out / VALUES))}"
        )
    if waits := [place.timeout_minutes for place in site.stages.values() if place.nodes > 1]:
        yield (
            f"set: plugins.kf-operator.timeout of propeller to {max(waits)}m or more, as a job that waits longer for a "
            "quota or in Volcano's queue ends its execution (docs/cluster.md)"
        )
    yield from on_demand_entries(site)
    for pool in static_pools(site):
        yield (
            f"for nodes: kubectl scale nodepool {pool.name} --replicas={pool.placement.nodes}, as Karpenter does not "
            f"create nodes for {', '.join(pool.uncounted)}"
        )


def on_demand_entries(site: ClusterSite) -> Iterator[str]:
    """Yield propeller's entries with which pods that are not interruptible run on demand."""
    spot = [placement for placement in site.stages.values() if placement.interruptible]
    selectors = {k: v for placement in spot for k, v in placement.node_selector.items() if about_spot(k, v)}
    so_that = "so that --interruptible false and Flyte's last attempt run on demand (docs/profiles.md)"
    if selectors:
        yield (
            f"set: plugins.k8s.interruptible-node-selector of propeller to {json.dumps(selectors)} instead of the "
            f"profile's node_selector, and interruptible-tolerations to its tolerations, {so_that}"
        )
    elif spot and site.cloud:
        requirement = json.dumps(ON_DEMAND_ONLY[site.cloud])
        yield f"set: plugins.{ON_DEMAND_ENTRY} of propeller to {requirement}, {so_that}"


def write_manifests(files: Sequence[ManifestFile], out: Path) -> None:
    """Write the files to the directory ``out`` in place of an earlier call's files.

    Raises ``UserError`` if it holds other files, or cannot be written.
    """
    refuse_others(out)
    out = out.absolute() if not out.is_symlink() else out.resolve()
    with writing_to(out), temporary_workspace(out.parent) as scratch:
        whole = scratch / "new"
        for file in files:
            path = whole / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
        exchange_directories(whole, out, scratch / "old")


def exchange_directories(whole: Path, out: Path, old: Path) -> None:
    """Rename ``out``, if present, to ``old``, and ``whole`` to ``out``."""
    had = out.exists()
    if had:
        out.rename(old)
    try:
        whole.rename(out)
    except OSError:
        if had:
            old.rename(out)
        raise


def refuse_others(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is not a directory; choose another name")
    if Path.cwd().is_relative_to(out.resolve()):
        raise UserError(
            f"--out {out}: holds the working directory, and would be replaced; choose a directory below or next to it"
        )
    for parent, _, names in os.walk(out):
        for name in sorted(names):
            if not is_own(path := Path(parent, name)):
                raise UserError(
                    f"--out {out}: {path.relative_to(out)} was not written by slipstream manifests; choose another "
                    "directory, as its files are replaced"
                )


def is_own(path: Path) -> bool:
    if path.is_symlink() or not path.is_file():
        return False
    with writing_to(path), path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()
