"""Column roles and the transformation, fitted on the training rows after the first pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.pipeline.prepare.fit.moments import Moments
from slipstream.pipeline.prepare.fit.scan import NO_TARGET
from slipstream.pipeline.prepare.fit.scan_result import SPLIT, ColumnCount, ScanResult
from slipstream.pipeline.prepare.fit.splits import TRAIN
from slipstream.shared.artifacts.prepared.card import missing_classes
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.transform import (
    LAST_SECOND,
    CategoricalColumn,
    NumericColumn,
    Transform,
    apply_curve,
    take_part,
)
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.quarantine import QuarantinedRows, describe

#: Roles of a column.
NUMERIC, CATEGORICAL, DOCUMENT, TARGET = "numeric", "categorical", "document", "target"
USED = (NUMERIC, CATEGORICAL, DOCUMENT, TARGET)
IDENTIFIER, GROUP, TIME, WEIGHT, OF_SPLIT = "identifier", "group", "time", "weight", "split"
CONSTANT, EMPTY, PROSE, UNSUPPORTED = "constant", "empty", "prose", "unsupported"

#: Largest vocabulary of a column; rarer values share the code of unseen values.
VOCABULARY = 10_000
#: Values with fewer training rows share the code of unseen values.
RARE = 2
#: Share of distinct values above which a text column is treated as an identifier.
DISTINCT_SHARE = 0.9
#: Smallest number of rows for treating a column as an identifier.
ENOUGH = 20
#: Absolute skewness above which a log transform precedes standardisation.
SKEWED = 3.0
#: Largest number of distinct whole values with which a numeric target is treated as classes.
FEW_CLASSES = 20
#: Dtype of a regression's stored targets.
REGRESSION_DTYPE = "float64"
#: Smallest number of steps of a float type over which values must spread.
STEPS = 1 << 10
#: Seconds by which a time must at least differ from all others to be called a mark for "missing".
DECADE = 3_652 * 86_400.0
#: Largest number of columns listed in one message.
SHOWN = 3
ID_NAMES = ("id", "key", "uuid", "guid", "index", "rowid")


@dataclass(frozen=True)
class ColumnRole:
    """Role of a column, and the reason if it is not used."""

    role: str
    why: str = ""


@dataclass(frozen=True)
class FittedColumns:
    """Roles of all columns, the fitted transformation and warnings for the user."""

    roles: dict[str, ColumnRole]
    transform: Transform
    warnings: list[str]


def fit_columns(
    scanned: ScanResult, sample: pa.Table, types: dict[str, str], target: str, config: DataConfig
) -> FittedColumns:
    """Assign roles and fit the transformation; ``sample`` is that of ``scanned``.

    Raise ``UserError`` for a target that cannot be learned, or if no column is usable.
    """
    task, classes, warnings = judge_target(scanned, types, target, config)
    aside = {config.id: IDENTIFIER, config.group: GROUP, config.time: TIME, config.weight: WEIGHT}
    aside[config.split.named_by] = OF_SPLIT
    aside.pop("", None)
    roles: dict[str, ColumnRole] = {}
    numeric: list[NumericColumn] = []
    categorical: list[CategoricalColumn] = []
    train = sample.filter(pc.equal(sample[SPLIT], TRAIN))
    for name, kind in types.items():
        count = scanned.column(name)
        roles[name] = (
            ColumnRole(TARGET)
            if name == target
            else ColumnRole(aside[name])
            if name in aside
            else column_role(name, kind, count, sample[name], scanned, config.types.get(name))
        )
        if roles[name].role == NUMERIC:
            inputs = fit_numeric(name, kind, count, train[name])
            numeric += inputs
            if kind in value_types.TIMES:
                warnings += sentinel_warnings(name, as_array(train[name]))
            elif kind != value_types.BOOLEAN:
                warnings += precision_warnings(inputs[0], count.moments[TRAIN], as_array(train[name]))
        elif roles[name].role == CATEGORICAL:
            categorical.append(fit_categorical(name, count))
        elif roles[name].why:
            warnings.append(f"column {name!r} is not used: {roles[name].why}")
    documents = tuple(name for name, role in roles.items() if role.role == DOCUMENT)
    if not numeric and not categorical and not documents and scanned.rows[TRAIN]:
        whys = [f"{name!r}: {role.why}" for name, role in roles.items() if role.why]
        more = [f"and {len(whys) - SHOWN} more"] if len(whys) > SHOWN else []
        raise UserError(f"data: no column can be used as a feature; {'; '.join([*whys[:SHOWN], *more])}")
    check_splits(scanned.rows)
    moments = scanned.column(target).moments[TRAIN]
    if task == "regression":
        scaling = NumericColumn(target, moments.mean, moments.std or 1.0)
        warnings += precision_warnings(scaling, moments, as_array(train[target]))
    transform = Transform(
        target=target,
        task=task,
        types={name: kind for name, kind in types.items() if roles[name].role in USED},
        missing=config.missing,
        decimal=config.decimal,
        thousands=config.thousands,
        numeric=tuple(numeric),
        categorical=tuple(categorical),
        classes=tuple(classes),
        target_mean=moments.mean if task == "regression" else 0.0,
        target_std=(moments.std or 1.0) if task == "regression" else 1.0,
        target_dtype=REGRESSION_DTYPE if task == "regression" else "float32",
        weight=config.weight,
        weight_mean=mean_weight(scanned, config),
        documents=documents,
        text_length=config.text_length if documents else 0,
    )
    return FittedColumns(roles, transform, [*warnings, *class_warnings(scanned, target)])


def mean_weight(scanned: ScanResult, config: DataConfig) -> float:
    """Return the mean weight of the training rows; 1 without weights. Raises ``UserError`` if it is 0."""
    mean = scanned.column(config.weight).moments[TRAIN].mean if config.weight else 1.0
    if mean == 0:
        raise UserError(f"data.weight: {config.weight!r} is 0 in every training row; expected some above 0")
    return mean


def check_values(scanned: ScanResult, bad: QuarantinedRows, target: str, config: DataConfig) -> None:
    """Raise ``UserError`` if no row is usable, with the first ``bad`` ones, or the id or group column is empty."""
    rows = sum(scanned.rows)
    if rows == 0 and all(each.first.reason.startswith(NO_TARGET) for each in bad.reasons):
        raise UserError(f"target {target!r}: all its values are missing; expected a column with values")
    if rows == 0:
        raise UserError(
            f"data: all {len(bad):,} rows were quarantined: {'; '.join(map(describe, bad.first))}; correct the rows, "
            "or the settings of the section data"
        )
    for setting in ("id", "group"):
        name = getattr(config, setting)
        if name and sum(scanned.column(name).missing) == rows:
            raise UserError(f"data.{setting}: all values are missing in column {name!r}; expected another column")


# The target


def judge_target(
    scanned: ScanResult, types: dict[str, str], target: str, config: DataConfig
) -> tuple[str, list[str], list[str]]:
    """Return the task, the class names (numbers sorted by value) and warnings."""
    counts: dict[str, int] = {}
    for split in scanned.classes:
        for name, count in split.of.items():
            counts[name] = counts.get(name, 0) + count
    rows = sum(scanned.rows)
    if len(counts) == 1:
        raise UserError(
            f"target {target!r}: is constant, {next(iter(counts))!r} in all {rows:,} rows; expected two or more values"
        )
    task = task_of(counts, types[target], config)
    if task == "regression":
        if types[target] == value_types.TEXT:
            example = next(iter(counts))
            raise UserError(f"target {target!r}: holds text such as {example!r}; regression expects numbers")
        return task, [], []
    if len(counts) > max(FEW_CLASSES, rows // 2) or len(counts) >= 1000:
        raise UserError(
            f"target {target!r}: has {len(counts):,} different values in {rows:,} rows, too many for classes; choose "
            "another target, or set data.task to regression if they are numbers"
        )
    single = [name for name, count in counts.items() if count == 1]
    if single:
        raise UserError(
            f"target {target!r}: class {single[0]!r} has only one row, so it cannot be in both training and test "
            "rows; drop the row, merge the class with another or add rows"
        )
    classes = (
        sorted(counts, key=lambda name: (float(name), name)) if types[target] in value_types.NUMBERS else sorted(counts)
    )
    by_split = dict(zip(SPLITS, scanned.classes, strict=True))
    rows_of = {name: {split: count.of.get(name, 0) for split, count in by_split.items()} for name in classes}
    return task, classes, missing_classes(rows_of)


def class_warnings(scanned: ScanResult, target: str) -> list[str]:
    named = f"{NO_TARGET}: "
    return [
        f"target {target!r}: {each.rows:,} rows were quarantined, as {each.first.reason.removeprefix(named)}; if it is "
        "a class, set data.missing without it"
        for each in scanned.bad.reasons
        if each.first.reason.startswith(named)
    ]


def task_of(counts: dict[str, int], kind: str, config: DataConfig) -> str:
    if config.task != "auto":
        return config.task
    if kind not in value_types.NUMBERS:
        return "regression" if kind in value_types.TIMES else "classification"
    whole = all(float(name).is_integer() for name in counts)
    return "classification" if whole and len(counts) <= FEW_CLASSES else "regression"


def check_splits(rows: list[int]) -> None:
    """Raise ``UserError`` if a split has no rows."""
    empty = [name for name, count in zip(SPLITS, rows, strict=True) if count == 0]
    if empty:
        raise UserError(
            f"data: of {sum(rows):,} rows none fell into the {empty[0]} split; expected more rows, a larger share in "
            "data.split or another data.split.seed"
        )


# The other columns


def column_role(
    name: str, kind: str, count: ColumnCount, sample: pa.ChunkedArray, scanned: ScanResult, declared: str | None
) -> ColumnRole:
    """Return the role of a column from its counts over all rows and its values in the sample."""
    if kind == value_types.OTHER:
        return ColumnRole(UNSUPPORTED, "its type cannot be an input; expected numbers, texts, dates or booleans")
    if sum(count.missing) == sum(scanned.rows):
        return ColumnRole(EMPTY, "it has no value in any row")
    if count.missing[TRAIN] == scanned.rows[TRAIN]:
        return ColumnRole(EMPTY, "all its values in training rows are missing")
    if declared == "document":
        return ColumnRole(DOCUMENT)
    if count.prose:
        return ColumnRole(
            PROSE,
            "its texts are too long to be categories; to learn from its words, declare it in data.types as document",
        )
    if kind in (value_types.TEXT, value_types.INTEGER):
        present = sample.drop_null()
        distinct = len(pc.unique(present))
    if kind == value_types.TEXT:
        if len(count.texts.of) == 1 and count.missing[TRAIN] == 0:
            return ColumnRole(CONSTANT, f"it is {next(iter(count.texts.of))!r} in every training row")
        if len(present) >= ENOUGH and distinct > DISTINCT_SHARE * len(present) and declared != "category":
            return ColumnRole(IDENTIFIER, "nearly every row has another value")
        return ColumnRole(CATEGORICAL)
    moments = count.moments[TRAIN]
    if moments.low == moments.high and count.missing[TRAIN] == 0:
        return ColumnRole(CONSTANT, f"it is {moments.low:g} in every training row")
    if (
        kind == value_types.INTEGER
        and declared != "number"
        and len(present) >= ENOUGH
        and distinct == len(present)
        and numbers_rows(name, count)
    ):
        return ColumnRole(IDENTIFIER, "it numbers the rows")
    return ColumnRole(NUMERIC)


def numbers_rows(name: str, count: ColumnCount) -> bool:
    """Return True if distinct whole numbers are nearly consecutive or the column is named like an identifier."""
    low = min(m.low for m in count.moments)
    high = max(m.high for m in count.moments)
    dense = high - low + 1 <= 1.1 * sum(m.count for m in count.moments)
    return dense or name.lower().replace("-", "_").split("_")[-1] in ID_NAMES or name.endswith("Id")


def fit_numeric(name: str, kind: str, count: ColumnCount, train: pa.ChunkedArray) -> list[NumericColumn]:
    """Return the model inputs for a numeric column.

    Log transforms are fitted on ``train``, a sample, since their scale need not be exact.
    """
    moments = count.moments[TRAIN]
    indicator = count.missing[TRAIN] > 0
    if kind in value_types.TIMES:
        first = NumericColumn(name, moments.mean, moments.std or 1.0, indicator=indicator)
        return [first, *fit_time_parts(name, as_array(train))]
    numbers = as_array(train)
    if kind != value_types.BOOLEAN and abs(skewness(numbers)) > SKEWED:
        size = np.abs(numbers[numbers != 0])
        scale = float(np.median(size)) if len(size) else 1.0
        bent = apply_curve(numbers, "log", scale)
        if abs(skewness(bent)) < abs(skewness(numbers)) and bent.std() > 0:
            return [NumericColumn(name, float(bent.mean()), float(bent.std()), "log", scale, indicator=indicator)]
    return [NumericColumn(name, moments.mean, moments.std or 1.0, indicator=indicator)]


def fit_time_parts(name: str, seconds: np.ndarray) -> list[NumericColumn]:
    """Return inputs for the hour, weekday and month of a time, without constant ones."""
    parts = [(part, take_part(seconds, part)) for part in ("hour", "weekday", "month")]
    return [
        NumericColumn(name, float(numbers.mean()), float(numbers.std()), part=part)
        for part, numbers in parts
        if len(numbers) and numbers.std() > 0
    ]


def precision_warnings(column: NumericColumn, moments: Moments, train: np.ndarray) -> list[str]:
    """Return a warning if floats hold too few digits of a column; ``train`` is a sample of its values."""
    far = max(moments.low, moments.high, key=abs)
    if not len(train) or moments.low == moments.high:
        return []
    if moments.std < STEPS * np.spacing(abs(far)):
        return [
            f"column {column.name!r}: float64 holds values near {far:g} in steps of {np.spacing(abs(far)):.3g}, too "
            f"large for their standard deviation of {moments.std:.3g}; subtract a constant from the column"
        ]
    ends = np.quantile((column.curved(train) - column.mean) / column.std, ((0.0, 0.005, 0.01), (0.99, 0.995, 1.0)))
    steps = float(np.min((ends[1] - ends[0]) / np.spacing(np.abs(ends).max(axis=0).astype(np.float32))))
    if not 0 < steps < STEPS:
        return []
    far = max(moments.low, moments.high, key=lambda value: abs(value - moments.mean))
    return [
        f"column {column.name!r}: outliers such as {far:g} leave 99 % of the values {steps:,.0f} steps of float32; "
        "correct them, or list them in data.missing if they mean missing"
    ]


def sentinel_warnings(name: str, seconds: np.ndarray) -> list[str]:
    """Return warnings of the first or last of the times if it is farther from the others than they are apart."""
    if not len(seconds):
        return []
    ends = np.unique([seconds.min(), seconds.max()])
    rest = seconds[~np.isin(seconds, ends)]
    if not len(rest):
        return []
    low, high = rest.min(), rest.max()
    return [
        f"column {name!r}: {day_of(end)} ({np.mean(seconds == end):.2%} of its values) is far from all other times and "
        "flattens them; if it means missing, add it to data.missing"
        for end in ends
        if min(abs(end - low), abs(end - high)) > max(high - low, DECADE)
    ]


def day_of(second: float) -> str:
    return str(np.datetime64(int(np.clip(second, -LAST_SECOND, LAST_SECOND)), "s").astype("datetime64[D]"))


def fit_categorical(name: str, count: ColumnCount) -> CategoricalColumn:
    frequent = [text for text, times in count.texts.ranked()[:VOCABULARY] if times >= RARE]
    return CategoricalColumn(name, tuple(frequent), count.spelling)


def as_array(column: pa.ChunkedArray) -> np.ndarray:
    return column.drop_null().to_numpy()


def skewness(numbers: np.ndarray) -> float:
    """Return the third standardised moment; 0 if all numbers are equal."""
    if len(numbers) < 2:
        return 0.0
    deviations = numbers - numbers.mean()
    squares = deviations * deviations
    spread = np.sqrt(squares.mean())
    return float((squares * deviations).mean() / spread**3) if spread > 0 else 0.0
