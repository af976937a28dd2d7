"""What a profile asks for, as a table: a line for each stage."""

from __future__ import annotations

from slipstream.profiles.placement import NVIDIA, Placement
from slipstream.profiles.profile import Profile
from slipstream.stages import STAGES
from slipstream.text_table import aligned

COLUMNS = (
    *("stage", "pods", "processes", "threads", "cpu", "memory", "disk", "/dev/shm"),
    *("spot", "retries", "timeout", "grace", "devices"),
)


def table(profile: Profile) -> str:
    """The table, its columns aligned, numbers to the right."""
    rows = [[stage, *cells(profile.asked(stage))] for stage in STAGES]
    return aligned(COLUMNS, rows, left=("stage", "devices"))


def cells(place: Placement) -> list[str]:
    asked = place.resources
    return [
        str(place.nodes),
        str(place.processes or "open"),
        str(place.threads or "open"),
        place.cpu,
        place.memory,
        asked["ephemeral-storage"],
        place.shared_memory or "-",
        "yes" if place.interruptible else "no",
        str(place.retries),
        f"{place.timeout_minutes} min",
        f"{place.grace_seconds} s",
        devices(place),
    ]


def devices(place: Placement) -> str:
    """GPUs, adapters and pages: all that is no part of every machine."""
    common = ("cpu", "memory", "ephemeral-storage")
    named = {NVIDIA: place.accelerator} if place.accelerator else {}
    return (
        ", ".join(f"{amount} {named.get(name, name)}" for name, amount in place.resources.items() if name not in common)
        or "-"
    )
