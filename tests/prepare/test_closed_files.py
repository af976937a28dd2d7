"""Unreadable files are one line of error, in every place; none is skipped."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from pyarrow import feather

from slipstream.shared.errors import UserError
from slipstream.shared.source.files import list_source
from tests.support.tables import table_text
from tests.support.wording import refuses, same_wording

#: Lists, fingerprints and prepares each address as a person who is not root, and prints what came of it.
AS_NOBODY = """
import json, os, sys, tempfile
from pathlib import Path
import PIL.Image
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.source import images
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source

with tempfile.TemporaryDirectory() as directory:  # imports all that is needed, from where only root may read
    prepare(Path(directory) / "p", sys.argv[1], "y", DataConfig(), {}, 1)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
messages = {}
for address in sys.argv[1:]:
    target = "" if "photos" in address or "npz" in address else "y"
    for name, work in {
        "fingerprint": lambda where: fingerprint_source(list_source(address), target),
        "prepare": lambda where: prepare(where / "p", address, target, DataConfig(), {}, 1),
    }.items():
        with tempfile.TemporaryDirectory() as directory:
            try:
                work(Path(directory))
                messages[f"{address} {name}"] = "done"
            except UserError as error:
                messages[f"{address} {name}"] = error.message
print(json.dumps(messages))
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A place to which everybody has access, unlike ``tmp_path``."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_files_and_folders_without_permission(folder: Path) -> None:
    columns = pa.table({"x": np.arange(100.0), "y": np.arange(100) % 2})
    (folder / "t.csv").write_text(table_text(100))
    (folder / "t.json").write_text('{"x": 1, "y": 2}\n')
    pq.write_table(columns, folder / "t.parquet")
    feather.write_feather(columns, folder / "t.feather")
    np.savez(folder / "t.npz", images=np.zeros((9, 4, 4), np.uint8), labels=np.arange(9) % 3)
    for name in ("photos/a", "photos/b"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(folder / name / "i.png")
    for name in ("partly/in", "entered/in"):
        (folder / name).mkdir(parents=True)
        for path in (folder / name / "t.csv", folder / name / "../t.csv"):
            path.write_text(table_text(100))
    (folder / "locked").symlink_to(folder / "partly/in/t.csv")
    files = [folder / name for name in ("t.csv", "t.parquet", "t.feather", "t.npz", "photos/a/i.png")]
    expected = {str(path): path for path in files[:-1]} | {
        f"{folder}/photos": folder / "photos/a/i.png",
        f"{folder}/t.c*": folder / "t.csv",
        f"{folder}/locked": folder / "locked",
        f"{folder}/partly": folder / "partly/in",
        f"{folder}/partly/in": folder / "partly/in",
        f"{folder}/partly/in/t.csv": folder / "partly/in/t.csv",
        f"{folder}/partly/in/*.csv": folder / "partly/in/*.csv",
        f"{folder}/partly/*": folder / "partly/in",
        f"{folder}/partly/*/t.csv": folder / "partly/in",
        f"{folder}/partly/**/*.csv": folder / "partly/in",
        f"{folder}/entered": folder / "entered/in",
    }
    for path in files:
        path.chmod(0)
    (folder / "partly/in").chmod(0)
    (folder / "entered/in").chmod(0o311)  # gone through, but not listed
    allowed = [f"{folder}/entered/in/t.csv", f"{folder}/entered/*/t.csv", f"{folder}/part*/t.csv"]
    try:
        command = [sys.executable, "-c", AS_NOBODY, *allowed, *expected]
        messages = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=folder).stdout)
    finally:
        for name in ("partly/in", "entered/in"):
            (folder / name).chmod(0o755)
    for address, named in expected.items():
        for work in ("fingerprint", "prepare"):
            assert messages[f"{address} {work}"].startswith(f"{named}:"), address
            same_wording(messages[f"{address} {work}"])
    assert all(messages[f"{address} {work}"] == "done" for address in allowed for work in ("fingerprint", "prepare"))


def test_names_that_are_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text(table_text(100))
    monkeypatch.chdir(tmp_path)  # messages are cut, and its length differs
    for address in ("x" * 300, "x/" * 3000):
        with refuses(UserError):
            list_source(address)
    for address in (str(tmp_path / "a\0b"), str(tmp_path / "t.csv/u.csv")):
        with refuses(UserError):
            list_source(address)


def test_folders_behind_links_are_listed_and_loops_are_not(tmp_path: Path) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    for folder in (data / "in", other / "deep"):
        folder.mkdir(parents=True)
        (folder / "t.csv").write_text(table_text(100))
    (data / "link").symlink_to(other)
    (data / "twin").symlink_to(other)
    (data / "nowhere.csv").symlink_to(tmp_path / "gone.csv")
    (data / "itself").symlink_to(data / "itself")
    (data / "in/up").symlink_to(data)
    (other / "deep/across").symlink_to(data)
    expected = ["in/t.csv", "link/deep/t.csv", "twin/deep/t.csv"]
    for address in (
        str(data),
        f"{data}/",
        f"{data}/*",
        f"{data}/**",
        f"{data}/**/*.csv",
        f"{data}/[ilt]*",
        f"{data}/*/**",
    ):
        listing = list_source(address)
        assert [Path(file.uri).relative_to(data).as_posix() for file in listing.files] == expected, address
