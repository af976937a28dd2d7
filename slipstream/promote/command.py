"""``slipstream registry``: what is in service."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import click

from slipstream.errors import UserError
from slipstream.promote.store import Registry


@click.command()
@click.argument("registry")
@click.option("--fetch", type=click.Path(path_type=Path), help="A fresh directory for the promoted model.")
def main(registry: str, fetch: Path | None) -> None:
    """List the promotions of the REGISTRY (a directory, or a store's address), the one in service last.

    Example: slipstream registry s3://models/churn --fetch model/
    """
    found = Registry(registry)
    history = found.history()
    if not history:
        raise UserError(f"{registry}: no model was promoted yet; expected a registry that train_and_promote has filled")
    for pointer in history:
        click.echo(f"{pointer.number:>4}  {pointer.at}  {pointer.version}  {pointer.why}")
    if fetch:
        if fetch.exists():
            raise UserError(f"--fetch: {fetch} is there already; expected a directory that is not")
        fetch.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=fetch.parent, prefix=".fetch-") as scratch:
            shutil.move(found.fetch(history[-1], Path(scratch, "model")), fetch)
        click.echo(f"in service: {fetch}")
