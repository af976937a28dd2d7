"""``slipstream checkpoints``: the checkpoints of trainings, and freeing them."""

from __future__ import annotations

import time

import click

from slipstream.artifacts.store import STORE
from slipstream.profiles.profile import current_profile
from slipstream.text_table import aligned
from slipstream.train.homes.overview import DAY_S, HomeSummary, free, homes_below

COLUMNS = ("training", "size", "last written", "step", "state", "holder")


@click.command()
@click.argument("store", default="")
@click.option("--free", "frees", is_flag=True, help="Delete those that are older than the profile's checkpoint_days.")
def main(store: str, frees: bool) -> None:
    """List the checkpoints below STORE, a directory or the prefix of Flyte's raw output in a store.

    Without STORE: where the profile keeps them, or .slipstream. Finished trainings have no checkpoints any more.

    Example: slipstream checkpoints s3://flyte/raw --free
    """
    place, now = current_profile().placement("train"), time.time()
    store = store or place.checkpoints or str(STORE)
    homes = homes_below(store, now)
    if not homes:
        click.echo(f"no checkpoints below {store}")
        return
    click.echo(aligned(COLUMNS, [row(home, now) for home in homes], left=("training", "state", "holder")))
    old = [home for home in homes if now - home.modified > place.checkpoint_days * DAY_S]
    if not frees:
        if old:
            click.echo(f"{len(old)} of {len(homes)} are older than {place.checkpoint_days:g} days: --free deletes them")
        return
    for home in old:
        free(home)
        click.echo(f"freed {home.uri}: {size(home.bytes)}, {age(now - home.modified)} old")
    click.echo(f"freed {len(old)} of {len(homes)}, {size(sum(home.bytes for home in old))}")


def row(home: HomeSummary, now: float) -> list[str]:
    step = "-" if home.step is None else str(home.step)
    return [home.name, size(home.bytes), f"{age(now - home.modified)} ago", step, home.state, str(home.holder)]


def size(number: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024  # type: ignore[assignment]
    return f"{number:.3g} GiB"


def age(seconds: float) -> str:
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
