"""Artifacts: directories whose manifest says what is in them, to the byte.

Every stage reads and writes artifacts and nothing else. The manifest is written last, so a directory without one is
not an artifact; it holds the size and the SHA-256 of every file (computed while writing) and the XXH3-128 of every
block (verified on every read: xxh3 runs at memory speed, SHA-256 does not). The SHA-256 of the manifest itself is the
artifact's fingerprint. A manifest holds no time of day, so that the same work gives the same fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from tasks.errors import UserError

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20


class DamagedArtifact(UserError):
    """What is stored is not what was written: a file is missing, cut or changed, and the message names it."""


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says of one file. ``blocks`` are XXH3-128 digests (hex) of ``block_bytes`` pieces."""

    size: int
    sha256: str
    block_bytes: int
    blocks: list[str]


class HashingFile:
    """A file being written, hashed on the way: one pass over the bytes, none to read them again."""

    def __init__(self, raw: BinaryIO, block_bytes: int) -> None:
        self._raw = raw
        self._block_bytes = block_bytes
        self._sha256 = hashlib.sha256()
        self._block = xxhash.xxh3_128()
        self._in_block = 0
        self._size = 0
        self._blocks: list[str] = []

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._raw.write(view)
        self._sha256.update(view)
        self._size += len(view)
        start = 0
        while start < len(view):
            piece = view[start : start + self._block_bytes - self._in_block]
            self._block.update(piece)
            self._in_block += len(piece)
            start += len(piece)
            if self._in_block == self._block_bytes:
                self._close_block()
        return len(view)

    def _close_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()
        self._in_block = 0

    def record(self) -> FileRecord:
        if self._in_block:
            self._close_block()
        return FileRecord(self._size, self._sha256.hexdigest(), self._block_bytes, self._blocks)


class ArtifactWriter:
    """Writes one artifact into ``directory``, which must be fresh; nothing is an artifact before :meth:`finish`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._records: dict[str, FileRecord] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST).exists():
            raise ValueError(f"{directory} already holds an artifact; artifacts are never written twice")

    @contextmanager
    def create(self, name: str, block_bytes: int = BLOCK_BYTES) -> Iterator[HashingFile]:
        """Open ``name`` (a relative POSIX path) for writing; its hashes are taken on the way."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as raw:
            file = HashingFile(raw, block_bytes)
            yield file
            raw.flush()
            os.fsync(raw.fileno())
        self._records[name] = file.record()

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def write_json(self, name: str, value: Any) -> None:
        self.write_bytes(name, canonical_json(value))

    def record(self, name: str) -> FileRecord:
        """What the manifest will say of a file that was written."""
        return self._records[name]

    def link(self, file: Path, name: str, record: FileRecord) -> None:
        """Take up ``file`` of another artifact, which is what ``record`` says and stays where it is."""
        link_or_copy(file, self.directory / name)
        self._records[name] = record

    def add(self, name: str) -> None:
        """Take up a file that a library wrote by itself."""
        self._records[name] = hash_file(self.directory / name)

    def note(self, name: str, record: FileRecord) -> None:
        """Count on a file that is what ``record`` says, and is put beside the others by someone else."""
        self._records[name] = record

    def finish(self, kind: str, made_by: Mapping[str, Any]) -> Artifact:
        """Write the manifest. ``made_by`` says what made it: config, code version, fingerprints of the inputs."""
        self.write_manifest(kind, made_by)
        return Artifact.open(self.directory, kind)

    def write_manifest(self, kind: str, made_by: Mapping[str, Any]) -> None:
        """:meth:`finish` for an artifact of which files are still elsewhere."""
        for path in sorted(self.directory.rglob("*")):
            name = path.relative_to(self.directory).as_posix()
            if path.is_file() and name not in self._records:
                self.add(name)
        manifest = {
            "format": FORMAT,
            "kind": kind,
            "made_by": made_by,
            "files": {name: vars(record) for name, record in sorted(self._records.items())},
        }
        partial = self.directory / (MANIFEST + ".partial")
        with partial.open("wb") as file:
            file.write(canonical_json(manifest))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.directory / MANIFEST)


@dataclass(frozen=True)
class Artifact:
    """An artifact that is there. Opening checks that every file exists with its size; reading checks the bytes."""

    directory: Path
    kind: str
    made_by: dict[str, Any]
    files: dict[str, FileRecord]
    fingerprint: str

    @classmethod
    def open(cls, directory: Path, kind: str) -> Artifact:
        """Raises ``DamagedArtifact`` if it is not a whole artifact of this ``kind`` and a format that we know."""
        path = directory / MANIFEST
        try:
            raw = path.read_bytes()
            manifest = json.loads(raw)
            found = manifest["kind"], manifest["format"]
            files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
            made_by = manifest["made_by"]
        except OSError as error:
            raise DamagedArtifact(f"{path}: {error.strerror}; this is not a finished artifact") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedArtifact(f"{path}: not a manifest of this format") from None
        if found != (kind, FORMAT):
            expected = f"{kind!r}, format {FORMAT}"
            raise DamagedArtifact(f"{path}: holds {found[0]!r}, format {found[1]}; expected {expected}")
        for name, record in files.items():
            try:
                size = (directory / name).stat().st_size
            except OSError:
                raise DamagedArtifact(f"{directory / name}: missing, though the manifest lists it") from None
            if size != record.size:
                raise DamagedArtifact(f"{directory / name}: {size} bytes, the manifest says {record.size}")
        return cls(directory, kind, made_by, files, hashlib.sha256(raw).hexdigest())

    def path(self, name: str) -> Path:
        return self.directory / name

    def check_block(self, name: str, index: int, data: Any) -> None:
        """Raise ``DamagedArtifact`` unless ``data`` is the block ``index`` of the file ``name``."""
        if xxhash.xxh3_128_hexdigest(data) != self.files[name].blocks[index]:
            raise DamagedArtifact(f"{self.directory / name}: block {index} is not what was written")

    def read_bytes(self, name: str) -> bytes:
        data = self.path(name).read_bytes()
        view, step = memoryview(data), self.files[name].block_bytes
        for index in range(len(self.files[name].blocks)):
            self.check_block(name, index, view[index * step : (index + 1) * step])
        return data

    def read_json(self, name: str) -> Any:
        return json.loads(self.read_bytes(name))

    def check(self) -> Artifact:
        """Read every byte against its block's digest. Raises ``DamagedArtifact``; returns itself."""
        for name, record in self.files.items():
            with self.path(name).open("rb") as file:
                for index in range(len(record.blocks)):
                    self.check_block(name, index, file.read(record.block_bytes))
        return self

    def check_sha256(self) -> Artifact:
        """Read every byte against the SHA-256 of its file, the proof against someone who meant it."""
        for name, record in self.files.items():
            if hash_file(self.path(name)).sha256 != record.sha256:
                raise DamagedArtifact(f"{self.directory / name}: its SHA-256 is not the manifest's")
        return self


def hash_file(path: Path, block_bytes: int = BLOCK_BYTES) -> FileRecord:
    with path.open("rb") as source, Path(os.devnull).open("wb") as nowhere:
        file = HashingFile(nowhere, block_bytes)
        while piece := source.read(block_bytes):
            file.write(piece)
    return file.record()


def link_or_copy(file: Path, target: Path) -> None:
    """The same bytes under another name: on the disk only once, where that can be."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def canonical_json(value: Any) -> bytes:
    """One spelling for one value, so that equal contents have equal hashes. NaN and infinity are refused."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
