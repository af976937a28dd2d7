"""The directory of a scored table, new or of an earlier version, is a table to readers of Parquet."""

import hashlib
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
from click.testing import CliRunner

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score import command
from slipstream.pipeline.score.publish import find_publication, list_publications, read_manifest, score_data
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.results.scoring import Publication
from slipstream.shared.source.config import DataConfig
from tests.support.scoring import KEEP, bytes_below, write_files


def score(registry: Registry, tmp_path: Path) -> tuple[Publication, bool]:
    """The publication of 299 scored rows and a quarantined one."""
    data = tmp_path / "in"
    if not data.exists():
        lines = (write_files(data, files=3, of_each=100) / "01.csv").read_text().splitlines()
        (data / "01.csv").write_text("\n".join([*lines[:-1], lines[-1] + ",too,wide"]) + "\n")
    reading = DataConfig(quarantine_limit=0.1)
    return score_data(registry.uri, str(data), str(tmp_path / "out"), reading, KEEP, workers=1)


def as_published_before(output: Path, publication: Publication) -> Publication:
    """Rename the files of a table, and write manifest and pointer, as versions before the hidden names did."""
    table = output / "tables" / publication.key
    (aside,), (hidden,) = (table / "_quarantine").iterdir(), table.glob("_manifest-*")
    manifest = json.loads(hidden.read_bytes())
    manifest["files"][f"set-aside-{aside.name}"] = manifest["files"].pop(f"_quarantine/{aside.name}")
    aside.rename(table / f"set-aside-{aside.name}")
    aside.parent.rmdir()
    hidden.unlink()
    content = canonical_json(manifest)
    digest = hashlib.sha256(content).hexdigest()
    (table / f"manifest-{digest[:16]}.json").write_bytes(content)
    pointer = output / f"published/{publication.key}.json"
    pointer.write_text(json.dumps({**json.loads(pointer.read_text()), "manifest": digest}))
    return Publication(**json.loads(pointer.read_text()))


def fetched(output: Path, copy: Path) -> Path:
    found = CliRunner().invoke(command.main, [str(output), "--verify", "--fetch", str(copy)], catch_exceptions=False)
    assert found.exit_code == 0, found.output
    return copy


def by_duckdb(directory: Path) -> pd.DataFrame:
    duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed")
    return duckdb.sql(f"SELECT * FROM '{directory}/*.parquet'").df()


READERS = {
    "pandas": pd.read_parquet,
    "pyarrow": lambda directory: pa.dataset.dataset(directory, format="parquet").to_table().to_pandas(),
    "duckdb": by_duckdb,
}


@pytest.mark.parametrize("reader", READERS)
def test_the_directory_of_a_table_is_read(served: Registry, tmp_path: Path, reader: str) -> None:
    publication, _ = score(served, tmp_path)
    table = tmp_path / "out/tables" / publication.key
    expected = pd.concat(map(pd.read_parquet, sorted(table.glob("part-*.parquet"))), ignore_index=True)
    assert len(expected) == 299 and expected["label"].notna().all()
    pd.testing.assert_frame_equal(READERS[reader](table), expected)
    copy = fetched(tmp_path / "out", tmp_path / "copy")
    pd.testing.assert_frame_equal(READERS[reader](copy), expected)
    earlier = as_published_before(tmp_path / "out", publication)
    assert list_publications(str(tmp_path / "out")) == [earlier]
    pd.testing.assert_frame_equal(READERS[reader](fetched(tmp_path / "out", tmp_path / "again")), expected)


def test_other_files_have_names_that_spark_skips(served: Registry, tmp_path: Path) -> None:
    """Hidden are names that begin with ``_`` and hold no ``=``, of files and of directories."""
    publication, _ = score(served, tmp_path)
    copy = fetched(tmp_path / "out", tmp_path / "copy")
    for directory in (tmp_path / "out/tables" / publication.key, copy):
        visible = [path.name for path in directory.iterdir() if not path.name.startswith("_") or "=" in path.name]
        assert visible and all(name.startswith("part-") for name in visible)
    assert hashlib.sha256((copy / "_manifest.json").read_bytes()).hexdigest() == publication.manifest
    (aside,) = (copy / "_quarantine").iterdir()
    assert pd.read_parquet(aside)["reason"].tolist() == ["10 fields, expected 8"]


def test_a_table_of_an_earlier_version_is_found(served: Registry, tmp_path: Path) -> None:
    publication, _ = score(served, tmp_path)
    output = tmp_path / "out"
    earlier, before = as_published_before(output, publication), bytes_below(output)
    assert score(served, tmp_path) == (earlier, False) and bytes_below(output) == before
    (part,) = (output / "tables" / publication.key).glob("part-*")
    part.unlink()
    assert score(served, tmp_path) == (earlier, False), "the same part is written again"
    assert bytes_below(output) == before
    next((output / "tables" / publication.key).glob("set-aside-*")).unlink()
    again, new = score(served, tmp_path)
    assert new and again.manifest == publication.manifest and find_publication(str(output), again.key) == again
    assert bytes_below(output).keys() == {f"tables/{again.key}/{name}" for name in names_of(output, again)}


def names_of(output: Path, publication: Publication) -> set[str]:
    return {*read_manifest(str(output), publication).files, f"_manifest-{publication.manifest[:16]}.json"}
