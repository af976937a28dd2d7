"""Untrusted manifests name no file outside of their artifact, neither when it is opened nor when it is fetched."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from slipstream.pipeline.prepare.base_set import BaseSet, fetch_without_rows
from slipstream.pipeline.promote.store import PromotionPointer, Registry
from slipstream.pipeline.train.checkpoint import restore
from slipstream.pipeline.train.checkpoint.home import CheckpointName
from slipstream.shared.artifacts.format import MANIFEST, Artifact, ArtifactWriter, DamagedArtifact, hash_file
from slipstream.shared.artifacts.prepared.streamed import artifact_size, make_stub
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.history import ProfileHistory
from slipstream.shared.interconnect.profile import FILE as PROFILE_FILE
from slipstream.shared.storage import storage_for
from slipstream.shared.storage.names import name_fault
from tests.support.hostile_names import HOSTILE, NAMES, MemoryBucket, memory, outside
from tests.support.network_profiles import network_profile
from tests.support.wording import refuses

__all__ = ["memory"]
RECORD = {"size": 4, "sha256": "0" * 64, "block_bytes": 4, "blocks": ["0" * 32]}


def manifest(*names: str, kind: str = "test", **made_by: Any) -> bytes:
    files = dict.fromkeys(names, RECORD)
    return json.dumps({"format": 1, "kind": kind, "made_by": made_by, "files": files}).encode()


@given(name=NAMES)
def test_an_opened_artifact_has_files_below_its_directory_only(name: str) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch, "artifact")
        place.mkdir()
        (place / MANIFEST).write_bytes(manifest(name))
        if name_fault(name) == "":
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_bytes(b"1234")
            opened = Artifact.open(place, "test")
            assert opened.path(name).resolve().is_relative_to(place.resolve())
        else:
            with pytest.raises(DamagedArtifact, match=MANIFEST):
                Artifact.open(place, "test")


@pytest.mark.parametrize("name", HOSTILE)
def test_neither_writer_nor_artifact_takes_such_a_name(name: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("1234")
    writer = ArtifactWriter(tmp_path / "artifact")
    for write in (
        lambda: writer.write_bytes(name, b"x"),
        lambda: writer.link(file, name, hash_file(file)),
        lambda: writer.note(name, hash_file(file)),
        lambda: writer.add(name),
    ):
        with refuses(UserError):
            write()
    written = writer.finish("test", {})
    assert not written.files
    with refuses(DamagedArtifact):
        written.path(name)


@pytest.mark.parametrize("name", ["../evil", "/proc/evil", "a/../../evil.rows", "..\\evil.rows", "../evil.rows"])
def test_what_is_fetched_by_a_manifest_stays_where_it_is_fetched_to(
    name: str, memory: MemoryBucket, tmp_path: Path
) -> None:
    """The rows of prepared data, which stay in the store, and all that does not."""
    memory.objects = {f"set/{MANIFEST}": manifest("card.json", name, kind="prepare"), "set/card.json": b"1234"}
    memory.objects[f"set/{name}"] = b"evil"
    target = tmp_path / "deep" / "target"
    for work in (
        lambda: make_stub("gs://bucket/set", target),
        lambda: artifact_size("gs://bucket/set"),
        lambda: fetch_without_rows("gs://bucket/set", target),
        lambda: BaseSet.open("gs://bucket/set"),
    ):
        with refuses(UserError):
            work()
    assert not outside(tmp_path, target) or list(outside(tmp_path, target)) == [str(tmp_path / "deep")]
    del memory.objects[f"set/{name}"]  # so that the listing is fine, and the manifest alone is not
    with refuses(UserError):
        BaseSet.open("gs://bucket/set")


@pytest.mark.parametrize("name", ["../evil", "../evil.safetensors", "/proc/evil.safetensors", "a\\b"])
@pytest.mark.parametrize("store", ["gs://bucket/home", "local"])
def test_a_checkpoint_that_names_files_elsewhere_is_damaged(
    name: str, store: str, memory: MemoryBucket, tmp_path: Path
) -> None:
    """So that it is passed over, as any damaged one is."""
    home = storage_for(str(tmp_path / "home") if store == "local" else store)
    home.put(f"{CheckpointName(1, 2)}/{MANIFEST}", manifest(name, kind="checkpoint", identity={}, run=""))
    target = tmp_path / "deep" / "target"
    target.mkdir(parents=True)
    before = outside(tmp_path, target)
    with refuses(DamagedArtifact, match=f"{MANIFEST}:"):
        restore.download_checkpoint(
            restore.Candidate(home, CheckpointName(1, 2)), restore.ResumePolicy({}), str(target)
        )
    assert outside(tmp_path, target) == before


@pytest.mark.parametrize("version", ["../evil", "..", "/etc", "a/../..", "a\\b", ""])
@pytest.mark.parametrize("store", ["gs://bucket/registry", "local"])
def test_a_registry_fetches_versions_of_its_own_only(
    version: str, store: str, memory: MemoryBucket, tmp_path: Path
) -> None:
    uri = str(tmp_path / "registry") if store == "local" else store
    pointer: dict[str, Any] = {"number": 1, "version": version, "manifest": "", "why": "", "at": "", "run": ""}
    storage_for(uri).put("promoted/00000001.json", json.dumps(pointer).encode())
    registry = Registry(uri)
    with refuses(UserError):
        registry.promoted()
    before = outside(tmp_path, tmp_path / "model")
    with refuses(UserError):
        registry.fetch(PromotionPointer(**pointer), tmp_path / "model")
    assert outside(tmp_path, tmp_path / "model") == before and not (tmp_path / "model").exists()


def test_a_registrys_listing_writes_nowhere_else(memory: MemoryBucket, tmp_path: Path) -> None:
    memory.objects["r/promoted/00000001.json"] = json.dumps(
        {"number": 1, "version": "ab" * 8, "manifest": "cd" * 32, "why": "", "at": "", "run": ""}
    ).encode()
    memory.objects[f"r/versions/{'ab' * 8}/../../../../evil"] = b"evil"
    registry = Registry("gs://bucket/r")
    served = registry.promoted()
    assert served is not None
    with refuses(UserError):
        registry.fetch(served, tmp_path / "deep/model")
    assert not list(tmp_path.rglob("evil"))


def test_the_history_of_the_interconnect_reads_names_of_its_own_only(memory: MemoryBucket, tmp_path: Path) -> None:
    history = ProfileHistory("gs://bucket/history", network_profile().fingerprint)
    below = history.address.removeprefix("gs://bucket/")
    memory.objects = {f"{below}/..\\evil/{MANIFEST}": b"{}", f"{below}/..\\evil/{PROFILE_FILE}": b"{}"}
    for work in (history.names, history.latest, lambda: history.fetch("..\\evil"), lambda: history.fetch("../x")):
        with refuses(UserError):
            work()
