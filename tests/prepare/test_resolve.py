"""Raw data is resolved once and passed to all preparing processes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from slipstream.pipeline.prepare.base_set import BaseSet
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.resolve import SourceToPrepare, resolve_source
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import SourceFile, list_source
from tests.support.shares import on_several

TABLE = DataConfig(id="id")


def resolved(data: Path | str, target: str = "", config: DataConfig = DataConfig()) -> SourceToPrepare:  # noqa: B008
    return resolve_source(list_source(str(data)), target, config)


def write_table(path: Path, first: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(first)
    lines = (f"{first + row},{x:.3f},{'ab'[row % 2]}\n" for row, x in enumerate(draw.normal(size=300)))
    path.write_text("id,x,y\n" + "".join(lines))
    return path


@pytest.mark.parametrize(
    ("names", "kind", "format", "target"),
    [
        (["t.csv", "empty.csv"], "text", "csv", "y"),
        (["t.jsonl"], "text", "json", "y"),
        (["t.parquet"], "columnar", "parquet", "y"),
        (["a/1.txt", "b/2.txt"], "documents", "text", ""),
        (["a/1.png", "b/2.jpg"], "images", "images", ""),
        (["t.npz"], "images", "arrays", ""),
    ],
)
def test_extensions_and_folders_say_what_it_is(
    tmp_path: Path, names: list[str], kind: str, format: str, target: str
) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"" if name.startswith("empty") else b"some")
    source = resolved(tmp_path, target)
    assert (source.kind, source.format) == (kind, format)
    assert [file.name for file in source.files] == [Path(name).name for name in names if "empty" not in name]
    assert (source.target, source.config.types) == (
        ("class", {"text": "document"}) if kind == "documents" else (target, {})
    )
    assert resolved("").format == "digits" and resolved("").kind == "images"


def test_files_beside_a_base_set_are_compared_with_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(tmp_path / "data/1.csv", 0)
    prepare(tmp_path / "base", str(tmp_path / "data"), "y", TABLE, {})
    config = replace(TABLE, earlier=str(tmp_path / "base"))
    assert resolved(tmp_path / "data", "y", config).kind == "nothing new"
    new = write_table(tmp_path / "data/2.csv", 300)
    compared: list[dict[str, SourceFile]] = []
    unseen = BaseSet.unseen

    def counted(base: BaseSet, files: dict[str, SourceFile], target: str) -> list[SourceFile]:
        compared.append(files)
        return unseen(base, files, target)

    monkeypatch.setattr(BaseSet, "unseen", counted)
    source = resolved(tmp_path / "data", "y", config)
    assert [file.uri for file in source.files] == [str(new)] and source.config.types["x"] == "number"
    on_several(tmp_path / "pods", str(tmp_path / "data"), 2, config)
    assert len(compared) == 2, "several machines compared the files again"
