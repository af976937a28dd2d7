"""Whatever the bytes are: a result whose counts add up, or one line; never a traceback, never a hang."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tasks.errors import UserError
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.preprocess.prepared import SPLITS, PreparedData

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
FUZZ = settings(max_examples=100, derandomize=True, deadline=20_000, suppress_health_check=[HealthCheck.too_slow])


def prepare_bytes(name: str, raw: bytes, **config: object) -> Iterator[str]:
    """ "refused" or "prepared", after the counts have been checked."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / name
        path.write_bytes(raw)
        try:
            prepare(Path(directory) / "p", str(path), "y", DataConfig.from_dict(config), {})
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


@FUZZ
@given(cut=st.integers(0, 4000), flips=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 7)), max_size=3))
def test_cut_and_flipped_parquet(cut: int, flips: list[tuple[int, int]]) -> None:
    raw = bytearray(WHOLE)
    for place, bit in flips:
        raw[place % len(raw)] ^= 1 << bit
    list(prepare_bytes("t.parquet", bytes(raw[: max(0, len(raw) - cut)] if cut > 2000 else raw)))


def whole_parquet() -> bytes:
    draw = np.random.default_rng(0)
    sink = io.BytesIO()
    table = pa.table({"x": draw.normal(size=300), "t": draw.choice(list("abc"), 300), "y": draw.integers(0, 2, 300)})
    pq.write_table(table, sink, write_page_checksum=True)
    return sink.getvalue()


WHOLE = whole_parquet()


def test_the_fuzzed_tables_are_prepared_when_they_are_sound() -> None:
    assert list(prepare_bytes("t.csv", ("x,t,y\n" + SOUND).encode())) == ["prepared"]
    assert list(prepare_bytes("t.parquet", WHOLE)) == ["prepared"]
    assert list(prepare_bytes("t.parquet", WHOLE[:-9])) == ["refused"]
