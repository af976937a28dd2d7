"""Delimited text in chunks: pickled data, and unusual spellings of numbers."""

import gzip
import math
import pickle
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.value_types import as_far_as_read, parse_number
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.text.csv_blocks import TextBlock, read_blocks
from tests.support.wording import refuses

ROWS = b"".join(b'%d,"a\nb%d"\n' % (number, number) for number in range(1000))


def sent(path: Path, data: bytes) -> list[tuple[TextBlock, bytes]]:
    path.write_bytes(data)
    blocks = read_blocks(SourceFile(str(path), len(data)), DataConfig(), 512)
    return [(block, pickle.dumps(block)) for block in blocks]


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_a_block_of_a_plain_file_is_sent_as_its_place(tmp_path: Path, mark: bytes) -> None:
    blocks = sent(tmp_path / "t.csv", mark + ROWS)
    assert b"".join(pickle.loads(form).data for _, form in blocks) == ROWS
    assert len(blocks) > 10 and all(len(form) < 300 < block.size for block, form in blocks[:-1])
    lines = [block.first_line for block, _ in blocks]
    assert lines == [1 + b"".join(other.data for other, _ in blocks[:n]).count(b"\n") for n in range(len(blocks))]


@pytest.mark.parametrize("name", ["t.csv.gz", "t.csv"])
def test_a_block_of_another_file_is_sent_as_its_bytes(tmp_path: Path, name: str) -> None:
    file = SourceFile(str(tmp_path / name), 0)
    text = ROWS.decode().encode("utf-16") if name == "t.csv" else ROWS
    (tmp_path / name).write_bytes(text if name == "t.csv" else gzip.compress(text))
    config = DataConfig(encoding="utf-16") if name == "t.csv" else DataConfig()
    forms = [pickle.dumps(block) for block in read_blocks(file, config, 512)]
    (tmp_path / name).unlink()
    assert b"".join(pickle.loads(form).data for form in forms) == ROWS


def test_a_file_that_is_cut_meanwhile_is_named(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    last = sent(path, ROWS)[-1][1]
    path.write_bytes(ROWS[:-9])
    with refuses(UserError, match=r"t\.csv:"):
        _ = pickle.loads(last).data


def test_unusual_numbers_are_read_as_pandas_reads_them() -> None:
    unusual = "+5 .5 5. 1e400 -1e400 inf -inf Infinity +inf iNf +.5e-3 -0"
    none = "1_000 0x10 1e e5 --5 1.2.3 - 1d5 True 1,000 1j infin 0b1 \u0661"
    texts = ["", " 5", "9" * 310, *unusual.split(), *none.split()]
    for text in texts:
        expected = pd.to_numeric(pd.Series([text]), errors="coerce").astype("float64")[0]
        assert parse_number(text) == (None if pd.isna(expected) else expected), text


@given(st.lists(st.sampled_from(["1", "-2.5e3", "+7", "x", None, "nan", "1_0"]), max_size=200))
def test_what_a_text_is_read_as_does_not_depend_on_its_neighbours(texts: list[str | None]) -> None:
    expected = {"1": 1.0, "-2.5e3": -2500.0, "+7": 7.0, "nan": "nan"}
    read = [
        "nan" if v is not None and math.isnan(v) else v
        for v in as_far_as_read(pa.array(texts, pa.string())).to_pylist()
    ]
    assert read == [expected.get(text or "") for text in texts]
