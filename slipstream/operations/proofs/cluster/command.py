"""``slipstream cluster-proof``: announce the actions on the cluster, run them, and print the results."""

from __future__ import annotations

import secrets
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from slipstream.flyte.remote.backend import FlyteBackend
from slipstream.operations.doctor.cluster import check_operator, check_priorities, unschedulable
from slipstream.operations.doctor.kubectl import KubectlError, kubectl, list_objects
from slipstream.operations.proofs.cluster.kubernetes import Kubernetes
from slipstream.operations.proofs.cluster.proof import FILES, ROWS, TRAIN, ActResult, ClusterProof
from slipstream.operations.proofs.rehearsal.rehearsal import package_workflows
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import aligned_table
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import load_profile

#: Attempts at a training: undisturbed, three with a lost pod, one with two, and an aborted one with its recovery.
ATTEMPTS = 1 + 3 * 2 + 3 + 2
#: Minutes that an attempt takes on two CPUs, from its creation to its end.
MINUTES_OF_AN_ATTEMPT = 2
PLAN = f"""
  1  register the workflows, twice, and upload a table of {FILES} files of {ROWS:,} rows to Flyte's store
  2  run a main job twice; compare the prepared table with that of this machine
  3  train 4 times more: a pod of each is deleted, evicted, killed, or two are deleted in a row
  4  train once more, abort the execution and recover it
"""


@click.command()
@click.argument("profile")
@click.option("--image", required=True, help="The image that the cluster pulls.")
@click.option("--config", type=click.Path(path_type=Path, exists=True), default=Path("flyte.config.yaml"))
@click.option("--project", default="flytesnacks", show_default=True)
@click.option("--domain", default="development", show_default=True)
@click.option("--namespace", default="", help="Where Flyte runs its pods; PROJECT-DOMAIN if it is not given.")
@click.option("--minutes", default=30.0, show_default=True, help="The longest that one execution may take.")
@click.option("--price", default=0.0, help="Of an hour of one pod of the training, for the estimate.")
@click.option("--autoscaled", is_flag=True, help="Nodes are added as pods want them: don't look for room now.")
@click.option("--yes", is_flag=True, help="Don't ask before it begins.")
def main(profile: str, image: str, minutes: float, price: float, *, autoscaled: bool, yes: bool, **where: Any) -> None:
    """Test this project's promises about clusters on your own cluster, with PROFILE, and print which of them held.

    It prints first what it will do and what that costs, touches only executions of its own, and can be stopped at any
    time.

    Example: slipstream cluster-proof a100-spot --image registry.example/slipstream:v1
    """
    if not image:
        raise UserError(
            "IMAGE: is empty; expected an image that the cluster can pull, as in make cluster-proof IMAGE=…"
        )
    placement = load_profile(profile).placement("train")
    flyte, kubernetes = site(**where)
    context, version = kubernetes.context(), flyte.version()
    with tempfile.TemporaryDirectory(prefix="proof-") as directory:
        workdir = Path(directory)
        check_room(workdir, profile, kubernetes, autoscaled=autoscaled)
        say(f"cluster  {context}, namespace {kubernetes.namespace}")
        say(f"Flyte    {flyte.endpoint}, {version}, project {flyte.project}, domain {flyte.domain}")
        say(f"profile  {profile}, image {image}")
        say(PLAN)
        say(cost(placement, price))
        say("left behind: the registered version, the table and what the runs wrote, in Flyte's store")
        agreed(yes)
        signal.signal(signal.SIGTERM, interrupted)
        name = f"proof-{secrets.token_hex(3)}"
        rows = ClusterProof(name, flyte, kubernetes, image, profile, placement.nodes, say, minutes).run(workdir)
    say("")
    say(results_table(rows))
    sys.exit(int(not all(row.held for row in rows)))


def site(config: Path, project: str, domain: str, namespace: str) -> tuple[FlyteBackend, Kubernetes]:
    flyte = FlyteBackend(config, project, domain, "slipstream cluster-proof")
    return flyte, Kubernetes(namespace or f"{project}-{domain}", kubectl)


def check_room(workdir: Path, profile: str, kubernetes: Kubernetes, *, autoscaled: bool) -> None:
    """Raise ``UserError`` if the cluster cannot run what the profile asks for."""
    uses = package_workflows(workdir, load_profile(profile)).uses()
    training = [] if autoscaled else [use for use in uses if use.where == TRAIN]
    try:
        nodes = list_objects(kubernetes.ask, "nodes") if training else []
        findings = [
            *check_operator(uses, kubernetes.ask).findings,
            *check_priorities(uses, kubernetes.ask).findings,
            *(finding for use in training for finding in unschedulable(use, nodes)),
        ]
    except KubectlError as error:
        raise UserError(str(error)) from None
    wrong = [each for each in findings if each.severity == "error" or each.where == TRAIN]
    if wrong:
        first = wrong[0]
        raise UserError(f"profile {profile}: {first.where}: {first.what}: {first.consequence}; {first.fix}")


def cost(placement: Placement, price: float) -> str:
    """Return the estimated size and cost of the proof."""
    hours = ATTEMPTS * placement.nodes * MINUTES_OF_AN_ATTEMPT / 60
    gpus = f" with {placement.gpu} GPUs each" if placement.gpu != "0" else ""
    money = f", {hours * price:.3g} at {price:g} an hour" if price else ""
    pods = f"{placement.nodes} {'pod' if placement.nodes == 1 else 'pods'}{gpus}"
    return f"8 executions, {ATTEMPTS} attempts at a training of {pods}: about {hours:.1f} pod-hours of training{money}"


def agreed(yes: bool) -> None:
    """Ask for confirmation. Raises ``UserError`` without a terminal, and ``click.Abort``."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError("nothing was done: expected --yes, as there is no terminal on which to ask")
    click.confirm("go on?", abort=True)


def interrupted(signal_: int, frame: object) -> None:
    """Clean up at SIGTERM as at Ctrl-C."""
    raise KeyboardInterrupt


def results_table(rows: Sequence[ActResult]) -> str:
    """Return the acts with their results, and the commands with which to look closer."""
    lines = [(str(number), ("no", "yes")[row.held], row.act, row.seen) for number, row in enumerate(rows, 1)]
    looks = "\n".join(f"  {number}  {row.look}" for number, row in enumerate(rows, 1) if row.look)
    columns = ("", "held", "what", "seen")
    return "\n\n".join(
        [
            aligned_table(columns, lines, columns),
            f"to look closer:\n{looks}",
            f"{sum(row.held for row in rows)} of {len(rows)} held",
        ]
    )


def say(line: str) -> None:
    print(line, flush=True)
