"""Output of the doctor: findings, readings and unchecked parts, as a table or lines."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal

from slipstream.shared.errors import one_line
from slipstream.shared.formatting import aligned_table, count_with_noun

Severity = Literal["error", "warning"]
#: Number of a finding's places that are named; others are counted.
NAMED = 3
GAP = "  "


@dataclass(frozen=True)
class Finding:
    """Problem that will cause failure or costs (``error``), or may do so (``warning``)."""

    severity: Severity
    #: Task, ``workflow/node``, launch plan, file or part of the cluster.
    where: str
    what: str
    consequence: str
    fix: str


@dataclass(frozen=True)
class DoctorReport:
    """Findings, descriptions of what was checked, and of what was not, with the reason."""

    findings: tuple[Finding, ...] = ()
    checked: tuple[str, ...] = ()
    unchecked: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return any(finding.severity == "error" for finding in self.findings)

    def __add__(self, other: DoctorReport) -> DoctorReport:
        return DoctorReport(
            self.findings + other.findings, self.checked + other.checked, self.unchecked + other.unchecked
        )

    def text(self, width: int | None) -> str:
        """Return a table of ``width`` columns, or without a terminal (None) one line per finding."""
        findings = merge_across_places(self.findings)
        if width is None:
            lines = [
                f"{f.severity}: {f.where}: {f.what}: {f.consequence}; {f.fix}" for f in map(escape_finding, findings)
            ]
        else:
            cells = (
                (f.severity, (f"{f.what}: {f.consequence}", f"in {f.where}", f"fix: {f.fix}"))
                for f in map(escape_finding, findings)
            )
            rows = [("" if index else severity, part) for severity, parts in cells for index, part in enumerate(parts)]
            lines = wrapped_table(rows, width)
        lines += [f"checked: {one_line(line)}" for line in self.checked]
        lines += [f"not checked: {one_line(line)}" for line in self.unchecked]
        return "\n".join([*lines, count_findings(findings)])


@dataclass(frozen=True)
class NodeReading:
    """Measured property of a node; ``found`` is its value or why it is unreadable."""

    what: str
    found: str
    problem: str = ""


def readings_text(readings: Iterable[NodeReading], width: int | None) -> str:
    """Return the readings in the form of :meth:`DoctorReport.text`."""
    rows = [tuple(map(one_line, (reading.what, reading.found, reading.problem))) for reading in readings]
    if width is None:
        return "\n".join(f"{what}: {found}{f'; {problem}' if problem else ''}" for what, found, problem in rows)
    return "\n".join(wrapped_table([("what", "found", "problem"), *rows], width))


def escape_finding(finding: Finding) -> Finding:
    """Return the finding on one line, without control characters from untrusted names."""
    where, what, consequence, fix = map(one_line, (finding.where, finding.what, finding.consequence, finding.fix))
    return Finding(finding.severity, where, what, consequence, fix)


def merge_across_places(findings: Iterable[Finding]) -> list[Finding]:
    """Merge findings that differ only in their place.

    Errors come first; otherwise the order is kept.
    """
    places: dict[Finding, list[str]] = {}
    for finding in findings:
        places.setdefault(replace(finding, where=""), []).append(finding.where)
    joined = [replace(finding, where=named(where)) for finding, where in places.items()]
    return sorted(joined, key=lambda finding: finding.severity != "error")


def named(places: Sequence[str]) -> str:
    unique = list(dict.fromkeys(places))
    more = f" and {len(unique) - NAMED} more" if len(unique) > NAMED else ""
    return ", ".join(unique[:NAMED]) + more


def count_findings(findings: Sequence[Finding]) -> str:
    numbers = [sum(finding.severity == severity for finding in findings) for severity in ("error", "warning")]
    words = [count_with_noun(n, noun) for n, noun in zip(numbers, ("error", "warning"), strict=True) if n]
    return ", ".join(words) or "nothing found"


def wrapped_table(rows: Sequence[Sequence[str]], width: int) -> list[str]:
    """Return aligned columns, wrapped to at most ``width``."""
    if not rows:
        return []
    widths, lines = column_widths(rows, width), list[Sequence[str]]()
    for row in rows:
        cells = (textwrap.wrap(cell, size, break_on_hyphens=False) for cell, size in zip(row, widths, strict=True))
        lines += zip_longest(*cells, fillvalue="")
    return aligned_table(lines[0], lines[1:], left=lines[0]).split("\n")


def column_widths(rows: Sequence[Sequence[str]], width: int) -> list[int]:
    """Return every column's longest cell as its width.

    If the sum exceeds ``width``, the last two columns share the remaining width.
    """
    *first, last, end = (max(len(cell) for cell in column) for column in zip(*rows, strict=True))
    left = max(40, width - sum(first) - len(GAP) * (len(first) + 1))
    if last + end > left:
        end = min(end, max(left * 2 // 5, left - last))
        last = min(last, left - end)
    return [*first, last, end]
