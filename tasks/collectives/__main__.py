"""Measure the interconnect without Flyte: ``python -m tasks.collectives [--processes N] [--config FILE]``.

Alone it starts processes of its own on this machine; under torchrun (``torchrun --nproc-per-node 8 -m
tasks.collectives``) the processes are torchrun's, on any number of machines, and rank 0 speaks for all.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from tasks.collectives.engine import benchmark
from tasks.collectives.launch.crew import Crew, NoLeader
from tasks.collectives.output import csv_text, json_text, table
from tasks.config import RunConfig
from tasks.errors import Interrupted, UserError
from tasks.hardware.gpus import visible_gpus

#: Some of what torchrun sets.
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
OUTPUT = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--processes", type=click.IntRange(1), help="How many to start: by default one for each GPU, or 2.")
@click.option("--config", "file", type=click.Path(path_type=Path), help="The YAML or JSON file of a run's settings.")
@click.option("--json", "json_file", type=OUTPUT, help="Also write the profile with all raw times to this file.")
@click.option("--csv", "csv_file", type=OUTPUT, help="Also write a line for each case to this file.")
def main(processes: int | None, file: Path | None, json_file: Path | None, csv_file: Path | None) -> None:
    """Measure the collectives between processes, say what is slow, and keep the profile in the history."""
    config = (RunConfig.from_file(file) if file else RunConfig()).collectives
    if not any(name in os.environ for name in LAUNCHED):
        crew = Crew.here(processes or visible_gpus() or 2, config.timeout)
    elif processes:
        raise UserError("--processes: torchrun has started the processes already; leave it out")
    else:
        crew = Crew.from_environment(os.environ, config.timeout)
    measured = benchmark(crew, config, reuse=False)
    if measured is None:
        return
    profile, _ = measured
    click.echo(table(profile))
    for path, text in ((json_file, json_text), (csv_file, csv_text)):
        if path:
            path.write_text(text(profile), encoding="utf-8")


def speak_once() -> int:
    """Run the command. Of torchrun's ranks only rank 0 says what is wrong, as all fail for the same reason; unless it
    is rank 0 that is missing."""
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        return main.main(standalone_mode=False) or 0
    except click.ClickException as error:
        if speaks:
            error.show()
        return error.exit_code
    except Interrupted as error:
        if speaks or isinstance(error, NoLeader):
            click.echo(f"Error: {error}", err=True)
        return 1


if __name__ == "__main__":
    sys.exit(speak_once())
