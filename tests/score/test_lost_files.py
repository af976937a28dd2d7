"""A published table whose files are lost or changed is found, and made again."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score import command, publish
from slipstream.pipeline.score.publish import list_publications, score_data
from slipstream.shared.artifacts.results.scoring import Publication
from slipstream.shared.source.config import DataConfig
from slipstream.shared.storage.local import LocalStorage
from tests.support.proving import diagonal
from tests.support.scoring import KEEP, bytes_below, table_of, write_files


def score(registry: Registry, tmp_path: Path) -> tuple[Publication, bool]:
    data = tmp_path / "in"
    if not data.exists():
        write_files(data, files=3, of_each=100)
    return score_data(registry.uri, str(data), str(tmp_path / "out"), DataConfig(), KEEP, workers=1)


def names_of(output: Path) -> list[str]:
    return sorted(path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file())


@pytest.mark.parametrize(("lost", "how"), diagonal(["part-*", "_quarantine/*", "_manifest-*"], ["missing", "cut"]))
def test_lost_files_are_put_back(served: Registry, tmp_path: Path, lost: str, how: str) -> None:
    first, _ = score(served, tmp_path)
    output = tmp_path / "out"
    before, names = bytes_below(output), names_of(output)
    (path,) = (output / "tables" / first.key).glob(lost)
    path.unlink() if how == "missing" else path.write_bytes(path.read_bytes()[:-1])
    again, new = score(served, tmp_path)
    assert (again, new) == (first, False)
    assert bytes_below(output) == before and names_of(output) == names
    assert score(served, tmp_path) == (first, False)


def test_other_bytes_are_published_under_the_next_number(
    served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As by another type of processor."""
    first, _ = score(served, tmp_path)
    output = tmp_path / "out"
    (lost,) = (output / "tables" / first.key).glob("part-*")
    lost.unlink()
    monkeypatch.setattr("slipstream.pipeline.score.part.COMPRESSION", "snappy")
    second, new = score(served, tmp_path)
    assert new and second.key == first.key and second.manifest != first.manifest
    assert (output / f"published/{first.key}-2.json").exists()
    said = capfd.readouterr().err
    assert lost.name in said and "number 2" in said
    assert list_publications(str(output)) == [second] and table_of(output, second).num_rows == 300
    assert score(served, tmp_path) == (second, False)
    for path in (output / "tables" / first.key).glob("part-*"):
        path.unlink()
    monkeypatch.undo()
    third, new = score(served, tmp_path)
    assert new and third.manifest == first.manifest and (output / f"published/{first.key}-3.json").exists()


def test_a_manifest_that_was_changed_is_noticed(served: Registry, tmp_path: Path) -> None:
    first, _ = score(served, tmp_path)
    (path,) = (tmp_path / "out/tables" / first.key).glob("_manifest-*")
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"scored":300', b'"scored":299').replace(b'"scored": 300', b'"scored": 299'))
    assert path.read_bytes() != content
    assert score(served, tmp_path) == (first, False)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == first.manifest


def test_a_damaged_pointer_of_another_key_is_one_warning(
    served: Registry, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pointers = tmp_path / "out/published"
    pointers.mkdir(parents=True)
    for digit in "abc":
        (pointers / f"{digit * 16}.json").write_text("{")
    first, new = score(served, tmp_path)
    assert new
    assert list_publications(str(tmp_path / "out")) == [first]
    (line,) = capfd.readouterr().err.splitlines()
    assert "aaaaaaaaaaaaaaaa.json" in line and "2 more" in line


def test_a_damaged_pointer_of_the_same_key_is_superseded(served: Registry, tmp_path: Path) -> None:
    first, _ = score(served, tmp_path)
    (tmp_path / f"out/published/{first.key}.json").write_text("{}")
    second, new = score(served, tmp_path)
    assert new and second.manifest == first.manifest
    assert list_publications(str(tmp_path / "out")) == [second]


def test_files_of_a_killed_second_run_are_removed(served: Registry, tmp_path: Path) -> None:
    first, _ = score(served, tmp_path)
    names = names_of(tmp_path / "out")
    (tmp_path / f"out/tables/{first.key}/part-000000-0123456789abcdef.parquet").write_bytes(b"of a killed run")
    assert score(served, tmp_path) == (first, False)
    assert names_of(tmp_path / "out") == names


def noted(names: list[str], original: Callable[..., Any]) -> Callable[..., Any]:
    """``original``, which also notes its address or key."""

    def call(*arguments: Any) -> Any:
        names.append(next(each for each in arguments if isinstance(each, str)))
        return original(*arguments)

    return call


def test_reuse_reads_one_pointer_and_lists_twice(
    served: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = score(served, tmp_path)
    content = json.loads((tmp_path / f"out/published/{first.key}.json").read_text())
    for number in range(50):
        key = f"{number:016x}"
        (tmp_path / f"out/published/{key}.json").write_text(json.dumps({**content, "key": key}))
    read: list[str] = []
    get = LocalStorage.get
    monkeypatch.setattr(LocalStorage, "get", noted(read, get))
    listed: list[str] = []
    list_names = publish.list_names
    monkeypatch.setattr(publish, "list_names", noted(listed, list_names))
    assert score(served, tmp_path) == (first, False)
    assert [key for key in read if key.startswith("published/")] == [f"published/{first.key}.json"]
    assert len(listed) == 1
    read.clear()
    data = replace(KEEP, drift=0.3)
    _, new = score_data(served.uri, str(tmp_path / "in"), str(tmp_path / "out"), DataConfig(), data, workers=1)
    assert new and not [key for key in read if key.startswith("published/")]


def test_the_command_verifies_the_bytes(served: Registry, tmp_path: Path) -> None:
    first, _ = score(served, tmp_path)
    output = str(tmp_path / "out")
    assert CliRunner().invoke(command.main, [output, "--verify"], catch_exceptions=False).exit_code == 0
    (path,) = (tmp_path / "out/tables" / first.key).glob("part-*")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert CliRunner().invoke(command.main, [output], catch_exceptions=False).exit_code == 0
    found = CliRunner().invoke(command.main, [output, "--verify"])
    assert path.name in found.output and "delete it" in found.output
    path.unlink()
    found = CliRunner().invoke(command.main, [output])
    assert path.name in found.output and "missing" in found.output
