"""``slipstream schema``: the JSON Schema by which editors complete and check ``run.yaml``."""

from __future__ import annotations

import json

import click

from slipstream.config import RunConfig
from slipstream.shared.settings import described_schema


@click.command()
def main() -> None:
    """Print the JSON Schema of run.yaml, by which editors complete and check it.

    Example: slipstream schema > run.schema.json
    """
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    click.echo(json.dumps({**dialect, **described_schema(RunConfig)}, indent=2))
