"""Exported model in memory that predicts from a DataFrame, converted as scoring converts files."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from decimal import Decimal
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from slipstream.pipeline.export.package.files import LONGEST_JSON, MANIFEST
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.model import IMAGES, find_model
from slipstream.pipeline.score.part import finite_rows, prediction_columns, requested_columns
from slipstream.pipeline.score.plan import ROW
from slipstream.pipeline.score.predict import TablePredictor, table_predictor
from slipstream.pipeline.score.table_rows import RequestedColumns, check_present, check_values, typed_rows
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.transform import LAST_SECOND, UNSEEN, Transform
from slipstream.shared.source.columns.value_types import TEXT
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.tables import check_names
from slipstream.shared.source.text.text_tables import in_one
from slipstream.shared.storage import MissingObject, read_below

if TYPE_CHECKING:
    import pandas as pd

LOG = logger("predict")
#: Source of the rows in messages.
FRAME = SourceFile("frame", 0)
#: Maximum number of columns that a warning names.
NAMED = 8


@dataclass(frozen=True)
class LoadedModel:
    """Exported model; ``classes`` is empty for a regression."""

    version: str
    classes: tuple[str, ...]
    _wanted: RequestedColumns
    _predictor: TablePredictor
    _transform: Transform
    _ranges: dict[str, tuple[float, float]]

    def predict(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return label and probabilities, or the value, of every row, named as in a scored table.

        They are missing for rows that scoring would quarantine. Warnings count these and values unlike the training
        rows. Raises ``UserError`` for a column that is missing or of another type.
        """
        numbers = np.arange(1, 1 + len(frame))
        rows = typed_rows(arrow_columns(frame, self._wanted), numbers, FRAME.uri, self._wanted)
        predicted = self._predictor(rows.columns)
        table = pa.table({ROW: rows.numbers, **prediction_columns(predicted, self.classes)})
        table, not_finite = finite_rows(table, predicted, [FRAME.uri] * len(rows.numbers), rows.lines)
        self._warn_of_unlike(rows.columns)
        warn_of_bad([*rows.bad, *not_finite], len(frame))
        found: pd.DataFrame = table.to_pandas().set_index(ROW).reindex(numbers)
        return found.set_axis(frame.index)

    def _warn_of_unlike(self, rows: pa.RecordBatch) -> None:
        unlike = []
        for name, (low, high) in self._ranges.items():
            numbers = value_types.as_numbers(rows.column(name))
            if count := np.count_nonzero((numbers < low) | (numbers > high)):
                least, most = (spelled(number, self._wanted.types[name]) for number in (low, high))
                unlike.append(f"{name!r} in {count:,} ({least} to {most} in training)")
        for category in self._transform.categorical:
            codes = category.encode(rows.column(category.name), self._transform.missing)
            if count := np.count_nonzero(codes == UNSEEN):
                unlike.append(f"{category.name!r} in {count:,} (rare or unknown text)")
        if unlike:
            more = f", and {len(unlike) - NAMED} more columns" if len(unlike) > NAMED else ""
            LOG.warning(
                "of %s rows, values are unlike training: %s%s", f"{len(rows):,}", ", ".join(unlike[:NAMED]), more
            )


def spelled(number: float, kind: str) -> str:
    if kind in value_types.TIMES:
        return str(np.datetime64(int(np.clip(number, -LAST_SECOND, LAST_SECOND)), "s"))
    return f"{number:.6g}"


def warn_of_bad(bad: list[BadRow], rows: int) -> None:
    if bad:
        first = min(bad, key=lambda row: row.line)
        where = f"column {first.column!r}, " if first.column else ""
        LOG.warning(
            "%s of %s rows have no prediction; first row %d: %s%s", len(bad), rows, first.line, where, first.reason
        )


def arrow_columns(frame: pd.DataFrame, wanted: RequestedColumns) -> pa.RecordBatch:
    """Return the columns that the model takes as pandas writes them to Parquet."""
    import pandas as pd

    if not isinstance(frame, pd.DataFrame):
        raise UserError(f"frame: is a {type(frame).__name__}; expected a pandas.DataFrame with raw columns")
    if isinstance(frame.columns, pd.MultiIndex):
        raise UserError("frame: its columns have names on several levels (MultiIndex); expected one name per column")
    names = [str(name) for name in frame.columns]
    # Without surrounding spaces, as the header of a CSV.
    plain = [name if name in wanted.names or name.strip() in names else name.strip() for name in names]
    frame = frame.set_axis(plain, axis=1)
    check_names(list(frame.columns), FRAME)
    check_present(FRAME, list(frame.columns), wanted)
    columns: dict[str, pa.Array] = {}
    for name, kind in wanted.types.items():
        try:
            columns[name] = in_one(pa.Table.from_pandas(frame[[name]], preserve_index=False).column(0))
        except (ValueError, TypeError, OverflowError, pa.ArrowException) as error:
            if (found := numbers_and_texts(frame[name], kind)) is None:
                raise UserError(
                    f"frame: column {name!r} holds values that are not of one type ({error.args[0]}); expected one, as "
                    f"the model takes it as {kind}"
                ) from None
            columns[name] = found
    check_values({name: column.type for name, column in columns.items()}, FRAME, wanted)
    return pa.RecordBatch.from_pydict({name: value_types.simplify_column(each) for name, each in columns.items()})


def numbers_and_texts(column: pd.Series[Any], kind: str) -> pa.Array | None:
    """Return objects that Arrow refuses, such as integers of 20 digits, as a CSV has them, or None."""
    gaps, objects = column.isna(), column.astype(object)
    present = objects[~gaps]
    if not all(isinstance(value, str | Real | Decimal) and not isinstance(value, bool) for value in present):
        return None
    texts = [str(Decimal(value)) if isinstance(value, int) else str(value) for value in present]
    as_text = kind == TEXT or any(isinstance(value, str) for value in present)
    objects[~gaps] = texts if as_text else [float(text) for text in texts]
    return pa.array(objects.where(~gaps, None).to_list(), pa.string() if as_text else pa.float64())


def load(address: str | os.PathLike[str]) -> LoadedModel:
    """Load the model of a run (``runs/…``), an exported model, or the model in service in a registry.

    Raises ``UserError`` if there is none, or it takes no rows of a table.
    """
    place = os.fspath(address).rstrip("/")
    package = next((each for each in (place, f"{place}/model") if holds_package(each)), "")
    if not package and Registry(place).promoted() is None:
        raise UserError(f"{address}: no model is there; expected runs/…, an exported model, or a registry with one")
    found = find_model("" if package else place, package)
    with tempfile.TemporaryDirectory() as scratch:
        model = found.fetch(Path(scratch, "model"), None)
        if model.by == IMAGES:
            raise UserError(f"{address}: the model takes images; expected a model of a table; score the files instead")
        wanted, predictor = requested_columns(model, {}), table_predictor(model)
        ranges = model.distributions.ranges if model.distributions else {}
        return LoadedModel(
            found.version,
            tuple(model.signature.classes),
            wanted,
            predictor,
            model.transform,
            {name: each for name, each in ranges.items() if wanted.types.get(name, TEXT) != TEXT},
        )


def holds_package(address: str) -> bool:
    try:
        return bool(read_below(address, MANIFEST, LONGEST_JSON))
    except MissingObject:
        return False
