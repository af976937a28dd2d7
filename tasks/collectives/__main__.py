"""Measure the interconnect without Flyte: ``torchrun --nproc-per-node 2 -m tasks.collectives ['{"budget": 1}']``."""

from __future__ import annotations

import click

from tasks.collectives.config import CollectivesConfig
from tasks.collectives.measure import measure
from tasks.collectives.table import table
from tasks.distributed.process_group import process_group


@click.command()
@click.argument("settings", default="{}")
def main(settings: str) -> None:
    """Measure with SETTINGS, the configuration's section "collectives" as JSON."""
    config = CollectivesConfig.from_json(settings)
    with process_group() as group:
        profile = measure(config, group.device)
    if profile:
        click.echo(table(profile))


main()
