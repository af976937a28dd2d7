"""Parts of tensors, on disk and in a store: read correctly, without reading more than needed."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.shared.artifacts.prepared.token_rows import WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.models.base import tensors as module
from slipstream.shared.models.base.directory import BaseDirectory, read_pieces
from slipstream.shared.models.base.tensors import OpenedBase
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.storage import StorageUnavailable, retry, storage_for
from tests.support.bases import SIGNATURE, fingerprint_base, make_base, some_tokens, theirs
from tests.support.faulty_s3 import FaultyS3
from tests.support.faulty_stores import REMOTE, Remote
from tests.support.proving import first_few
from tests.support.wording import refuses

ROWS, COLUMNS = 40, 12
#: First row, rows, first column, columns; and the bytes of float32 between the first and the last of them.
PARTS = {
    "all": (0, ROWS, 0, COLUMNS),
    "rows": (7, 13, 0, COLUMNS),
    "one row": (39, 1, 0, COLUMNS),
    "columns": (0, ROWS, 5, 4),
    "both": (11, 17, 8, 4),
    "none": (40, 0, 0, COLUMNS),
}


def write(directory: Path) -> dict[str, torch.Tensor]:
    """A directory with tensors of each type."""
    generator = torch.Generator().manual_seed(0)
    matrix, vector = torch.randn(ROWS, COLUMNS, generator=generator), torch.randn(ROWS, generator=generator)
    types = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
    stored = {f"{name}.{kind}": x.to(t) for kind, t in types.items() for name, x in (("m", matrix), ("v", vector))}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    save_file(stored, directory / WHOLE)
    return stored


def put(directory: Path, remote: Remote) -> None:
    storage = storage_for(remote.base)
    for path in directory.iterdir():
        storage.put(path.name, path.read_bytes())


@pytest.mark.parametrize("chunk", [1, 200, 4 << 20])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("part", PARTS)
def test_parts_of_a_file(part: str, kind: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk)
    stored = write(tmp_path / "base")
    first, rows, column, columns = PARTS[part]
    held = [0]

    def noted(*where: Any) -> tuple[np.ndarray, int]:
        content, apart = read_pieces(*where)
        held.append(len(content))
        return content, apart

    monkeypatch.setattr(module, "read_pieces", noted)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        base = OpenedBase.open(BaseDirectory.list(str(tmp_path / "base")))
        held[:] = [0]  # without the header
        found = torch.full((rows, columns), torch.nan, dtype=dtype)
        base.fill(found, f"m.{kind}", (first, column))
        whole = stored[f"m.{kind}"]
        assert torch.equal(found, whole[first : first + rows, column : column + columns].to(dtype))
        assert base.bytes_read == rows * columns * whole.element_size()
        vector = torch.full((rows,), torch.nan, dtype=dtype)
        base.fill(vector, f"v.{kind}", (first,))
        assert torch.equal(vector, stored[f"v.{kind}"][first : first + rows].to(dtype))
        assert base.bytes_read == rows * (columns + 1) * whole.element_size()
        assert max(held) <= max(chunk, columns * whole.element_size())


def test_a_part_that_lies_elsewhere_than_row_by_row(tmp_path: Path) -> None:
    stored = write(tmp_path / "base")["m.f32"]
    found = torch.full((COLUMNS, ROWS), torch.nan).T
    OpenedBase.open(BaseDirectory.list(str(tmp_path / "base"))).fill(found, "m.f32", (0, 0))
    assert torch.equal(found, stored)


@pytest.mark.parametrize("remote", first_few(REMOTE), indirect=True)
def test_of_a_store_rows_come_by_few_requests(remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = write(tmp_path / "base")["m.f32"]
    put(tmp_path / "base", remote)
    row = COLUMNS * 4
    # Ten rows are a chunk.
    monkeypatch.setattr(module, "CHUNK_BYTES", 10 * row + 3)
    expected = {"all": (4, ROWS * row), "rows": (2, 13 * row), "one row": (1, row), "none": (0, 0)}
    # Of columns all from the first to the last of a chunk.
    expected |= {"columns": (4, 4 * (9 * row + 16)), "both": (2, (9 + 6) * row + 2 * 16)}
    base = OpenedBase.open(BaseDirectory.list(remote.base))
    for part, (requests, read) in expected.items():
        first, rows, column, columns = PARTS[part]
        before, remote.proxy.requests[:] = base.bytes_read, []
        found = torch.full((rows, columns), torch.nan)
        base.fill(found, "m.f32", (first, column))
        assert torch.equal(found, stored[first : first + rows, column : column + columns]), part
        assert (len(remote.proxy.requests), base.bytes_read - before) == (requests, read), part


@pytest.mark.parametrize("remote", first_few(REMOTE), indirect=True)
def test_a_base_in_a_store(remote: Remote, tmp_path: Path) -> None:
    """A base in several files is read without requests for other files in its directory; failed requests are
    repeated."""
    here = make_base(tmp_path / "base", max_shard_size="20KB")
    (here / "original.pth").write_bytes(b"\0" * 100)
    put(here, remote)
    before = fingerprint_base(remote.base)
    storage_for(f"{remote.base}/original").put("model.safetensors", b"\0" * 100)
    remote.proxy.requests.clear()
    remote.proxy.inject("GET", "503", "reset", "pass", "500", "truncate")
    model = build_model(ModelConfig(base=f"{remote.base}/"), SIGNATURE, seed=0).eval()
    assert not remote.proxy.plan
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(here, some_tokens()), rtol=0, atol=1e-5)
    assert not [line for line in remote.proxy.requests if "original" in line and "prefix" not in line]
    assert fingerprint_base(remote.base) == before
    storage_for(remote.base).put("config.json", (here / "config.json").read_bytes() + b"\n")
    assert fingerprint_base(remote.base) != before


@pytest.mark.prove
def test_a_store_that_stays_away_or_writes_anew(
    store: FaultyS3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = Remote(f"s3://bucket/{tmp_path.name}/base", store, "PUT")
    write(tmp_path / "base")
    put(tmp_path / "base", remote)
    base, part = OpenedBase.open(BaseDirectory.list(remote.base)), torch.empty(ROWS, COLUMNS)
    monkeypatch.setattr(retry, "ATTEMPTS", 3)
    store.inject("GET", "503", "503", "503")
    with pytest.raises(StorageUnavailable):
        base.fill(part, "m.f32", (0, 0))
    storage_for(remote.base).put(WHOLE, (tmp_path / "base" / WHOLE).read_bytes()[::-1])
    with refuses(UserError, match=r"base/model\.safetensors:"):
        base.fill(part, "m.f32", (0, 0))
    with refuses(UserError, match=r"model\.base:"):
        OpenedBase.open(BaseDirectory.list(remote.base))
    with refuses(UserError, match=r"model\.base:"):
        BaseDirectory.list("s3://bucket/nothing")


def test_what_identifies_a_base(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", max_shard_size="20KB")
    first = fingerprint_base(str(base))
    assert fingerprint_base("") == "" and len(first) == 32
    copy = make_base(tmp_path / "elsewhere", max_shard_size="20KB")
    assert fingerprint_base(str(copy)) == first, "wherever it lies"
    (copy / "README.md").write_text("more")
    (copy / "tokenizer.json").write_text("{}")
    assert fingerprint_base(str(copy)) == first
    part = sorted(copy.glob("*.safetensors"))[1]
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    assert fingerprint_base(str(copy)) != first, "a bit of a tensor"
    content[-1] ^= 1
    part.write_bytes(content)
    assert fingerprint_base(str(copy)) == first
    part.rename(copy / "other.safetensors")
    assert fingerprint_base(str(copy)) != first, "a name"
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    assert fingerprint_base(str(base)) != first


def test_a_base_is_read_once_for_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = make_base(tmp_path / "base")
    first = fingerprint_base(str(base))
    monkeypatch.setattr("slipstream.shared.models.base.directory.read_pieces", lambda *_: pytest.fail("read again"))
    assert fingerprint_base(str(base)) == first
    monkeypatch.undo()
    tensors = load_file(base / WHOLE)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, base / WHOLE)
    assert fingerprint_base(str(base)) != first
