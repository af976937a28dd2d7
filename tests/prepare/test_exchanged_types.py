"""Every type in exchanged files and in records of finished work is read back bit for bit."""

import dataclasses
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline.prepare.fit.scan import scan_unit
from slipstream.pipeline.prepare.images import encode_part
from slipstream.pipeline.prepare.resolve import SourceToPrepare
from slipstream.pipeline.prepare.sharded import merge_partitions, shares
from slipstream.pipeline.prepare.shuffle import merge_part
from slipstream.pipeline.prepare.table import FittedTable, OpenedTable, encode_unit
from slipstream.shared.artifacts.typed_values import decode_value, encode_value
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.documents import read_files
from slipstream.shared.source.text.text_tables import make_columnar
from tests.support.bits import bits
from tests.support.proving import first_few

EXCHANGED = [
    SourceToPrepare,
    shares.TextShare,
    OpenedTable,
    shares.Share,
    shares.ScannedShare,
    FittedTable,
    merge_partitions.MergePlan,
    merge_partitions.SortedRuns,
    merge_partitions.MergedParts,
]
UNITS_OF_WORK = [
    make_columnar,
    read_files,
    scan_unit,
    encode_unit,
    encode_part,
    merge_part,
    merge_partitions.collect_part,
]

DTYPES = [np.uint64, np.int64, np.uint8, np.float64, np.bool_]
arrays = st.builds(
    lambda items, dtype: np.array(items).astype(dtype), st.lists(st.integers(0, 9)), st.sampled_from(DTYPES)
)
batches = st.lists(st.tuples(st.none() | st.text(max_size=3), st.none() | st.floats())).map(
    lambda rows: pa.record_batch(
        {"text": pa.array([text for text, _ in rows], pa.string()), "x": pa.array([x for _, x in rows], pa.float64())}
    )
)
LEAVES: dict[Any, st.SearchStrategy[Any]] = {
    bool: st.booleans(),
    int: st.integers(),
    float: st.floats(),
    str: st.text(max_size=5),
    Any: st.none() | st.text(max_size=3) | st.lists(st.integers(), max_size=2),
    Path: st.sampled_from([Path("a"), Path("/b/c.arrow")]),
    np.ndarray: arrays,
    pa.RecordBatch: batches,
    DataConfig: st.builds(DataConfig, id=st.text(max_size=3), missing=st.lists(st.text(max_size=3), max_size=2)),
}


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type by the hints of its fields."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in LEAVES:
        return LEAVES[kind]
    if origin is list or (origin is tuple and arguments[-1] is ...):
        return st.lists(values(arguments[0]), max_size=2).map(origin)
    if origin is tuple:
        return st.tuples(*map(values, arguments))
    if origin is dict:
        return st.dictionaries(st.text(max_size=3), values(arguments[1]), max_size=2)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (types.UnionType, typing.Union):
        return st.one_of(*(st.none() if one is types.NoneType else values(one) for one in arguments))
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields
    return st.builds(kind, **{name: values(hints[name]) for name in names})


@pytest.mark.parametrize(
    "kind", first_few([*EXCHANGED, *(typing.get_type_hints(work)["return"] for work in UNITS_OF_WORK)], 5)
)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_it_comes_back_to_the_bit(kind: Any, data: st.DataObject) -> None:
    value = data.draw(values(kind))
    assert bits(decode_value(encode_value(value, kind), kind, "f")) == bits(value)
