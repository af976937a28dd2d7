"""Data card of prepared data (``card.json``): a description of the rows and every column."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import AfterValidator

from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.records import from_tree

CARD = "card.json"
#: Data card as JSON, without the entries that are ``None`` in a :class:`DataCard`.
Card: TypeAlias = dict[str, Any]


def exact_keys_validator(*names: str) -> AfterValidator:
    """Return a pydantic validator for a dictionary with exactly the keys ``names``."""

    def check(counts: dict[str, int]) -> dict[str, int]:
        if set(counts) != set(names):
            raise ValueError(f"expected the counts {', '.join(names)}")
        return counts

    return AfterValidator(check)


#: Warning for documents of a tokenizer that puts nothing in front of a text.
BEHIND_THE_END = (
    "the tokenizer puts no token in front of a text, so the first token of a document is learned and evaluated behind "
    "the end token"
)
BY_SPLIT = ("train", "validation", "test")
#: Rows of every split by class.
ClassRows: TypeAlias = Mapping[str, Mapping[str, int]]
#: Largest number of classes that are named for a split.
NAMED = 3


def missing_classes(classes: ClassRows) -> list[str]:
    warnings = []
    for split, adjective in zip(BY_SPLIT, ("training", "validation", "test"), strict=True):
        missing = [name for name, rows in classes.items() if not rows[split]]
        warnings += [
            f"class {name!r} has no {adjective} row: its {sum(classes[name].values())} rows all fell into other splits"
            for name in missing[:NAMED]
        ]
        if more := len(missing) - NAMED if len(missing) > NAMED else 0:
            warnings.append(f"{more} more classes have no {adjective} row")
    return warnings


@dataclass(frozen=True)
class ColumnCard:
    """Entry of one column; ``None`` fields are not written.

    ``top`` are the most frequent texts with their counts; ``rest`` counts all other rows. ``why`` is the reason for the
    ``role``. ``distinct_of`` is "sample" if distinct values were counted in a sample. ``drift`` is the population
    stability index by split, and ``drift_chance`` the probability of an index this large without drift. ``alone`` is
    the univariate score (docs/glossary.md). ``histogram`` has ``counts`` and one
    more ``edges``, and omits the outermost 1 %.
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
class AnswersCard:
    """Answers of the rendered conversations.

    ``rows`` are by the rule that chose the answers; ``left_out`` counts values that change no text, by "role" (a whole
    message), "role.key" or "tools".
    """

    rows: Annotated[dict[str, int], exact_keys_validator("marked", "all", "last")]
    learned: int
    not_learned: int
    left_out: dict[str, int]


@dataclass(frozen=True)
class DataCard:
    """Contents of ``card.json``; ``None`` fields are not written.

    ``rows`` counts the rows read, kept, quarantined and in every split; ``classes`` the rows per class and split.
    ``held_out`` counts the held-out rows examined for duplicates of training rows and the duplicates found. ``earlier``
    identifies the base set. ``skipped`` counts the hidden names in the raw data.
    """

    source: str
    rows: Annotated[dict[str, int], exact_keys_validator("read", "kept", "quarantined", *BY_SPLIT)]
    task: str
    target: str
    columns: list[ColumnCard]
    classes: dict[str, Annotated[dict[str, int], exact_keys_validator(*BY_SPLIT)]]
    warnings: list[str] = field(default_factory=list)
    sampled_rows: int | None = None
    of_sample: list[str] | None = None
    rank_error: float | None = None
    held_out: dict[str, int] | None = None
    earlier: dict[str, str] | None = None
    skipped: int | None = None
    #: Tokens and bytes of text by split, for prepared language only; ``rows`` then counts documents.
    tokens: Annotated[dict[str, int], exact_keys_validator(*BY_SPLIT)] | None = None
    bytes: Annotated[dict[str, int], exact_keys_validator(*BY_SPLIT)] | None = None
    #: For conversations only.
    answers: AnswersCard | None = None

    def to_json(self) -> dict[str, object]:
        columns = [without_none(vars(column)) for column in self.columns]
        return without_none({**vars(self), "columns": columns, "answers": self.answers and vars(self.answers)})


def without_none(entries: dict[str, object]) -> dict[str, object]:
    return {name: entry for name, entry in entries.items() if entry is not None}


def read_card(artifact: Artifact, name: str = CARD) -> Card:
    """Return the data card in the file ``name``, with missing warnings and roles empty.

    Raises ``DamagedArtifact`` if it is malformed.
    """
    card = artifact.read_json(name)
    from_tree(card, DataCard, artifact.directory / name)
    return {"warnings": [], **card, "columns": [{"role": "", **column} for column in card["columns"]]}
