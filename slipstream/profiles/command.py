"""``slipstream profiles``: what every stage asks for."""

from __future__ import annotations

import click

from slipstream.profiles.profile import load
from slipstream.profiles.table import table


@click.command()
@click.argument("profile")
def main(profile: str) -> None:
    """Print what every stage asks for with PROFILE, a name or the path of a .toml; "open" is known where it runs.

    Example: slipstream profiles a100-spot
    """
    click.echo(table(load(profile)))
