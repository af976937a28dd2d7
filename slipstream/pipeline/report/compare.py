"""``slipstream compare``: settings, metrics, timings and curves of several runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import click

from slipstream.pipeline.report.run_directory import MODEL, PREPARED, REPORT, TRAINED, flat, new_run
from slipstream.pipeline.report.runs import other_form, read_summary, value_text
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import History, read_history
from slipstream.shared.comparison.quality import UNITS, QualityLoss, paired_loss
from slipstream.shared.errors import UserError
from slipstream.shared.one_line import one_line

#: Both limits of the interval err with half of the 5 %.
LIMITS = 2
#: Directory of runs by default.
RUNS = Path("runs")
SECTIONS = ("settings", "metrics", "time")
Rows = list[list[str]]


@dataclass(frozen=True)
class ComparedRun:
    """Run that is compared."""

    path: Path
    summary: Mapping[str, Any]

    @classmethod
    def open(cls, path: Path) -> ComparedRun:
        """Open a run's directory, or a name in ``runs/``. Raises ``UserError``."""
        place = path if path.is_dir() else RUNS / path
        if not place.is_dir():
            raise UserError(f"{path}: no such run; expected a directory that `slipstream runs` lists")
        found = read_summary(place)
        if found is None:
            raise UserError(f"{place}: has no summary of a training; expected a directory that `slipstream runs` lists")
        return cls(place, found)

    @property
    def name(self) -> str:
        return one_line(self.path.resolve().name)

    @property
    def model(self) -> Path:
        return self.path / MODEL

    @cached_property
    def data(self) -> PreparedData | None:
        """Prepared data; None in runs of a cluster and of earlier releases."""
        return PreparedData.open(self.path / PREPARED) if (self.path / PREPARED).is_dir() else None

    @cached_property
    def history(self) -> History | None:
        return read_history(self.path / TRAINED) if (self.path / TRAINED).is_dir() else None

    def cells(self, section: str) -> dict[str, str]:
        """Return the figures of a section of the table, by name. Raises ``UserError`` for another form of summary."""
        with other_form(self.name):
            if section == "settings":
                run = self.summary.get("run", {})
                inputs = {name: value_text(value) for name, value in run.get("inputs", {}).items() if value}
                return inputs | {path: value_text(value) for path, value in flat(run.get("settings", {}))}
            if section == "metrics":
                scores = self.summary["evaluation"]["model"]
                known = [name for name in fmt.NAMES if scores.get(name) is not None]
                return {fmt.NAMES[name]: fmt.metric(name, scores[name]) for name in known}
            stages = self.summary["stages"]
            return {each["name"]: "reused" if each["reused"] else fmt.seconds(each["seconds"]) for each in stages}


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(runs: tuple[Path, ...]) -> None:
    """Compare RUNS with the first of them: settings, metrics, times.

    Their exported models predict the same test rows; the interval of the difference is that of paired rows. A page
    with overlaid curves is written to a new directory next to the first run.

    Example: slipstream compare runs/2026-11-26T22-19-53-churn runs/2026-11-26T22-31-08-churn
    """
    compared = [ComparedRun.open(path) for path in runs]
    if len(compared) < 2:
        raise UserError("RUNS: one is given; expected at least two")
    tables = {section: section_rows(compared, section) for section in SECTIONS}
    sentences = [difference_sentence(compared[0], other) for other in compared[1:]]
    columns = ["", *(run.name for run in compared)]
    rows = [row for section in SECTIONS for row in [[section.upper(), *[""] * len(compared)], *tables[section]]]
    click.echo(fmt.aligned_table(columns, rows, columns))
    click.echo("\n" + "\n".join(sentences))
    click.echo(f"\nReport      {write_page(compared, tables, sentences) / REPORT}")


def section_rows(runs: Sequence[ComparedRun], section: str) -> Rows:
    """Return the rows of a section; of settings, those that differ."""
    cells = [run.cells(section) for run in runs]
    names = list(dict.fromkeys(name for each in cells for name in each))
    rows = [[name, *(each.get(name, fmt.UNKNOWN) for each in cells)] for name in names]
    return [row for row in rows if section != "settings" or len(set(row[1:])) > 1]


def difference_sentence(first: ComparedRun, other: ComparedRun) -> str:
    """Return what ``other``'s model gains against that of ``first`` on the same test rows, in words."""
    found = paired_difference(first, other)
    if isinstance(found, str):
        return f"{other.name}: not compared row by row: {found}"
    loss, task = found
    words = f"{abs(loss.loss):.2f} {UNITS[task]} {'worse' if loss.loss > 0 else 'better'} than {first.name}"
    limits = f"{fmt.limits(loss.low, loss.high) if loss.loss > 0 else fmt.limits(-loss.high, -loss.low)}"
    shown = "" if loss.low > 0 or loss.high < 0 else "not significant: "
    return f"{other.name}: {shown}{words}, {limits} with 95 % confidence, on the same {fmt.count(loss.rows)} test rows"


def paired_difference(first: ComparedRun, other: ComparedRun) -> tuple[QualityLoss, str] | str:
    """Return the loss of ``other`` against ``first`` with its limits, and the task; or why there is none."""
    # They load ONNX Runtime.
    from slipstream.pipeline.promote.comparison import ComparedPackage, Incomparable, paired_predictions

    if other.data is None:
        return "it has no prepared data; runs on a cluster and of earlier releases have none"
    try:
        paired = paired_predictions(ComparedPackage(other.model), ComparedPackage(first.model), other.data)
    except Incomparable as error:
        return str(error).partition(";")[0].replace("the promoted model", first.name).replace("this model", other.name)
    task = other.data.signature.task
    return paired_loss(task, paired.truth, paired.old, paired.new, most=0.0, judged=LIMITS), task


def write_page(runs: Sequence[ComparedRun], tables: Mapping[str, Rows], sentences: Sequence[str]) -> Path:
    """Write the page into a new directory next to the first run; return the directory."""
    from slipstream.pipeline.report.pages import charts  # loads Matplotlib
    from slipstream.pipeline.report.pages.rendering import render_page

    histories = {run.name: run.history for run in runs if run.history}
    metric = str(runs[0].summary["evaluation"]["metric"]["name"])
    drawn = dict(curves(charts, histories, metric)) if histories else {}
    names = [run.name for run in runs]

    def fill(directory: Path, now: datetime) -> None:
        page = render_page("compare.html", names=names, tables=tables, sentences=sentences, charts=drawn, made=now)
        (directory / REPORT).write_text(page, encoding="utf-8")

    return new_run(runs[0].path.parent, fill, "comparison")


def curves(charts: Any, histories: Mapping[str, History], metric: str) -> Iterator[tuple[str, Any]]:
    yield "Validation loss", charts.overlaid(histories, "loss")
    if metric in ("accuracy", "rmse"):  # for tokens there is only the loss
        yield f"Validation {fmt.NAMES.get(metric, metric)}", charts.overlaid(histories, metric)
    yield "Training loss", charts.overlaid(histories, "training")
