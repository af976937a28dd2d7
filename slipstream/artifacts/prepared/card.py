"""The data card, as ``card.json`` of prepared data holds it: what the rows and every column are like."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from slipstream.artifacts.format import Artifact
from slipstream.artifacts.records import from_tree

CARD = "card.json"
#: A data card as JSON: what is ``None`` in a :class:`DataCard` is left out.
Card: TypeAlias = dict[str, Any]


def holding(*names: str) -> AfterValidator:
    """A dictionary of these names and no others."""

    def check(counts: dict[str, int]) -> dict[str, int]:
        if set(counts) != set(names):
            raise ValueError(f"expected the counts {', '.join(names)}")
        return counts

    return AfterValidator(check)


BY_SPLIT = ("train", "validation", "test")


@dataclass(frozen=True)
class ColumnCard:
    """A column on the data card, which leaves out what is ``None``.

    ``top`` are the most frequent texts with their counts, ``rest`` counts the others; ``distinct_of`` is "sample" if
    distinct values were counted in the sample. ``drift`` is the population stability index by split, and
    ``drift_chance`` the probability of so large a one where nothing drifts. ``alone`` is the share of the target that
    the column explains by itself; ``histogram`` has ``edges``, one more than ``counts``, and
    leaves out the outermost 1 %.
    """

    name: str
    type: str
    role: str = ""
    missing: int | None = None
    why: str | None = None
    distinct: int | None = None
    distinct_of: str | None = None
    top: list[tuple[str, int]] | None = None
    rest: int | None = None
    mean: float | None = None
    std: float | None = None
    min: float | None = None
    max: float | None = None
    median: float | None = None
    p1: float | None = None
    p25: float | None = None
    p75: float | None = None
    p99: float | None = None
    histogram: dict[str, list[float]] | None = None
    drift: dict[str, float] | None = None
    drift_chance: dict[str, float] | None = None
    alone: float | None = None


@dataclass(frozen=True)
class DataCard:
    """What ``card.json`` says, without what is ``None``.

    ``rows``: read, kept, quarantined, and of each split. ``classes``: the rows of each class by split. ``held_out``:
    how many held-out rows were looked at and how many are duplicates. ``earlier`` identifies the base set.
    """

    source: str
    rows: Annotated[dict[str, int], holding("read", "kept", "quarantined", *BY_SPLIT)]
    task: str
    target: str
    columns: list[ColumnCard]
    classes: dict[str, Annotated[dict[str, int], holding(*BY_SPLIT)]]
    warnings: list[str] = field(default_factory=list)
    sampled_rows: int | None = None
    of_sample: list[str] | None = None
    rank_error: float | None = None
    held_out: dict[str, int] | None = None
    earlier: dict[str, str] | None = None
    #: Of language, whose ``rows`` are documents: the tokens and the bytes of text of each split.
    tokens: Annotated[dict[str, int], holding(*BY_SPLIT)] | None = None
    bytes: Annotated[dict[str, int], holding(*BY_SPLIT)] | None = None

    def to_json(self) -> dict[str, object]:
        return present({**vars(self), "columns": [present(vars(column)) for column in self.columns]})


def present(entries: dict[str, object]) -> dict[str, object]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def read_card(artifact: Artifact, name: str = CARD) -> Card:
    """The data card in the file ``name``. Raises ``DamagedArtifact`` if its content is not that of one."""
    card = artifact.read_json(name)
    from_tree(card, DataCard, artifact.directory / name)
    return {"warnings": [], **card, "columns": [{"role": "", **column} for column in card["columns"]]}
