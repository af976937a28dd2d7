"""Any bytes give a result with consistent counts, or one line of error, without a traceback or a hang."""

import csv
import io
import json
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyarrow import feather

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source import images
from slipstream.shared.source.columns.number_formats import DECLARED
from slipstream.shared.source.config import DataConfig
from tests.support.wording import refuses

CELLS = st.one_of(
    st.integers(-(10**20), 10**20).map(str),
    st.floats().map(str),
    st.sampled_from(["", " ", "?", "NA", "inf", "-Infinity", "1e999", "007", "+5", "1,5", "1_000", "true", "yes"]),
    st.sampled_from(["2024-02-30", "2024-01-01", "2024-01-01T10:00:00Z", "9999999-01-01", "-1", ".5", "5.", "0x1f"]),
    st.sampled_from(['"', '""', '"a', 'a"b', '"a\nb"', '"a,b"', "\r", "\0", "\ufeff", "é", "\u2028", "x" * 300]),
    st.text(max_size=6),
)
LINES = st.lists(CELLS, max_size=5).map(",".join)
BREAKS = st.sampled_from(["\n", "\r\n", "\n\n"])
BODIES = st.lists(st.tuples(LINES, BREAKS), max_size=12).map(lambda parts: "".join(a + b for a, b in parts))
FUZZ = settings(max_examples=50, derandomize=True, deadline=20_000, suppress_health_check=[HealthCheck.too_slow])

FEW = settings(FUZZ, max_examples=30)


def prepare_bytes(name: str, raw: bytes, target: str = "y", **config: object) -> Iterator[str]:
    """ "refused" or "prepared", after the counts have been checked."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(raw)
        try:
            prepare(Path(directory) / "p", str(path), target, DataConfig.from_dict(config), {})
        except UserError as error:
            assert "\n" not in error.message
            yield "refused"
            return
        data = PreparedData.open(Path(directory) / "p")
        rows = data.card["rows"]
        assert rows["read"] == rows["kept"] + rows["quarantined"]
        assert rows["kept"] == sum(len(data.split(split)) for split in SPLITS)
        assert rows["quarantined"] == pq.read_metadata(data.artifact.path("quarantine.parquet")).num_rows
        for split in SPLITS:
            for name in data.signature.record.names or ():
                assert np.isfinite(data.split(split)[name].astype(float)).all()
        yield "prepared"


SOUND = "".join(f"{i % 7},{'abc'[i % 3]},{'pq'[i % 2]}\n" for i in range(60))


@pytest.mark.prove
@FUZZ
@given(body=BODIES)
@example(body='1,"never closed,p\n2,b,q\n')
@example(body="\r1,2,3\r4,5,6\r")
def test_malformed_lines_among_good_ones(body: str) -> None:
    raw = ("x,t,y\n" + SOUND + body + SOUND).encode("utf-8", "surrogatepass")
    list(prepare_bytes("t.csv", raw, quarantine_limit=1.0))


@FUZZ
@given(raw=st.one_of(BODIES.map(lambda text: text.encode("utf-8", "surrogatepass")), st.binary(max_size=300)))
def test_anything_at_all_as_csv(raw: bytes) -> None:
    list(prepare_bytes("t.csv", raw, quarantine_limit=1.0))


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=4), CELLS),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=2), inner, max_size=2)),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.one_of(st.sampled_from(["x", "t", "y"]), st.text(max_size=3)), VALUES, max_size=4)


@pytest.mark.prove
@FUZZ
@given(rows=st.lists(st.one_of(OBJECTS.map(json.dumps), CELLS, st.text(max_size=9)), max_size=9))
@example(rows=['{"\\u0000line": 1}', '{"\\ud800": 1}', '{"y": NaN, "y": 1}', "\r", "{}"])
def test_any_lines_among_good_json(rows: list[str]) -> None:
    sound = [json.dumps({"x": i % 7, "t": "abc"[i % 3], "y": "pq"[i % 2]}) for i in range(60)]
    raw = "\n".join([*sound, *rows, *sound]).encode("utf-8", "surrogatepass")
    list(prepare_bytes("t.jsonl", raw, quarantine_limit=1.0))
    list(prepare_bytes("t.jsonl", "\n".join(rows).encode("utf-8", "surrogatepass"), quarantine_limit=1.0))


MARKS = st.fixed_dictionaries(
    {
        "delimiter": st.sampled_from([",", ";", "\t"]),
        "quote": st.sampled_from(['"', "'", ""]),
        "escape": st.sampled_from(["", "\\", "!"]),
        "decimal": st.sampled_from([".", ","]),
        "thousands": st.sampled_from(["", " ", "_"]),
        "types": st.dictionaries(st.sampled_from(["x", "t", "y"]), st.sampled_from(sorted(DECLARED)), max_size=2),
        "weight": st.sampled_from(["", "", "w"]),
    }
)
MARKED = st.one_of(
    CELLS, st.sampled_from(["\\", '\\"', "\\\n", "a\\", "'a", "1 000,5", "3,5", "!", "!!'", "-1", "yes"])
)


@pytest.mark.prove
@FUZZ
@given(marks=MARKS, cells=st.lists(st.lists(MARKED, min_size=2, max_size=5), max_size=10))
def test_any_marks_and_declared_types(marks: dict[str, Any], cells: list[list[str]]) -> None:
    sound = "".join(f"{i % 7},{'abc'[i % 3]},{'pq'[i % 2]},1\n" for i in range(60)).replace(",", marks["delimiter"])
    body = "\n".join(marks["delimiter"].join(line) for line in cells)
    raw = marks["delimiter"].join("xtyw") + "\n" + sound + body + "\n" + sound
    list(prepare_bytes("t.csv", raw.encode("utf-8", "surrogatepass"), quarantine_limit=1.0, **marks))


OFFSETS = st.builds(float.__add__, st.sampled_from([1e6, -1e9, 1e12]), st.floats(-1e3, 1e3)).map(repr)
SENTINELS = st.sampled_from(["9999-12-31", "0000-01-01", "0000-00-00", "9999-12-31 00:00:00", "0", "-999", "00.00"])
DATES = st.dates().map(str)
ORDERLY = st.one_of(*(st.lists(cells, min_size=1, max_size=4) for cells in (OFFSETS, DATES, st.just("text"), CELLS)))
#: Rows without a value, the values of all others in turn, and what stands in every ninth row instead.
FILLED = st.tuples(st.sampled_from([0, 0, 1, 90, 200]), ORDERLY, st.one_of(st.none(), SENTINELS))


@settings(FUZZ, max_examples=25)
@given(columns=st.lists(FILLED, min_size=1, max_size=3), suffix=st.sampled_from(["csv", "jsonl", "parquet"]))
def test_empty_beginnings_sentinels_and_offsets(columns: list[Any], suffix: str) -> None:
    cells: dict[str, list[str | None]] = {"y": ["pq"[i % 2] for i in range(200)]}
    for number, (empty, values, sentinel) in enumerate(columns):
        filled = [sentinel if sentinel and i % 9 == 0 else values[i % len(values)] for i in range(200)]
        cells[f"c{number}"] = [None] * empty + [cell.encode(errors="replace").decode() for cell in filled[empty:]]
    rows = [dict(zip(cells, row, strict=True)) for row in zip(*cells.values(), strict=True)]
    if suffix == "parquet":
        pq.write_table(pa.table(cells, pa.schema([(name, pa.string()) for name in cells])), sink := io.BytesIO())
        raw = sink.getvalue()
    elif suffix == "jsonl":
        raw = "".join(json.dumps(row) + "\n" for row in rows).encode()
    else:
        writer = csv.DictWriter(text := io.StringIO(), list(cells), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        raw = text.getvalue().encode()
    list(prepare_bytes(f"t.{suffix}", raw, quarantine_limit=1.0))


@FUZZ
@given(cut=st.integers(0, 500), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), max_size=4))
def test_cut_and_flipped_arrays(cut: int, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(ARRAYS)
    for index, bit in flips:
        raw[index % len(raw)] ^= 1 << bit
    list(prepare_bytes("t.npz", bytes(raw[: max(0, len(raw) - cut)] if cut > 250 else raw), target=""))


@FUZZ
@given(cut=st.integers(0, 200), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), max_size=4))
def test_cut_and_flipped_pictures(cut: int, flips: list[tuple[int, int]]) -> None:
    pytest.importorskip("PIL", reason="Pillow comes with `make`")
    for format in ("PNG", "JPEG"):
        raw = bytearray(whole_picture(format))
        for index, bit in flips:
            raw[index % len(raw)] ^= 1 << bit
        try:
            pixels = images.decode_image(bytes(raw[: max(0, len(raw) - cut)] if cut > 100 else raw))
        except images.UnusableImage as error:
            assert "\n" not in str(error)
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[0] in (1, 3)


@FUZZ
@given(cut=st.integers(0, 4000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), max_size=3))
def test_cut_and_flipped_parquet(cut: int, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for index, bit in flips:
        raw[index % len(raw)] ^= 1 << bit
    list(prepare_bytes("t.parquet", bytes(raw[: max(0, len(raw) - cut)] if cut > 2000 else raw)))


@pytest.mark.prove
@FEW
@given(flips=st.lists(st.tuples(st.integers(0, 100_000), st.integers(0, 7)), min_size=1, max_size=3))
@pytest.mark.parametrize("name", ["t.arrow", "t.feather"])
def test_flipped_arrow(name: str, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(whole_arrow(name))
    for index, bit in flips:
        raw[index % len(raw)] ^= 1 << bit
    list(prepare_bytes(name, bytes(raw), quarantine_limit=1.0))


def test_cut_arrow() -> None:
    for name in ("t.arrow", "t.feather"):
        raw = whole_arrow(name)
        assert list(prepare_bytes(name, raw)) == ["prepared"]
        # The beginning and the footer are whole, what lies between is zero.
        assert list(prepare_bytes(name, raw[:9] + bytes(len(raw) - 1009) + raw[-1000:])) == ["refused"]


@pytest.mark.parametrize("code", [3, 100, -1, -100])
def test_codes_beyond_the_dictionary(code: int, tmp_path: Path) -> None:
    codes = pa.array([0, 1, 2, None] * 40 + [code], pa.int8())
    column = pa.DictionaryArray.from_arrays(codes, pa.array(list("abc")), safe=False)
    table = pa.table({"x": np.arange(161) % 7 * 0.5, "c": column, "y": np.arange(161) % 2})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as sink:
        sink.write_table(table)
    for target in ("y", "c"):
        with refuses(UserError, match=r"t\.arrow:"):
            prepare(tmp_path / "p", str(tmp_path / "t.arrow"), target, DataConfig(), {})


def test_dictionaries_of_dictionaries_are_refused(tmp_path: Path) -> None:
    """Arrow writes them, and cannot read what it wrote."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1] * 30), pa.array(["a", "b"]).dictionary_encode())
    table = pa.table({"x": np.arange(60) % 7 * 0.5, "c": column, "y": np.arange(60) % 2})
    with pa.ipc.new_file(tmp_path / "t.arrow", table.schema) as sink:
        sink.write_table(table, 25)
    for target in ("y", "c"):
        with refuses(UserError, match=r"t\.arrow:"):
            prepare(tmp_path / "p", str(tmp_path / "t.arrow"), target, DataConfig(), {})


@cache
def whole_arrow(name: str) -> bytes:
    draw, sink = np.random.default_rng(0), io.BytesIO()
    texts = pa.array(draw.choice(list("abc"), 300))
    columns = {"x": draw.normal(size=300), "t": texts, "d": texts.dictionary_encode(), "y": draw.integers(0, 2, 300)}
    if name.endswith(".arrow"):
        with pa.ipc.new_file(sink, pa.table(columns).schema) as stream:
            stream.write_table(pa.table(columns), 100)
    else:
        feather.write_feather(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def whole_parquet() -> bytes:
    draw = np.random.default_rng(0)
    sink = io.BytesIO()
    table = pa.table({"x": draw.normal(size=300), "t": draw.choice(list("abc"), 300), "y": draw.integers(0, 2, 300)})
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


@cache
def whole_picture(format: str) -> bytes:
    from PIL import Image

    sink = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (12, 9, 3), np.uint8)).save(sink, format)
    return sink.getvalue()


def whole_arrays() -> bytes:
    draw, sink = np.random.default_rng(0), io.BytesIO()
    np.savez_compressed(sink, images=draw.integers(0, 256, (90, 5, 4), np.uint8), labels=np.arange(90) % 3)
    return sink.getvalue()


WHOLE = whole_parquet()
ARRAYS = whole_arrays()


def test_the_fuzzed_tables_are_prepared_when_they_are_sound() -> None:
    assert list(prepare_bytes("t.csv", ("x,t,y\n" + SOUND).encode())) == ["prepared"]
    assert list(prepare_bytes("t.parquet", WHOLE)) == ["prepared"]
    assert list(prepare_bytes("t.parquet", WHOLE[:-9])) == ["refused"]
