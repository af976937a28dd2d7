"""A profile made small enough for the CPUs of one machine."""

from __future__ import annotations

from dataclasses import replace

from slipstream.profiles.profile import Placement, Profile

#: What a rehearsal is about, and so is kept: who retries, what is spot, what the pods are told.
KEPT = ("interruptible", "retries", "restarts", "timeout_minutes", "tolerations", "data_cache_gib")
NODES = 2


def shrunk(profile: Profile) -> Profile:
    """At most two pods of one process for each stage, no GPU, and nothing that asks for certain hardware."""
    return replace(
        profile,
        default=shrunk_placement(profile.default),
        stages={stage: shrunk_placement(place) for stage, place in profile.stages.items()},
    )


def shrunk_placement(place: Placement) -> Placement:
    kept = {name: getattr(place, name) for name in KEPT}
    return Placement(**kept, nodes=min(place.nodes, NODES), processes=1)


def difference(whole: Profile, small: Profile) -> str:
    """One line that says what was shrunk."""
    stages = [
        f"{stage} from {places[0]} to {places[1]}"
        for stage in sorted(whole.stages)
        if len(set(places := [shape(each.placement(stage)) for each in (whole, small)])) > 1
    ]
    what = "; ".join([*stages, "no hardware asked for"])
    return f"profile {whole.name}, shrunk to this machine: {what}"


def shape(place: Placement) -> str:
    gpus = f" with {place.gpu} GPUs" if place.gpu != "0" else ""
    return f"{place.nodes} {'pod' if place.nodes == 1 else 'pods'} of {place.processes}{gpus}"
