"""Artifacts are read back byte for byte; damage is named."""

import hashlib
import json
from pathlib import Path

import pytest
import xxhash

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact, hash_file
from tests.support.wording import refuses

PAYLOAD = bytes(range(256)) * 40  # 10,240 bytes: three blocks of 4,096, the last one short


def write(directory: Path) -> Artifact:
    writer = ArtifactWriter(directory)
    with writer.create("a/rows.bin", block_bytes=4096) as file:
        for start in range(0, len(PAYLOAD), 1000):  # pieces that straddle the blocks
            file.write(PAYLOAD[start : start + 1000])
    writer.write_json("facts.json", {"b": 1, "a": "é"})
    (directory / "library.txt").write_text("written by a library")
    return writer.finish("test", {"by": "a test"})


def test_hashes_taken_while_writing_are_those_of_the_bytes_on_disk(tmp_path: Path) -> None:
    artifact = write(tmp_path / "x")
    record = artifact.files["a/rows.bin"]
    assert record.size == 10_240 and record.sha256 == hashlib.sha256(PAYLOAD).hexdigest()
    assert record.blocks == [xxhash.xxh3_128_hexdigest(PAYLOAD[i : i + 4096]) for i in (0, 4096, 8192)]
    assert record == hash_file(tmp_path / "x/a/rows.bin", block_bytes=4096)
    assert set(artifact.files) == {"a/rows.bin", "facts.json", "library.txt"}
    assert artifact.check().check_sha256().read_bytes("a/rows.bin") == PAYLOAD
    assert artifact.read_json("facts.json") == {"a": "é", "b": 1}


def test_the_same_content_has_the_same_fingerprint_and_other_content_another(tmp_path: Path) -> None:
    assert write(tmp_path / "x").fingerprint == write(tmp_path / "y").fingerprint
    other = ArtifactWriter(tmp_path / "z").finish("test", {"by": "a test"})
    assert other.fingerprint != write(tmp_path / "w").fingerprint


@pytest.mark.parametrize("position", [0, 4095, 4096, 10_239])
def test_one_flipped_bit_anywhere_is_found_and_named(tmp_path: Path, position: int) -> None:
    artifact = write(tmp_path / "x")
    path = tmp_path / "x/a/rows.bin"
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    reopened = Artifact.open(tmp_path / "x", "test")  # sizes still agree
    for read in (reopened.check, reopened.check_sha256, lambda: reopened.read_bytes("a/rows.bin")):
        with pytest.raises(DamagedArtifact, match=r"rows\.bin"):
            read()
    with pytest.raises(DamagedArtifact, match=f"block {position // 4096} "):
        artifact.check()


def test_what_a_killed_process_left_is_replaced_and_nothing_is_written_twice(tmp_path: Path) -> None:
    killed = ArtifactWriter(tmp_path)
    with pytest.raises(KeyboardInterrupt), killed.create("weights") as file:
        file.write(b"half of th")
        raise KeyboardInterrupt
    assert (tmp_path / "weights").exists()
    writer = ArtifactWriter(tmp_path)
    writer.write_bytes("weights", b"whole")
    with pytest.raises(ValueError, match="weights"):
        writer.write_bytes("weights", b"again")
    assert writer.finish("kind", {}).read_bytes("weights") == b"whole"


def test_a_directory_is_no_artifact_before_its_manifest_and_not_after_a_cut(tmp_path: Path) -> None:
    writer = ArtifactWriter(tmp_path / "x")
    writer.write_bytes("a", b"1234")
    with refuses(DamagedArtifact):
        Artifact.open(tmp_path / "x", "test")
    writer.finish("test", {})
    with refuses(DamagedArtifact):
        Artifact.open(tmp_path / "x", "other")
    (tmp_path / "x/a").write_bytes(b"123")
    with refuses(DamagedArtifact):
        Artifact.open(tmp_path / "x", "test")
    (tmp_path / "x/a").unlink()
    with pytest.raises(DamagedArtifact, match="missing"):
        Artifact.open(tmp_path / "x", "test")


@pytest.mark.parametrize("most", [2**41, 2**64, 10**30])
def test_blocks_larger_than_anything_are_damage(most: int, tmp_path: Path) -> None:
    write(tmp_path / "x")
    path = tmp_path / "x/manifest.json"
    manifest = json.loads(path.read_text())
    for record in manifest["files"].values():
        record |= {"block_bytes": most, "blocks": record["blocks"][:1]}
    path.write_text(json.dumps(manifest))
    with pytest.raises(DamagedArtifact, match="manifest"):
        Artifact.open(tmp_path / "x", "test").check()


def test_a_manifest_of_a_newer_format_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "x")
    path = tmp_path / "x/manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 2}))
    with refuses(DamagedArtifact):
        Artifact.open(tmp_path / "x", "test")
