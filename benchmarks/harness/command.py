"""Command line of a benchmark: ``--quick``, ``--json FILE``, and tables printed as soon as they are ready."""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from harness.table import Table
from slipstream.shared.artifacts.versions import installed_version
from slipstream.shared.machine.description import this_machine
from slipstream.shared.machine.limits import usable_cores

#: Libraries whose versions are reported with the figures.
LIBRARIES = ("torch", "numpy", "pyarrow", "onnxruntime", "nncf", "polars", "datasets", "grain", "litdata", "traceml-ai")


def benchmark(measure: Callable[..., Iterator[Table]]) -> click.Command:
    """Turn ``measure(quick, **options)`` into a command that prints the tables; ``measure``'s docstring is the help."""

    @click.option("--quick", is_flag=True, help="Run on little data for seconds; the figures mean nothing.")
    @click.option("--json", "target", type=click.Path(path_type=Path), help="Also write the figures to this file.")
    @functools.wraps(measure)
    def command(target: Path | None, quick: bool, **options: Any) -> None:
        machine = describe()
        click.echo("{cpu}, {cores} cores, load {load:.1f}, Python {python}, torch {torch}".format(**machine))
        tables = []
        for table in measure(quick, **options):
            click.echo(f"\n{table}")
            tables.append(table.to_json())
        if target:
            target.write_text(json.dumps({"quick": quick, "machine": machine, "tables": tables}, indent=1) + "\n")

    return click.command()(command)


def part_option(parts: Iterable[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add ``--part``, which selects parts of a benchmark; the default is all."""
    names = list(parts)
    kind = click.Choice(names)
    return click.option("--part", "parts", type=kind, multiple=True, default=names, help="Only this part; repeatable.")


def describe() -> dict[str, Any]:
    """Return the machine and library versions; ``load`` is the load average of the last minute."""
    versions = {library: installed_version(library) for library in LIBRARIES}
    load = os.getloadavg()[0]
    return {
        **vars(this_machine()),
        "cores": usable_cores(),
        "load": load,
        "python": platform.python_version(),
        **versions,
    }
