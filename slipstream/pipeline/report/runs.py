"""``slipstream runs``: list of runs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slipstream.pipeline.report.run_directory import SUMMARY, flat
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.errors import UserError
from slipstream.shared.one_line import one_line
from slipstream.shared.untrusted_files import RefusedFile, read_untrusted

#: Maximum bytes of a summary, and characters of a run's settings.
LONGEST_SUMMARY, LONGEST_SETTINGS = 16 << 20, 60
COLUMNS = ("run", "metric", "time", "cost", "made", "promoted", "settings")


@click.command()
@click.argument("directory", default="runs", type=click.Path(path_type=Path))
def main(directory: Path) -> None:
    """List the runs in DIRECTORY (runs/), the newest last.

    "made" names the stages that were not reused; "settings" are those that differ from the defaults.

    Example: slipstream runs
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: is no directory; expected one with runs, as pyflyte run makes in runs/")
    rows, notes = list[list[str]](), list[str]()
    for path in sorted(each for each in directory.iterdir() if each.is_dir()):
        try:
            if summary := read_summary(path):
                rows.append(row_of(path.name, summary))
        except UserError as note:
            rows.append([one_line(path.name), *[fmt.UNKNOWN] * (len(COLUMNS) - 1)])
            notes.append(str(note))
    if not rows:
        raise UserError(f"{directory}: has no run with a {SUMMARY}; expected the directory that holds run directories")
    click.echo(fmt.aligned_table(COLUMNS, rows, ("run", "made", "promoted", "settings")))
    if notes:
        click.echo("\n" + "\n".join(map(one_line, notes)))


def read_summary(path: Path) -> Mapping[str, Any] | None:
    """Return the summary of a run that trained a model; None for another workflow's. Raises ``UserError``."""
    try:
        summary = parse_json(read_untrusted(path, SUMMARY, LONGEST_SUMMARY))
    except FileNotFoundError:
        return None
    except (RefusedFile, ValueError) as error:
        raise UserError(f"{path / SUMMARY}: cannot be read: {error}; expected the file of a run") from None
    return summary if isinstance(summary, Mapping) and "evaluation" in summary else None


@contextmanager
def other_form(name: str) -> Iterator[None]:
    """Raise ``UserError`` if the block cannot read the summary of the run ``name``."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError, OverflowError):
        raise UserError(f"{name}/{SUMMARY}: has another form than this release's; run it again") from None


def row_of(name: str, summary: Mapping[str, Any]) -> list[str]:
    with other_form(name):
        metric, stages, costs = summary["evaluation"]["metric"], summary["stages"], summary["costs"]
        paid = costs[-1]["paid"] if costs else None
        promotion = summary["promotion"]
        cells = [
            name,
            f"{metric['name']} {fmt.metric(metric['name'], metric['value'])}",
            fmt.seconds(sum(stage["seconds"] for stage in stages if not stage["reused"])),
            fmt.dollars(paid) if paid is not None else "-",
            ", ".join(stage["name"] for stage in stages if not stage["reused"]) or "-",
            ("yes" if promotion["promoted"] else "no") if promotion else "-",
            settings_text(summary.get("run", {}).get("changed", {})),
        ]
    return [one_line(cell) for cell in cells]


def value_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def settings_text(changed: Mapping[str, Any]) -> str:
    text = ", ".join(f"{path}={json.dumps(value)}" for path, value in flat(changed)) or "-"
    return text if len(text) <= LONGEST_SETTINGS else f"{text[: LONGEST_SETTINGS - 1]}…"
