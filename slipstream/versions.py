"""``slipstream versions``: the releases of the libraries that stages' results depend on, in this environment."""

from __future__ import annotations

import click

from slipstream.shared.artifacts.versions import installed_constraints


@click.command()
def main() -> None:
    """Print the installed releases of the libraries that results depend on, in the form of pip's constraints.

    A profile names the file as "versions". Its packages then expect the libraries of this image instead of those in
    constraints.txt.

    Example: docker run IMAGE slipstream versions > image.txt
    """
    click.echo(installed_constraints(), nl=False)
