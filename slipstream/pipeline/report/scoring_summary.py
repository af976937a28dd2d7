"""Result of scoring, and its text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slipstream.pipeline.report import formatting as fmt
from slipstream.pipeline.report.terminal import framed_text, labelled_lines
from slipstream.shared.artifacts.results.scoring import DriftFigures, Publication, ScoredTable, Stability

#: Maximum number of columns and reasons shown; the table's manifest lists all.
LISTED = 5


@dataclass(frozen=True)
class ScoringSummary:
    """Result of a scoring run: the published table."""

    #: Output in which tables are published, and this table's location in it.
    output: str
    table: str
    publication: Publication
    #: False if the table already existed.
    new: bool
    scored: ScoredTable
    #: Outcome of retraining on drift; "" if retraining was not requested.
    retrained: str = ""

    def __str__(self) -> str:
        it = self.scored
        sections = (
            rows(it),
            model(it),
            drift(it.drift),
            labelled_lines("Retrained", self.retrained) if self.retrained else (),
            published(self),
        )
        return framed_text(f"scored → {it.target}", sections)


def rows(it: ScoredTable) -> Iterator[str]:
    aside = f"{fmt.count(it.set_aside)} quarantined" if it.set_aside else "none quarantined"
    yield from labelled_lines("Data", f"{fmt.rows(it.rows)} read, {fmt.count(it.scored)} scored, {aside}")
    for reason in it.reasons[:LISTED]:
        where = f" in column {reason.column!r}" if reason.column else ""
        words = (
            f"{fmt.rows(reason.rows)}: {reason.reason}{where} (first in {reason.file}, line {fmt.count(reason.line)})"
        )
        yield from labelled_lines("", words)


def model(it: ScoredTable) -> Iterator[str]:
    answers = f"probabilities of {len(it.classes)} classes" if it.classes else "values"
    yield from labelled_lines("Model", f"version {it.model}, by its {it.by}; {answers}")


def drift(figures: DriftFigures) -> Iterator[str]:
    if figures.unknown:
        yield from labelled_lines("Drift", f"unknown: {figures.unknown}")
        return
    known = [each for each in figures.measured if each.index is not None]
    if not known:
        yield from labelled_lines("Drift", "unknown: too few rows")
        return
    if figures.alarms:
        named = ", ".join(map(in_words, figures.alarms[:LISTED]))
        more = f" and {len(figures.alarms) - LISTED} more" if len(figures.alarms) > LISTED else ""
        yield from labelled_lines("Drift", f"found in {named}{more}; the threshold is {figures.threshold:g}")
        return
    largest = max(known, key=lambda each: each.index or 0.0)
    yield from labelled_lines("Drift", f"none found; the largest index is {in_words(largest)} of {figures.threshold:g}")


def in_words(each: Stability) -> str:
    return f"{each.name} {each.index:.3f}"


def published(it: ScoringSummary) -> Iterator[str]:
    """Yield the state of the publication and the table's location, which is never wrapped."""
    state = "now" if it.new else "earlier: the same data, model and settings were already scored"
    yield from labelled_lines("Published", state)
    yield f"{'Table':<12}{it.table}"
