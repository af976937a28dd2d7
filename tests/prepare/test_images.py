"""Images in class folders and in arrays: the same prepared format, hostile files quarantined, splits by content."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import SPLITS, PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import list_source
from slipstream.shared.source.resolved import fingerprint_source
from tests.support.limited import limited
from tests.support.mutations import NPY, NPY_2, with_header
from tests.support.tables import Prepare, everything
from tests.support.wording import refuses, same_wording

DRAW = np.random.default_rng(0)
#: A PNG of 40,000 x 40,000 pixels in a few bytes, whole up to its data.
BOMB_HEADER = struct.pack(">IIBBBBB", 40_000, 40_000, 8, 0, 0, 0, 0)


def encoded(pixels: np.ndarray, format: str = "PNG", **options: Any) -> bytes:
    image = pytest.importorskip("PIL.Image", reason="Pillow comes with `make`")
    sink = io.BytesIO()
    image.fromarray(pixels).save(sink, format, **options)
    return sink.getvalue()


def piece(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    """Two classes of 60 grey pictures of 6 x 5 pixels, all different, as PNG."""
    directory = tmp_path / "pets"
    for index, name in enumerate(("cat", "dog")):
        (directory / name).mkdir(parents=True)
        for number in range(60):
            pixels = DRAW.integers(0, 100, (6, 5), np.uint8) + np.uint8(100 * index)
            (directory / name / f"{number:03d}.png").write_bytes(encoded(pixels))
    return directory


def quarantined(data: PreparedData) -> dict[str, str]:
    rows = pq.read_table(data.artifact.path("quarantine.parquet")).to_pylist()
    return {Path(row["file"]).name: row["reason"] for row in rows}


class TestFolders:
    def test_class_folders_are_the_labels_and_nothing_is_lost(self, prepared: Prepare, folders: Path) -> None:
        data = prepared(folders, target="")
        signature = data.signature
        assert (signature.classes, signature.target, signature.inputs[0].shape) == (("cat", "dog"), "class", (1, 6, 5))
        rows = everything(data)
        assert len(rows) == 120 and data.card["rows"]["kept"] == 120
        np.testing.assert_array_equal(rows["image"].min(axis=(1, 2, 3)) >= 100, rows["target"] == 1)
        train = data.split("train")["image"].astype(float)
        np.testing.assert_allclose([signature.image_mean[0], signature.image_std[0]], [train.mean(), train.std()])

    def test_the_same_bytes_on_any_number_of_processes(
        self, prepared: Prepare, folders: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("slipstream.shared.source.images.CHUNK_BYTES", 7 * 30)
        one, two = prepared(folders, target=""), prepared(folders, target="", workers=2)
        monkeypatch.undo()
        whole = prepared(folders, target="")
        for name in ("train-00000.rows", "test-00000.rows", "signature.json", "card.json"):
            hashes = {data.artifact.files[name].sha256 for data in (one, two, whole)}
            assert len(hashes) == 1, name

    def test_adding_images_moves_none_into_another_split(self, prepared: Prepare, folders: Path) -> None:
        def by_split(data: PreparedData) -> dict[bytes, str]:
            return {row.tobytes(): split for split in SPLITS for row in data.split(split)["image"]}

        before = by_split(prepared(folders, target=""))
        for number in range(30):
            pixels = DRAW.integers(0, 256, (6, 5), np.uint8)
            (folders / "cat" / f"new-{number}.png").write_bytes(encoded(pixels))
        after = by_split(prepared(folders, target=""))
        assert len(after) == 150 and all(after[image] == split for image, split in before.items())

    def test_hostile_and_broken_files_are_set_aside_with_their_reasons(self, prepared: Prepare, folders: Path) -> None:
        whole = (folders / "cat" / "000.png").read_bytes()
        bomb = b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", BOMB_HEADER) + piece(b"IDAT", zlib.compress(b"\0" * 1000))
        flipped = bytearray(whole)
        flipped[-20] ^= 1
        bad = {
            "cut.png": whole[: len(whole) // 2],
            "empty.png": b"",
            "text.jpg": b"not a picture",
            "bomb.png": bomb,
            "flipped.png": bytes(flipped),
            "deep.png": encoded(DRAW.integers(0, 60_000, (6, 5)).astype(np.uint16)),
        }
        for name, raw in bad.items():
            (folders / "dog" / name).write_bytes(raw)
        with pytest.raises(UserError, match=r"6 of 126 rows .*data\.quarantine_limit"):
            prepared(folders, target="")
        data = prepared(folders, target="", quarantine_limit=0.1)
        result = quarantined(data)
        assert result.keys() == bad.keys() and data.card["rows"]["kept"] == 120
        assert "1600000000" in result["bomb.png"].replace(",", "") or "40000 x 40000 pixels" in result["bomb.png"]
        assert result["deep.png"].startswith("mode I;16") and "not a complete PNG or JPEG" in result["cut.png"]

    def test_copies_are_counted_share_a_split_and_contradictions_are_said(
        self, prepared: Prepare, folders: Path
    ) -> None:
        for number in range(20):
            raw = (folders / "cat" / f"{number:03d}.png").read_bytes()
            (folders / ("cat" if number < 15 else "dog") / f"copy-{number}.png").write_bytes(raw)
        data = prepared(folders, target="")
        warnings = " ".join(data.card["warnings"])
        same_wording(warnings)
        splits_of: dict[bytes, set[str]] = {}
        for split in SPLITS:
            for image in data.split(split)["image"]:
                splits_of.setdefault(image.tobytes(), set()).add(split)
        assert len(splits_of) == 120 and all(len(splits) == 1 for splits in splits_of.values())

    def test_colour_and_other_sizes_are_refused_by_name_or_made_alike(self, prepared: Prepare, folders: Path) -> None:
        (folders / "dog" / "large.jpg").write_bytes(encoded(DRAW.integers(0, 256, (12, 10, 3), np.uint8), "JPEG"))
        with refuses(UserError, match=r"large\.jpg:"):
            prepared(folders, target="")
        data = prepared(folders, target="", image_size=[8, 4], image_channels=3)
        assert data.signature.inputs[0].shape == (3, 8, 4) and len(data.signature.image_mean) == 3
        assert data.card["rows"]["kept"] == 121

    def test_pictures_are_turned_upright(self, prepared: Prepare, folders: Path) -> None:
        image = pytest.importorskip("PIL.Image")
        exif = image.Exif()
        exif[0x0112] = 6  # the camera was turned by a quarter
        lying = np.ascontiguousarray(np.rot90(DRAW.integers(0, 9, (6, 5), np.uint8)))
        (folders / "cat" / "turned.png").write_bytes(encoded(lying, exif=exif.tobytes()))
        assert prepared(folders, target="").card["rows"]["kept"] == 121

    def test_what_is_wrong_with_the_folders_is_said(self, prepared: Prepare, folders: Path, tmp_path: Path) -> None:
        cases: list[tuple[Path, dict[str, Any]]] = [
            (folders / "cat", {}),
            (folders, {"target": "y"}),
            (folders, {"group": "g"}),
            (folders, {"earlier": "p"}),
            (folders, {"image_size": [8]}),
            (folders, {"format": "parquet"}),
        ]
        for path, settings in cases:
            with refuses(UserError):
                prepared(path, **{"target": "", **settings})
        (folders / "notes.md").write_text("?")
        with refuses(UserError):
            prepared(folders, target="")
        one = tmp_path / "one"
        (one / "cat").mkdir(parents=True)
        (one / "cat" / "a.png").write_bytes(encoded(np.zeros((4, 4), np.uint8)))
        with refuses(UserError):
            prepared(one, target="")
        (one / "dog").mkdir()
        (one / "dog" / "b.png").write_bytes(encoded(np.ones((4, 4), np.uint8)))
        with refuses(UserError):
            prepared(one, target="")

    def test_moving_an_image_into_another_class_is_other_data(self, folders: Path) -> None:
        before = fingerprint_source(list_source(str(folders)))
        (folders / "cat" / "000.png").rename(folders / "dog" / "zzz.png")
        moved = fingerprint_source(list_source(str(folders)))
        (folders / "dog" / "zzz.png").rename(folders / "dog" / "000a.png")
        assert len({before, moved, fingerprint_source(list_source(str(folders)))}) == 3


class TestArrays:
    LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
        "channels last": lambda images: images,
        "channels first": lambda images: np.ascontiguousarray(images.transpose(0, 3, 1, 2)),
        "grey": lambda images: np.ascontiguousarray(images[..., 0]),
    }

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
    def test_arrays_are_read_whatever_the_order_of_their_axes(
        self, prepared: Prepare, tmp_path: Path, layout: str, save: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        images, labels = DRAW.integers(0, 256, (90, 6, 5, 3), np.uint8), np.arange(90) % 12
        save(tmp_path / "a.npz", images=self.LAYOUTS[layout](images), labels=labels)
        monkeypatch.setattr("slipstream.shared.source.images.CHUNK_BYTES", 1000)
        data = prepared(tmp_path / "a.npz", target="", split={"seed": 1})
        channels = 1 if layout == "grey" else 3
        rows = everything(data)
        assert data.signature.inputs[0].shape == (channels, 6, 5) and len(rows) == 90
        assert data.signature.classes == tuple(str(n) for n in range(12))
        by_bytes = {image.tobytes(): label for image, label in zip(rows["image"], rows["target"], strict=True)}
        expected = images.transpose(0, 3, 1, 2)[:, :channels]
        assert [by_bytes[np.ascontiguousarray(image).tobytes()] for image in expected] == labels.tolist()

    def test_several_files_are_one_set_and_labels_may_be_texts(self, prepared: Prepare, tmp_path: Path) -> None:
        (tmp_path / "parts").mkdir()
        for part, names in enumerate((["cat", "dog"], ["dog", "owl"])):
            images = DRAW.integers(0, 256, (60, 4, 4), np.uint8)
            np.savez(tmp_path / "parts" / f"{part}.npz", x=images, animal=np.array(names)[np.arange(60) % 2])
        data = prepared(tmp_path / "parts", target="animal")
        assert data.signature.classes == ("cat", "dog", "owl") and data.signature.target == "animal"
        assert data.card["classes"]["dog"] | {} and sum(data.card["classes"]["dog"].values()) == 60

    CASES: dict[str, dict[str, Any]] = {
        "no labels": {"images": np.zeros((9, 4, 4), np.uint8)},
        "floats": {"images": np.zeros((9, 4, 4)), "labels": np.arange(9)},
        "five channels": {"images": np.zeros((9, 4, 4, 5), np.uint8), "labels": np.arange(9)},
        "too few labels": {"images": np.zeros((9, 4, 4), np.uint8), "labels": np.arange(8)},
        "pickled labels": {"images": np.zeros((9, 4, 4), np.uint8), "labels": np.array([{}] * 9, object)},
        "column by column": {"images": np.asfortranarray(np.zeros((9, 4, 4), np.uint8)), "labels": np.arange(9)},
    }

    @pytest.mark.parametrize("case", CASES)
    def test_other_arrays_are_refused(self, prepared: Prepare, tmp_path: Path, case: str) -> None:
        np.savez(tmp_path / "a.npz", **self.CASES[case])
        with refuses(UserError):
            prepared(tmp_path / "a.npz", target="")

    @pytest.mark.parametrize("damage", ["cut", "flipped", "text"])
    def test_damaged_arrays_are_named(self, prepared: Prepare, tmp_path: Path, damage: str) -> None:
        path = tmp_path / "a.npz"
        np.savez(path, images=DRAW.integers(0, 256, (90, 6, 5), np.uint8), labels=np.arange(90) % 3)
        raw = bytearray(path.read_bytes())
        raw[1000] ^= 1
        damaged: dict[str, bytes | bytearray] = {"cut": raw[:-200], "flipped": bytes(raw), "text": b"images"}
        path.write_bytes(damaged[damage])
        with refuses(UserError, match=r"a\.npz:"):
            prepared(path, target="")

    #: Array, its header, its method of compression in zip, and the start of its format.
    HOSTILE: dict[str, tuple[str, bytes, int, bytes]] = {
        "too many labels": ("labels", b"{'descr': '<i8', 'fortran_order': False, 'shape': (10000000000000,)}", 0, NPY),
        "long labels": ("labels", b"{'descr': '<U9999999', 'fortran_order': False, 'shape': (90,)}", 8, NPY),
        "large images": ("images", b"{'descr': '|u1', 'fortran_order': False, 'shape': (90, 999999, 999999)}", 0, NPY),
        "an open bracket": ("images", b"{(", 0, NPY),
        "a long header": ("labels", b"{", 8, NPY_2),
        "another method": ("labels", b"{'descr': '<i8', 'fortran_order': False, 'shape': (90,)}", 14, NPY),
    }

    @pytest.mark.parametrize("case", HOSTILE)
    def test_hostile_arrays_take_no_memory(self, prepared: Prepare, tmp_path: Path, case: str) -> None:
        name, header, method, start = self.HOSTILE[case]
        path = tmp_path / "a.npz"
        np.savez(path, images=DRAW.integers(0, 256, (90, 6, 5), np.uint8), labels=np.arange(90) % 3)
        path.write_bytes(with_header(path.read_bytes(), f"{name}.npy", header, start, method))
        with limited(more_bytes=256 << 20), refuses(UserError, match=r"a\.npz:"):
            prepared(path, target="")


def test_the_digits_keep_their_splits(tmp_path: Path) -> None:
    prepare(tmp_path / "p", "", "", DataConfig(), {})
    assert {split: len(PreparedData.open(tmp_path / "p").split(split)) for split in SPLITS} == {
        "train": 1286,
        "validation": 246,
        "test": 265,
    }


def test_a_target_of_data_that_nobody_named(tmp_path: Path) -> None:
    with refuses(UserError):
        prepare(tmp_path / "p", "", "income", DataConfig(), {})
    assert not (tmp_path / "p/manifest.json").exists()
