"""The stored transformation gives every raw row the inputs of training."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.transform import Transform
from tests.support.tables import Prepare
from tests.support.wording import refuses


def raw_rows() -> pd.DataFrame:
    draw = np.random.default_rng(8)
    frame = pd.DataFrame(
        {
            "key": np.arange(400) + 0.5,
            "gain": np.where(draw.random(400) < 0.9, 0, np.exp(draw.normal(8, 2, 400))),
            "age": draw.integers(18, 90, 400).astype(float),
            "city": draw.choice(np.array(["Oslo", "Rome", "Lima", None], object), 400),
            "when": pd.Timestamp("2024-01-01") + pd.to_timedelta(draw.integers(0, 10**7, 400), unit="s"),
            "member": draw.random(400) > 0.5,
            "y": draw.integers(0, 3, 400),
        }
    )
    frame.loc[::9, "age"] = np.nan
    return frame


def encode(data: PreparedData, frame: pd.DataFrame) -> np.ndarray:
    transform = Transform.from_json(data.artifact.read_json("statistics.json"))
    assert transform.signature == data.signature
    out = np.zeros(len(frame), data.signature.record)
    transform.encode(pa.RecordBatch.from_pandas(frame, preserve_index=False), out)
    return out


@pytest.mark.parametrize("as_text", [False, True])
def test_row_by_row_the_same_inputs(prepared: Prepare, as_text: bool) -> None:
    frame = raw_rows()
    data = prepared(pa.Table.from_pandas(frame))
    given = frame.drop(columns="y")
    if as_text:  # as a request or a CSV brings them
        given = given.astype(object).where(given.notna(), None).map(lambda v: None if v is None else f" {v} ")
    # One row at a time, and all at once.
    result = np.concatenate([encode(data, given.iloc[i : i + 1]) for i in range(30)] + [encode(data, given.iloc[30:])])
    stored = np.concatenate([data.split(split) for split in SPLITS])
    by_key = lambda records: np.argsort(records["numeric"][:, 0])  # noqa: E731 - "key" is the first input
    result, stored = result[by_key(result)], stored[by_key(stored)]
    np.testing.assert_array_equal(result["numeric"], stored["numeric"])
    np.testing.assert_array_equal(result["categorical"], stored["categorical"])
    assert len(np.unique(stored["numeric"][:, 0])) == 400


def test_unseen_and_missing_have_codes_of_their_own(prepared: Prepare) -> None:
    frame = raw_rows()
    data = prepared(pa.Table.from_pandas(frame))
    new = frame.head(3).assign(city=["Paris", None, " ? "])
    assert encode(data, new)["categorical"][:, 0].tolist() == [1, 0, 0]


def test_what_does_not_fit_is_named(prepared: Prepare) -> None:
    frame = raw_rows()
    data = prepared(pa.Table.from_pandas(frame))
    with refuses(UserError):
        encode(data, frame.drop(columns="age"))
    with refuses(UserError):
        encode(data, frame.head(3).assign(age=["1", "old", "3"]))
