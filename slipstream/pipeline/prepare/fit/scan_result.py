"""Settings and mergeable result of the first pass, with the columns whose values are ordered as the rows are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from slipstream.pipeline.prepare.fit.moments import (
    ColumnMoments,
    Moments,
    TextOccurrences,
    column_moments,
)
from slipstream.pipeline.prepare.fit.splits import Cuts, SplitOverlap, SplitRule
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.spelling import (
    PATTERNS,
    narrowest_rule,
    respell,
    respell_counts,
    spelling_rules,
)
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.memory import MemoryBudget
from slipstream.shared.source.quarantine import QuarantinedRows

#: Smallest number of steps between rows for calling a column ordered.
ENOUGH = 20
#: Share of steps in one direction from which a column is ordered; the order restarts where tables were concatenated.
ORDERED = 0.95
#: Share of the first :data:`LOOKED_AT` steps in one direction below which a column is not looked at further.
HOPELESS, LOOKED_AT = 0.75, 64


class RowOrder(NamedTuple):
    """Mergeable counts of the steps between successive values of all columns.

    ``steps`` (int64 ``[columns, 3]``) counts steps up, down and all; ``ends`` (float64 ``[columns, 2]``) are the first
    and last value, NaN without values. ``failed`` columns have fractions or no order.
    """

    steps: np.ndarray
    ends: np.ndarray
    failed: np.ndarray

    @classmethod
    def nothing(cls, columns: int) -> RowOrder:
        return cls(np.zeros((columns, 3), np.int64), np.full((columns, 2), np.nan), np.zeros(columns, bool))

    def then(self, numbers: Sequence[np.ndarray]) -> RowOrder:
        """Return the counts with the next rows, float64 with NaN where missing."""
        more = RowOrder.nothing(len(numbers))
        more.failed[:] = self.failed
        for place in np.flatnonzero(~self.failed).tolist():
            column = numbers[place]
            more.failed[place] = is_hopeless(column[: LOOKED_AT + 1])
            present = column[~np.isnan(column)] if not more.failed[place] else column[:0]
            if len(present):
                more.failed[place] = bool((present != np.floor(present)).any())
                more.steps[place] = steps_of(present)
                more.ends[place] = present[0], present[-1]
        return self.merge(more)

    def merge(self, other: RowOrder) -> RowOrder:
        """Return the counts of these rows followed by the ``other`` ones."""
        (first, last), (after, end) = self.ends.T, other.ends.T
        between = np.stack([last < after, last > after, ~np.isnan(last) & ~np.isnan(after)], axis=1)
        ends = np.stack([np.where(np.isnan(first), after, first), np.where(np.isnan(end), last, end)], axis=1)
        return RowOrder(self.steps + other.steps + between, ends, self.failed | other.failed)

    def ordered(self) -> np.ndarray:
        """Return which columns are whole, nearly unique and ordered with the rows (bool ``[columns]``)."""
        most, steps = self.steps[:, :2].max(axis=1), self.steps[:, 2]
        return ~self.failed & (steps >= ENOUGH) & (most >= ORDERED * steps)


def is_hopeless(head: np.ndarray) -> bool:
    up, down, steps = steps_of(head[~np.isnan(head)])
    return steps == LOOKED_AT and max(up, down) < HOPELESS * steps


def steps_of(present: np.ndarray) -> tuple[int, int, int]:
    before, after = present[:-1], present[1:]
    return int(np.count_nonzero(after > before)), int(np.count_nonzero(after < before)), len(before)


#: Column of the sample with the split of each row.
SPLIT = "\0split"


@dataclass(frozen=True)
class UnitScan:
    """Settings for scanning a unit; ``types`` are the types of all columns that are not dropped, in order."""

    types: dict[str, str]
    target: str
    rows: int
    config: DataConfig
    cuts: Cuts | None = None
    #: As in :class:`.SplitRule`.
    drawn: list[int] | None = None

    @property
    def budget(self) -> MemoryBudget:
        return MemoryBudget(self.config.memory)

    @property
    def batch_rows(self) -> int:
        return self.budget.batch_rows(len(self.types))

    @property
    def numeric(self) -> list[str]:
        """Names of the columns of numbers, booleans and times."""
        return [name for name, kind in self.types.items() if kind not in (value_types.TEXT, value_types.OTHER)]

    @property
    def rule(self) -> SplitRule:
        content = [
            name
            for name, kind in self.types.items()
            if kind != value_types.OTHER and name not in (self.config.weight, self.config.split.named_by)
        ]
        return SplitRule(self.config, content, self.cuts, self.drawn)

    def numbers(self, batch: pa.RecordBatch) -> dict[str, np.ndarray]:
        """Return the numeric columns of a batch as float64 ``[rows]``, NaN where missing."""
        return {name: value_types.as_numbers(batch.column(name)) for name in self.numeric}

    @property
    def sampled_below(self) -> np.uint64:
        """Largest key of a row that enters the sample.

        Keys are uniform, so every process samples the same share. A small table is sampled completely.
        """
        sampled = self.budget.sample_rows(len(self.types))
        return np.uint64(min(2**64 - 1, sampled * 2**64 // max(self.rows, 1)))


@dataclass(frozen=True)
class ColumnCount:
    """Missing values and moments of one column by split, and counts of the texts in its training rows."""

    missing: list[int]
    moments: list[Moments] = field(default_factory=lambda: [Moments()] * len(SPLITS))
    texts: TextOccurrences = field(default_factory=TextOccurrences)
    prose: bool = False
    spelling: str = ""


@dataclass
class TextCount:
    """Missing values of a text column by split, and counts of the texts in its training rows.

    ``rules`` are the spelling rules that these texts allow.
    """

    missing: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    texts: TextOccurrences = field(default_factory=TextOccurrences)
    prose: bool = False
    rules: list[str] = field(default_factory=lambda: list(PATTERNS))

    @property
    def spelling(self) -> str:
        return "" if self.prose else narrowest_rule(self.rules)

    def merge(self, other: TextCount) -> None:
        self.missing = [a + b for a, b in zip(self.missing, other.missing, strict=True)]
        self.prose |= other.prose
        self.rules = [rule for rule in self.rules if rule in other.rules]
        if not self.prose:
            self.texts.add(other.texts.of)


@dataclass
class ScanResult:
    """Result of the first pass over one or all units.

    ``rejected`` has an array of the bad rows' numbers per unit. ``figures`` holds all ``numeric`` columns in one array,
    so that one process can merge the results of all units quickly.
    """

    numeric: list[str]
    figures: ColumnMoments
    order: RowOrder
    texts: dict[str, TextCount]
    rows: list[int] = field(default_factory=lambda: [0, 0, 0])
    classes: list[TextOccurrences] = field(
        default_factory=lambda: [TextOccurrences(), TextOccurrences(), TextOccurrences()]
    )
    bad: QuarantinedRows = field(default_factory=QuarantinedRows)
    rejected: list[np.ndarray] = field(default_factory=list)
    #: Rows without the first column of ``data.identities``, and those without both.
    gaps: list[int] = field(default_factory=list)
    sample: list[pa.RecordBatch] = field(default_factory=list)
    #: What given splits share; empty without them.
    overlap: SplitOverlap = field(default_factory=SplitOverlap)

    @property
    def files(self) -> list[Path]:
        return self.bad.spools

    @classmethod
    def nothing(cls, scan: UnitScan) -> ScanResult:
        texts = [name for name, kind in scan.types.items() if kind == value_types.TEXT]
        limit = scan.budget.counted(len(texts))
        figures = ColumnMoments.nothing(len(scan.numeric), len(SPLITS))
        counts = {name: TextCount(texts=TextOccurrences(limit)) for name in texts}
        order = RowOrder.nothing(len(scan.numeric))
        return cls(scan.numeric, figures, order, counts, gaps=[0] * len(scan.config.identities))

    def merge(self, other: ScanResult) -> None:
        self.figures = self.figures.merge(other.figures)
        self.order = self.order.merge(other.order)
        for name, column in other.texts.items():
            self.texts[name].merge(column)
        for mine, theirs in zip(self.classes, other.classes, strict=True):
            mine.add(theirs.of)
        self.rows = [a + b for a, b in zip(self.rows, other.rows, strict=True)]
        self.gaps = [a + b for a, b in zip(self.gaps, other.gaps, strict=True)]
        self.bad += other.bad
        self.rejected += other.rejected
        self.sample += other.sample
        self.overlap.merge(other.overlap)

    def column(self, name: str) -> ColumnCount:
        if name in self.numeric:
            moments = self.figures.of(self.numeric.index(name))
            missing = [rows - of_split.count for rows, of_split in zip(self.rows, moments, strict=True)]
            return ColumnCount(missing, moments)
        count = self.texts.get(name, TextCount())
        texts = replace(count.texts, of=respell_counts(count.texts.of, count.spelling))
        return ColumnCount(count.missing, texts=texts, prose=count.prose, spelling=count.spelling)

    @property
    def ordered(self) -> list[str]:
        """Names of the columns of :meth:`.RowOrder.ordered`."""
        return [name for name, ordered in zip(self.numeric, self.order.ordered(), strict=True) if ordered]

    def sample_table(self) -> pa.Table:
        """Return the sample, with categories as their columns spell them."""
        sample = pa.Table.from_batches(self.sample)
        columns = {name: sample[name] for name in sample.column_names}
        columns |= {name: respell(columns[name], count.spelling) for name, count in self.texts.items()}
        return pa.table(columns)

    def measure_again(self) -> None:
        """Measure the numeric columns at once if the sample holds all rows.

        The last digits of merged moments depend on the units, and so on the format.
        """
        if not self.sample or sum(batch.num_rows for batch in self.sample) != sum(self.rows):
            return
        sample = pa.Table.from_batches(self.sample)
        splits = sample[SPLIT].to_numpy()
        groups = [np.flatnonzero(splits == split) for split in range(len(SPLITS))]
        self.figures = column_moments([sample[name].to_numpy() for name in self.numeric], groups)

    def spell_classes(self, rule: str) -> None:
        """Spell the classes of a text target by ``rule``, or if it is "" by the rule that they allow."""
        names = pa.array({name for split in self.classes for name in split.of}, pa.string())
        rule = rule or narrowest_rule(spelling_rules(names))
        self.classes = [replace(split, of=respell_counts(split.of, rule)) for split in self.classes]
