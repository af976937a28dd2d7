"""``python -m tasks.hardware PROFILE``: what every stage asks for."""

from __future__ import annotations

import click

from tasks.hardware.profile import load
from tasks.hardware.table import table


@click.command()
@click.argument("profile")
def main(profile: str) -> None:
    """Print what every stage asks for with PROFILE, a name or the path of a .toml; "open" is known where it runs."""
    click.echo(table(load(profile)))


if __name__ == "__main__":
    main()
