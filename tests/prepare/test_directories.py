"""Directories whose files are not all data: tables with a log, hidden names, class folders at several depths."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.storage import s3
from tests.support.corpora import prepare_language, write_stories
from tests.support.faulty_s3 import FaultyS3
from tests.support.tables import Prepare, table_text
from tests.support.wording import refuses, same_wording

LOGS = {
    "delta": "_delta_log/00000000000000000000.json",
    "hudi": ".hoodie/hoodie.properties",
    "iceberg": "metadata/00000-1.metadata.json",
    "spark stream": "_spark_metadata/0",
}


def write(path: Path, content: str = "{}") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def names(address: Path | str) -> list[str]:
    listing = list_source(str(address))
    return [listing.relative(file) for file in listing.files]


def refusal(address: str) -> str:
    with pytest.raises(UserError) as refused:
        list_source(address)
    return refused.value.message


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS.keys())
class TestTablesWithALog:
    """Some of their files hold rows that were removed, so only their own readers know the rows."""

    def test_on_disk(self, log: str, tmp_path: Path) -> None:
        write(tmp_path / "lake/t/data/1.csv", table_text(20))
        write(tmp_path / "lake/t/year=2024/month=1/2.csv", table_text(20))
        write(tmp_path / "lake/t" / log)
        addresses = ["t", "t/", "t/data", "", "t/data/*.csv", "**/*.csv", "t/data/1.csv", "t/year=2024/month=1"]
        said = {refusal(f"{tmp_path}/lake/{address}") for address in addresses}
        assert len(said) == 1
        same_wording(said.pop())

    def test_a_table_elsewhere_is_no_matter(self, log: str, tmp_path: Path) -> None:
        write(tmp_path / "lake/t/1.csv", table_text(20))
        write(tmp_path / "lake/t" / log)
        write(tmp_path / "lake/plain/1.csv", table_text(20))
        assert names(tmp_path / "lake/plain") == ["1.csv"]
        assert names(f"{tmp_path}/lake/p*/*.csv") == ["plain/1.csv"]

    def test_in_a_store(self, log: str, store: FaultyS3) -> None:
        lake = f"s3://bucket/lake-{log.partition('/')[0]}"
        for key in ("t/data/1.csv", f"t/{log}", "plain/1.csv"):
            s3.client().put_object(Bucket="bucket", Key=f"{lake[12:]}/{key}", Body=table_text(20).encode())
        said = {refusal(f"{lake}{address}") for address in ("/t", "", "/t/**/*.csv")}
        assert len(said) == 1
        same_wording(said.pop())
        assert names(f"{lake}/plain") == ["1.csv"]
        assert names(f"{lake}/pl*/*.csv") == ["plain/1.csv"]


def write_images(folder: Path, count: int = 30) -> None:
    folder.mkdir(parents=True)
    draw = np.random.default_rng(len(str(folder)))
    for number in range(count):
        Image.fromarray(draw.integers(0, 256, (6, 5), np.uint8)).save(folder / f"{number:02d}.png")


class TestHiddenNames:
    def test_of_a_table_are_skipped_counted_and_named(self, prepared: Prepare, tmp_path: Path) -> None:
        for name in (
            "jan.csv",
            "_feb.csv",
            "_old/1.csv",
            "_old/2.csv",
            ".mar.csv",
            "._jan.csv",
            ".git/config",
            "Thumbs.db",
        ):
            write(tmp_path / "t" / name, table_text(100))
        write(tmp_path / "t/_SUCCESS", "")
        data = prepared(tmp_path / "t")
        assert data.card["rows"]["read"] == 100 and data.card["skipped"] == 4
        assert data.card["warnings"][0] == (
            "'.git', '.mar.csv', '_feb.csv' and 1 more were skipped, as their names start with '.' or '_'; "
            "rename them if they are data"
        )

    def test_without_any_there_is_no_count(self, prepared: Prepare) -> None:
        assert "skipped" not in prepared(table_text(100)).card

    def test_a_directory_with_nothing_else_names_them(self, tmp_path: Path) -> None:
        write(tmp_path / "t/_feb.csv", table_text(100))
        with refuses(UserError, match="_feb.csv"):
            list_source(str(tmp_path / "t"))

    def test_a_named_file_is_read(self, prepared: Prepare, tmp_path: Path) -> None:
        write(tmp_path / "_feb.csv", table_text(100))
        assert prepared(tmp_path / "_feb.csv").card["rows"]["read"] == 100

    def test_a_class_of_images_with_an_underscore_is_a_class(self, prepared: Prepare, tmp_path: Path) -> None:
        for name in ("cat", "_unknown_", ".cache"):
            write_images(tmp_path / "pets" / name)
        write(tmp_path / "pets/cat/Thumbs.db", "?")
        write(tmp_path / "pets/cat/_list", "?")
        data = prepared(tmp_path / "pets", target="")
        assert data.signature.classes == ("_unknown_", "cat") and data.card["rows"]["kept"] == 60
        assert data.card["skipped"] == 2 and "'.cache', 'cat/_list' were skipped" in data.card["warnings"][0]

    def test_a_class_of_texts_with_an_underscore_is_a_class(self, prepared: Prepare, tmp_path: Path) -> None:
        for name in ("_spam", "ham"):
            for number in range(40):
                write(tmp_path / f"mails/{name}/{number}.txt", f"{name} text number {number} with some words")
        assert prepared(tmp_path / "mails", target="").signature.classes == ("_spam", "ham")

    def test_documents_of_language_with_an_underscore_are_read(self, tmp_path: Path) -> None:
        stories = write_stories(tmp_path / "stories")
        for path in sorted(stories.glob("part-0/*.md")):
            path.rename(path.with_name(f"_{path.name}"))
        assert prepare_language(tmp_path / "made", stories).card["rows"]["read"] == 60

    def test_what_cannot_be_read_is_no_matter_if_hidden(self, prepared: Prepare, tmp_path: Path) -> None:
        write(tmp_path / "t/1.csv", table_text(100))
        (tmp_path / "t/_loop").symlink_to("_loop")
        (tmp_path / "t/.gone.csv").symlink_to("nowhere")
        write(tmp_path / "t/_secret/2.csv", table_text(100))
        (tmp_path / "t/_secret").chmod(0)
        try:
            assert prepared(tmp_path / "t").card["rows"]["read"] == 100
        finally:
            (tmp_path / "t/_secret").chmod(0o755)

    def test_in_a_store(self, store: FaultyS3, tmp_path: Path) -> None:
        for key in ("t/1.csv", "t/_2.csv", "t/_old/1.csv", "t/_old/2.csv", "t/_SUCCESS"):
            s3.client().put_object(Bucket="bucket", Key=key, Body=table_text(100).encode())
        card = prepare(tmp_path / "made", "s3://bucket/t", "y", DataConfig(), {}).read_json("card.json")
        assert (card["rows"]["read"], card["skipped"]) == (100, 2)


@pytest.mark.parametrize("folders", [("train/cat", "train/dog", "test"), ("cat", "dog/small", "dog/large")])
def test_class_folders_at_several_depths_are_refused(
    folders: tuple[str, ...], prepared: Prepare, tmp_path: Path
) -> None:
    for name in folders:
        write_images(tmp_path / "pets" / name, 3)
        write(tmp_path / "mails" / name / "1.txt", "some words")
    for data in ("pets", "mails"):
        with refuses(UserError):
            prepared(tmp_path / data, target="")
