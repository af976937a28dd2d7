"""Rows that are decoded and encoded again for another model equal its own encoding of the raw rows."""

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.raw_columns import RawColumns
from slipstream.pipeline.export.package.samples import LOST, decode_rows, undecided_rows
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.columns.transform import CategoricalColumn, NumericColumn, Transform
from tests.support.raw_tables import ARROW, columns_of, encoded, mixed_frame, mixed_table


def as_batch(values: dict[str, np.ndarray], types: dict[str, str]) -> pa.RecordBatch:
    """Decoded values as Arrow: times to the microsecond, NaN as null."""
    arrays = {}
    for name, kind in types.items():
        if kind == "text":
            arrays[name] = pa.array([text or None for text in values[name]], pa.string())
            continue
        known = [None if np.isnan(value) else value for value in values[name].tolist()]
        if kind == "time":
            known = [None if value is None else round(value * 1e6) for value in known]
        arrays[name] = pa.array(known, pa.float64() if kind in ("integer", "boolean") else ARROW[kind])
    return pa.RecordBatch.from_pydict(arrays)


@pytest.fixture(scope="module")
def transforms(tmp_path_factory: pytest.TempPathFactory) -> list[Transform]:
    """Fitted on different rows, so that all their statistics differ."""
    home = tmp_path_factory.mktemp("tables")
    made = [PreparedData.open(mixed_table(home / str(seed), "classification", seed)) for seed in (1, 2)]
    return [Transform.from_json(data.artifact.read_json("statistics.json")) for data in made]


def test_decoded_rows_are_encoded_as_the_raw_ones(transforms: list[Transform]) -> None:
    new, old = transforms
    frame = mixed_frame(2000, "classification", seed=3)
    # Dates without a time of day: a second too early would be another day.
    frame.loc[:999, "when"] = frame.loc[:999, "when"].dt.floor("D")
    rows = pa.RecordBatch.from_pandas(frame.drop(columns="y"), preserve_index=False)
    values = decode_rows(columns_of(new), encoded(new, rows))
    expected, found = encoded(old, rows), encoded(old, as_batch(values, columns_of(new).types))
    np.testing.assert_array_equal(found["categorical"], expected["categorical"])
    np.testing.assert_allclose(found["numeric"], expected["numeric"], rtol=1e-4, atol=1e-4)
    weekdays = [place for place, number in enumerate(old.numeric) if number.part in ("weekday", "month")]
    assert len(weekdays) == 2
    np.testing.assert_array_equal(found["numeric"][:, weekdays], expected["numeric"][:, weekdays])


def test_texts_that_were_lost_are_marked_where_the_other_may_know_them() -> None:
    base = Transform("y", "classification", {"a": "text", "b": "text"}, [""], categorical=(), classes=("n", "y"))

    def with_vocabularies(a: tuple[str, ...], b: tuple[str, ...]) -> RawColumns:
        categorical = (CategoricalColumn("a", a), CategoricalColumn("b", b))
        return columns_of(Transform(**{**vars(base), "categorical": categorical}))

    new, wider = with_vocabularies(("x",), ("u", "v")), with_vocabularies(("x", "z"), ("u",))
    records = np.zeros(4, [("categorical", np.int32, 2)])
    records["categorical"] = [[0, 2], [1, 3], [2, 1], [2, 2]]
    values = decode_rows(new, records)
    assert values["a"].tolist() == ["", LOST, "x", "x"] and values["b"].tolist() == ["u", "v", LOST, "u"]
    assert undecided_rows(new, wider, records).tolist() == [False, True, False, False]
    assert not undecided_rows(wider, with_vocabularies(("x",), ("u",)), records).any()


def test_gaps_come_back() -> None:
    number = NumericColumn("x", 5.0, 2.0, indicator=True)
    columns = columns_of(Transform("y", "regression", {"x": "number"}, [], numeric=(number,)))
    records = np.zeros(2, [("numeric", np.float32, 2)])
    records["numeric"] = [[1.5, 0.0], [0.0, 1.0]]
    assert decode_rows(columns, records)["x"].tolist()[0] == 8.0
    assert np.isnan(decode_rows(columns, records)["x"][1])
