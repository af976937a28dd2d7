"""Columns of any Arrow type and any values, for property tests."""

import tempfile
import typing
from collections.abc import Callable
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, Phase, reject, settings
from hypothesis import strategies as st

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import ColumnType, DataConfig

ROWS = 60
INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DECIMALS = [pa.decimal32(7, 2), pa.decimal64(18, 0), pa.decimal128(38, 10), pa.decimal256(76, 30)]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]
ZONES = [None, "UTC", "Europe/Oslo", "+05:30", "Mars/Phobos"]
TIMES = [pa.timestamp(unit, zone) for unit in ("s", "ms", "us", "ns") for zone in ZONES]
CLOCKS = [pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns")]
DURATIONS = [pa.duration(unit) for unit in ("s", "ms", "us", "ns")]
PLAIN = [
    *(pa.null(), pa.bool_(), pa.date32(), pa.date64(), pa.month_day_nano_interval()),
    *(*INTEGERS, *FLOATS, *DECIMALS, *TEXTS, *BYTES, *TIMES, *CLOCKS, *DURATIONS),
]
INDICES = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]


RUN_ENDS = [pa.int16(), pa.int32(), pa.int64()]
NESTED = [
    *(pa.list_(pa.int64()), pa.large_list(pa.string()), pa.list_(pa.float64(), 2), pa.list_view(pa.int8())),
    *(pa.struct([("a", pa.int8()), ("b", pa.string())]), pa.map_(pa.string(), pa.int64())),
    *(pa.list_(pa.struct([("a", pa.list_(pa.null()))])), pa.struct([("a", pa.struct([("b", pa.bool_())]))])),
]
#: Of Arrow files: Parquet has none.
UNIONS = [make([pa.field("a", pa.int64()), pa.field("b", pa.string())]) for make in (pa.sparse_union, pa.dense_union)]
EXTENSIONS = [
    *(pa.uuid(), pa.json_(), pa.bool8(), pa.opaque(pa.int16(), "odd", "here")),
    pa.fixed_shape_tensor(pa.float64(), [2]),
]
INNER = st.sampled_from([*PLAIN, *NESTED])
KINDS = st.one_of(
    st.sampled_from(PLAIN),
    st.sampled_from([*NESTED, *UNIONS, *EXTENSIONS]),
    st.builds(pa.dictionary, st.sampled_from(INDICES), INNER),
    st.builds(pa.run_end_encoded, st.sampled_from(RUN_ENDS), INNER),
)
EXACT = Context(prec=80)
WORDS = st.one_of(
    st.text(max_size=5),
    st.sampled_from(["", " ", "NA", "1", "2", "007", "-1.5", "1e999", "nan", "true", "False", "yes", "no", "x" * 400]),
    st.sampled_from(["2020-01-01", "2020-01-01T10:00:00+02:00", "9999999-01-01", "1,5", "1.234,5"]),
)


def bits(kind: pa.DataType) -> int:
    return kind.bit_width if pa.types.is_primitive(kind) else 64


def integers_of(kind: pa.DataType) -> st.SearchStrategy[int]:
    """All that the storage of a type holds, its extremes among it."""
    width = bits(kind)
    if pa.types.is_time(kind):
        return st.integers(0, 86_400 * {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit] - 1)
    low, high = (0, 2**width - 1) if pa.types.is_unsigned_integer(kind) else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)
    return st.one_of(st.integers(low, high), st.sampled_from([low, high, 0, 1]), st.integers(0, 3))


def decimals_of(kind: pa.DataType) -> st.SearchStrategy[Decimal]:
    most = 10**kind.precision - 1
    return st.one_of(st.integers(-most, most), st.integers(0, 3)).map(lambda n: Decimal(n).scaleb(-kind.scale, EXACT))


def present(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, as ``pa.array`` takes them."""
    if pa.types.is_boolean(kind):
        return st.booleans()
    if pa.types.is_floating(kind):
        return st.one_of(
            st.floats(width=cast(Literal[16, 32, 64], bits(kind))),
            st.sampled_from([0.0, -0.0, 1.0, 2.0, 5e-324 if bits(kind) == 64 else 1.0]),
        )
    if pa.types.is_decimal(kind):
        return decimals_of(kind)
    if any(kind == text for text in TEXTS):
        return WORDS
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=kind.byte_width, max_size=kind.byte_width)
    if any(kind == one for one in BYTES):
        return st.binary(max_size=4)
    if pa.types.is_interval(kind):
        return st.tuples(*[st.integers(-(2**31), 2**31 - 1)] * 2, st.integers(-(2**63), 2**63 - 1))
    if pa.types.is_union(kind):
        return st.one_of([st.tuples(st.just(code), values(field.type)) for code, field in enumerate(kind)])
    if pa.types.is_fixed_size_list(kind):
        return st.lists(values(kind.value_type), min_size=2, max_size=2)
    if pa.types.is_map(kind):
        return st.lists(st.tuples(st.text(max_size=2), values(kind.item_type)), max_size=2)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    if pa.types.is_nested(kind):
        return st.lists(values(kind.value_type), max_size=2)
    if pa.types.is_date64(kind):
        return integers_of(kind).map(lambda n: max(n, 86_400_000 - 2**63) // 86_400_000 * 86_400_000)
    return integers_of(kind)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    return st.none() if pa.types.is_null(kind) else st.one_of(st.none(), present(kind))


def made(kind: pa.DataType, cells: list[Any]) -> pa.Array:
    """An array of any type; dates and times from the numbers that they are stored as."""
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, made(kind.storage_type, cells))
    if pa.types.is_dictionary(kind):
        distinct = list({repr(cell): cell for cell in cells if cell is not None}.values())
        places = {repr(cell): place for place, cell in enumerate(distinct)}
        codes = pa.array([places.get(repr(cell)) for cell in cells], kind.index_type)
        return pa.DictionaryArray.from_arrays(codes, made(kind.value_type, distinct))
    if pa.types.is_run_end_encoded(kind):
        return pa.RunEndEncodedArray.from_arrays(
            pa.array(range(1, len(cells) + 1), kind.run_end_type), made(kind.value_type, cells), kind
        )
    if pa.types.is_union(kind):
        return union_of(kind, [(0, None) if cell is None else cell for cell in cells])
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.array(cells, pa.int32() if bits(kind) == 32 else pa.int64()).view(kind)
    return pa.array(cells, kind)


def union_of(kind: pa.UnionType, cells: list[tuple[int, Any]]) -> pa.Array:
    codes = pa.array([code for code, _ in cells], pa.int8())
    names = [field.name for field in kind]
    children = [
        made(field.type, [cell if code == child else None for code, cell in cells]) for child, field in enumerate(kind)
    ]
    if kind.mode == "sparse":
        return pa.UnionArray.from_sparse(codes, children, names)
    return pa.UnionArray.from_dense(codes, pa.array(range(len(cells)), pa.int32()), children, names)


@st.composite
def columns(draw: Callable[[Any], Any]) -> pa.Array:
    """A column of any type. Few different values, many times, are as likely as all different ones."""
    kind = draw(KINDS)
    inner = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    inner = inner.value_type if pa.types.is_dictionary(inner) or pa.types.is_run_end_encoded(inner) else inner
    cells = draw(st.lists(values(inner), min_size=1, max_size=draw(st.sampled_from([1, 3, 3, ROWS]))))
    return made(kind, [cells[i % len(cells)] for i in range(ROWS)])


SUFFIXES = st.sampled_from([".parquet", ".arrow"])


def write_table_with(column: pa.Array, path: Path) -> None:
    """Write a table of ``ROWS`` rows with the column ``c``, a number ``x`` and two classes ``y``.

    Rejects the example if the format of the path has no such type.
    """
    table = pa.table({"x": np.arange(ROWS) * 0.5, "c": column, "y": np.arange(ROWS) % 2})
    try:
        write(table, path)
    except (pa.ArrowException, OSError):
        reject()


def write(table: pa.Table, path: Path) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=25)
    else:
        with pa.ipc.new_file(path, table.schema) as sink:
            sink.write_table(table, 25)


def fuzz(examples: int) -> settings:
    """Without making a failing column smaller, which takes minutes."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
    )


#: What a column can be asked to be.
USES = [{"drop": ["c"]}, *({use: "c"} for use in ("id", "group", "time", "weight"))]
USES += [{"types": {"c": kind}} for kind in typing.get_args(ColumnType)]


def outcome(column: pa.Array, suffix: str, target: bool = False, **config: object) -> str:
    """ "refused", "used", "warned" (set aside with a warning) or "apart" (as asked for); what is prepared is whole."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / f"t{suffix}"
        write_table_with(column, path)
        try:
            prepare(Path(directory) / "p", str(path), "c" if target else "y", DataConfig.from_dict(config), {})
        except UserError as error:
            assert "\n" not in error.message
            return "refused"
        data = PreparedData.open(Path(directory) / "p")
        counted = data.card["rows"]
        assert counted["read"] == counted["kept"] + counted["quarantined"] == ROWS
        for split in SPLITS:
            records = data.split(split)
            for name in data.signature.record.names or ():
                assert np.isfinite(records[name].astype(float)).all()
        column_card = next(column for column in data.card["columns"] if column["name"] == "c")
        warned = any("'c' is not used: " in warning for warning in data.card["warnings"])
        used = column_card["role"] in ("numeric", "categorical", "document", "target")
        assert warned == ("why" in column_card) and not (warned and used)
        return "used" if used else "warned" if warned else "apart"
