"""Raw data and base sets in the stores of three clouds give what the same files give locally."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.faulty_stores import REMOTE, Remote
from tests.support.proving import first_few
from tests.support.tables import table_text
from tests.support.wording import refuses

pytestmark = pytest.mark.parametrize("remote", REMOTE, indirect=True)


def make(path: Path, seed: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        path.write_text(table_text(400, seed=seed))
    else:
        draw = np.random.default_rng(seed)
        pq.write_table(pa.table({"number": draw.normal(size=400), "y": draw.integers(0, 2, 400)}), path)


def upload(remote: Remote, directory: Path) -> None:
    for path in (result for result in directory.rglob("*") if result.is_file()):
        remote.storage.put(path.relative_to(directory).as_posix(), path.read_bytes())


@pytest.mark.parametrize("suffix", first_few(["csv", "parquet"]))
def test_files_give_the_same_rows_as_local_ones(remote: Remote, tmp_path: Path, suffix: str) -> None:
    for day in range(3):
        make(tmp_path / f"in/day={day}/part.{suffix}", day)
    (tmp_path / "in/_SUCCESS").touch()
    upload(remote, tmp_path / "in")
    remote.proxy.inject("GET", "503", "reset", "truncate", "500", "truncate")
    there = prepare(tmp_path / "a", f"{remote.base}/day=[12]", "y", DataConfig(), {})
    here = prepare(tmp_path / "b", f"{tmp_path}/in/day=[12]", "y", DataConfig(), {})
    assert len(remote.proxy.fired) == 5
    assert there.files["train-00000.rows"] == here.files["train-00000.rows"]
    assert there.read_json("card.json")["rows"]["read"] == 800


def test_a_file_that_changes_after_it_was_listed_is_one_line(remote: Remote, tmp_path: Path) -> None:
    make(tmp_path / "in/t.csv", 0)
    upload(remote, tmp_path / "in")
    listing = list_source(remote.base)
    before = fingerprint_source(listing, "y")
    assert fingerprint_source(list_source(remote.base), "y") == before
    make(tmp_path / "in/t.csv", int(remote.base.startswith("s3:")))  # for S3 the same bytes are the same object
    upload(remote, tmp_path / "in")
    with refuses(UserError, match=rf"^{remote.base}/t\.csv:"):
        prepare(tmp_path / "made", listing, "y", DataConfig(), {})
    assert fingerprint_source(list_source(remote.base), "y") != before


def test_an_earlier_set_is_taken_up_as_a_local_one(remote: Remote, tmp_path: Path) -> None:
    make(tmp_path / "in/0.csv", 0)
    data = str(tmp_path / "in")
    prepare(tmp_path / "earlier", data, "y", DataConfig(), {"source": fingerprint_source(list_source(data), "y")})
    make(tmp_path / "in/1.csv", 1)
    upload(remote, tmp_path / "earlier")
    output = [
        prepare(tmp_path / name, data, "y", DataConfig(earlier=address), {})
        for name, address in {"local": str(tmp_path / "earlier"), "remote": remote.base}.items()
    ]
    rows = [{name: record for name, record in each.files.items() if name.endswith(".rows")} for each in output]
    assert rows[0] == rows[1] and "train-00001.rows" in rows[1]


def test_nothing_there_and_a_wildcard_in_the_name_are_one_line(remote: Remote, tmp_path: Path) -> None:
    for address in (f"{remote.base}/none.csv", f"{remote.base.split('bucket')[0]}*/t.csv"):
        with refuses(UserError) as error:
            prepare(tmp_path / "made", address, "y", DataConfig(), {})
        assert "\n" not in str(error.value)
