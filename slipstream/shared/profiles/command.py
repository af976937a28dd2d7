"""Command ``slipstream profiles``: the requests of every stage, one per line."""

from __future__ import annotations

import click

from slipstream.shared.formatting import aligned_table
from slipstream.shared.profiles.placement import NVIDIA, Placement
from slipstream.shared.profiles.profile import Profile, load_profile
from slipstream.shared.stages import STAGES

COLUMNS = (
    *("stage", "pods", "processes", "threads", "cpu", "memory", "disk", "/dev/shm"),
    *("spot", "retries", "timeout", "grace", "devices"),
)


def requests_table(profile: Profile) -> str:
    """Return the requests of every stage as an aligned table."""
    rows = [[stage, *cells(profile.asked(stage))] for stage in STAGES if not STAGES[stage].pod_of]
    return aligned_table(COLUMNS, rows, left=("stage", "devices"))


def cells(placement: Placement) -> list[str]:
    asked = placement.resources
    return [
        str(placement.nodes),
        str(placement.processes or "open"),
        str(placement.threads or "open"),
        placement.cpu,
        placement.memory,
        asked["ephemeral-storage"],
        placement.shared_memory or "-",
        "yes" if placement.interruptible else "no",
        str(placement.retries),
        f"{placement.timeout_minutes} min",
        f"{placement.grace_seconds} s",
        devices(placement),
    ]


def devices(placement: Placement) -> str:
    """Return GPUs, adapters and huge pages as text: all requests beyond CPU, memory and disk."""
    common = ("cpu", "memory", "ephemeral-storage")
    named = {NVIDIA: placement.accelerator} if placement.accelerator else {}
    special = {name: amount for name, amount in placement.resources.items() if name not in common}
    return ", ".join(f"{amount} {named.get(name, name)}" for name, amount in special.items()) or "-"


@click.command()
@click.argument("profile")
def main(profile: str) -> None:
    """Print the requests of every stage with PROFILE, a name or the path of a .toml; "open" is decided where it runs.

    Example: slipstream profiles a100-spot
    """
    click.echo(requests_table(load_profile(profile)))
