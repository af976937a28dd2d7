"""What a profile asks for, as a table: a line for each stage."""

from __future__ import annotations

from tasks.hardware.placement import NVIDIA, Placement
from tasks.hardware.profile import STAGES, Profile

COLUMNS = (
    *("stage", "pods", "processes", "threads", "cpu", "memory", "disk", "/dev/shm"),
    *("spot", "retries", "timeout", "grace", "devices"),
)


def table(profile: Profile) -> str:
    """The table, its columns aligned, numbers to the right."""
    lines = [list(COLUMNS), *([stage, *cells(profile.asked(stage))] for stage in STAGES)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(COLUMNS))]
    left = [column in ("stage", "devices") for column in COLUMNS]
    return "\n".join(
        "  ".join(
            text.ljust(width) if to_left else text.rjust(width)
            for text, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


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
