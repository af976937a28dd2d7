"""Artifacts: directories with a manifest that lists the size and the digests of every file.

All inputs and outputs of stages are artifacts. The manifest is written last, so a directory without one is unfinished.
It holds every file's size and SHA-256, computed while writing, and every block's XXH3-128. Reads verify XXH3, which is
as fast as memory, unlike SHA-256. The manifest's SHA-256 is the artifact's fingerprint. Manifests hold no timestamps,
so equal work has equal fingerprints.

The fingerprint also depends on ``made_by``, which includes the code version. Keys and identities therefore use
:attr:`Artifact.content`: the names and digests of the files that decide the result.
"""

from __future__ import annotations

import hashlib
import json
import os
import reprlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.errors import UserError
from slipstream.shared.stages import STAGES
from slipstream.shared.storage.names import check_name, path_below
from slipstream.shared.untrusted_files import RefusedFile, link_or_copy, open_untrusted, read_untrusted

FORMAT = 1
MANIFEST = "manifest.json"
BLOCK_BYTES = 4 << 20
#: Largest block size in bytes that a manifest may state. Larger than any written block, and safe in 64-bit arithmetic.
LARGEST_BLOCK = 1 << 40
#: Largest manifest in bytes, enough for an artifact of 20 TB.
LONGEST_MANIFEST = 256 << 20


class DamagedArtifact(UserError):
    """Error for a missing, truncated or changed file of an artifact; the message names the file."""


@dataclass(frozen=True)
class FileRecord:
    """Manifest entry of one file.

    ``blocks`` are the XXH3-128 digests (hex) of its consecutive blocks of ``block_bytes`` bytes; the last may be
    shorter.
    """

    size: int
    sha256: str
    block_bytes: int
    blocks: list[str]

    def consistent(self) -> bool:
        """Return True if all fields have their types and there is one digest per block."""
        whole = type(self.size) is int and type(self.block_bytes) is int and isinstance(self.sha256, str)
        return (
            (whole and isinstance(self.blocks, list) and all(isinstance(block, str) for block in self.blocks))
            and (self.size >= 0 and 0 < self.block_bytes <= LARGEST_BLOCK)
            and len(self.blocks) == -(-self.size // self.block_bytes)
        )


class HashingFile:
    """Writable file that computes the digests of a :class:`FileRecord` while it is written."""

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
    """Writer of an artifact into ``directory``, which must not hold one yet; :meth:`finish_package` completes it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._records: dict[str, FileRecord] = {}
        directory.mkdir(parents=True, exist_ok=True)
        if (directory / MANIFEST).exists():
            raise ValueError(f"{directory}: already holds an artifact; expected a directory without one")

    @contextmanager
    def create(self, name: str, block_bytes: int = BLOCK_BYTES) -> Iterator[HashingFile]:
        """Open the new file ``name`` (a relative POSIX path) for writing.

        A partial file of a killed process is replaced. Raises ``ValueError`` if this writer has already written
        ``name``. Like all methods with a ``name``, it raises ``UserError`` if the name leads out of the directory.
        """
        path = path_below(self.directory, name)
        if name in self._records:
            raise ValueError(f"{path} is written already; files of artifacts are never written twice")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        with path.open("xb") as raw:
            file = HashingFile(raw, block_bytes)
            yield file
            raw.flush()
            os.fsync(raw.fileno())
        self._records[name] = file.record()

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def write_json(self, name: str, value: object) -> None:
        self.write_bytes(name, canonical_json(value))

    def record(self, name: str) -> FileRecord:
        return self._records[name]

    def link(self, file: Path, name: str, record: FileRecord, root: Path | None = None) -> None:
        """Add ``file`` of another artifact as ``name``, by a hard link if possible.

        ``record`` is the file's manifest entry in the other artifact. ``root`` is that artifact's directory, by default
        the parent of ``file``. Raises ``DamagedArtifact`` if a symbolic link leads out of ``root``.
        """
        root = root or file.parent
        with refused_is_damaged():
            link_or_copy(root, file.relative_to(root).as_posix(), path_below(self.directory, name))
        self._records[name] = record

    def add(self, name: str) -> None:
        """Hash the file ``name``, which other code wrote into the directory, and add its manifest entry."""
        self._records[name] = hash_file(path_below(self.directory, name))

    def note(self, name: str, record: FileRecord) -> None:
        """Add the manifest entry of a file that other code puts into the directory later."""
        self._records[check_name(name, self.directory)] = record

    def finish(self, kind: str, made_by: Mapping[str, object]) -> Artifact:
        """Write the manifest and open the artifact.

        ``made_by`` describes how it was made: settings, code version, fingerprints of the inputs.
        """
        self.write_manifest(kind, made_by)
        return Artifact.open(self.directory, kind)

    def write_manifest(self, kind: str, made_by: Mapping[str, object]) -> None:
        """Write the manifest without opening the artifact, as files added by :meth:`note` may still be missing."""
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
class Manifest:
    """Parsed manifest of an artifact, whose files need not be on this machine."""

    kind: object
    format: object
    made_by: dict[str, Any]
    files: dict[str, FileRecord]

    @classmethod
    def parse(cls, raw: bytes, where: object) -> Manifest:
        """Parse the manifest ``raw``; ``where`` is its address for error messages.

        Raises ``DamagedArtifact`` if it is malformed or lists files outside the artifact's directory.
        """
        try:
            manifest = parse_json(raw)
            files = {name: FileRecord(**record) for name, record in manifest["files"].items()}
            if not all(record.consistent() for record in files.values()) or type(manifest["made_by"]) is not dict:
                raise ValueError
            parsed = cls(manifest["kind"], manifest["format"], manifest["made_by"], files)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise DamagedArtifact(f"{where}: not a manifest of this format") from None
        for name in files:
            check_name(name, where, DamagedArtifact)
        return parsed

    @property
    def content(self) -> str:
        return content_of(str(self.kind), self.files)


#: Directories of a run (``runs/…``) by the kind of artifact in them.
IN_RUN = {"prepare": "prepared", "train": "trained", "export": "model"}


def in_run(directory: Path, kind: str) -> Path:
    """Return the directory of the artifact of this ``kind``, if ``directory`` is a run's; else ``directory``."""
    below = directory / IN_RUN.get(kind, "")
    return below if (below / MANIFEST).is_file() and not (directory / MANIFEST).exists() else directory


@dataclass(frozen=True)
class Artifact:
    """Opened artifact.

    :meth:`open` checks only that every file exists and has its size; :meth:`read_bytes` and ``check*`` verify digests.
    """

    directory: Path
    kind: str
    made_by: dict[str, Any]
    files: dict[str, FileRecord]
    fingerprint: str

    @classmethod
    def open(cls, directory: Path, kind: str, only: Iterable[str] | None = None) -> Artifact:
        """Open the artifact in ``directory``; check the sizes of the files in ``only``, by default of all.

        ``directory`` may be a run's, which holds artifacts of several kinds. Raises ``DamagedArtifact`` unless it is a
        complete artifact of this ``kind`` and format.
        """
        directory = in_run(directory, kind)
        path = directory / MANIFEST
        try:
            with refused_is_damaged():
                raw = read_untrusted(directory, MANIFEST, LONGEST_MANIFEST)
        except OSError as error:
            raise DamagedArtifact(f"{path}: {error.strerror}; this is not a finished artifact") from None
        manifest = Manifest.parse(raw, path)
        files, stored = manifest.files, (manifest.kind, manifest.format)
        if stored != (kind, FORMAT):
            expected = f"{kind!r}, format {FORMAT}"
            found = ", format ".join(map(reprlib.repr, stored))
            raise DamagedArtifact(f"{path}: holds {found}; expected {expected}")
        for name, record in files.items():
            if only is not None and name not in only:
                continue
            with open_file(directory, name) as file:
                size = os.fstat(file.fileno()).st_size
            if size != record.size:
                raise DamagedArtifact(f"{directory / name}: {size} bytes, the manifest says {record.size}")
        return cls(directory, kind, manifest.made_by, files, hashlib.sha256(raw).hexdigest())

    @property
    def content(self) -> str:
        """Digest (hex) of the files that decide the result; unlike the fingerprint, independent of ``made_by``."""
        return content_of(self.kind, self.files)

    def path(self, name: str) -> Path:
        """Return the path of a file, for messages or writing; read with :meth:`open_file`.

        Raises ``DamagedArtifact`` if ``name`` leads out of the directory.
        """
        return self.directory / check_name(name, self.directory, DamagedArtifact)

    def open_file(self, name: str) -> BufferedReader:
        return open_file(self.directory, name)

    def link_file(self, name: str, target: Path) -> None:
        """Create ``target`` as a hard link to a file, or as a copy if links fail.

        Raises ``DamagedArtifact`` if the file or a symbolic link leads out of the directory.
        """
        with refused_is_damaged():
            link_or_copy(self.directory, name, target)

    def copy_file(self, name: str, target: Path) -> None:
        """Copy a file to the new path ``target``, without verifying digests."""
        with self.open_file(name) as source, target.open("xb") as file:
            shutil.copyfileobj(source, file)

    def check_block(self, name: str, index: int, data: Any) -> None:
        """Raise ``DamagedArtifact`` if ``data`` does not have the digest of block ``index`` of the file ``name``."""
        if xxhash.xxh3_128_hexdigest(data) != self.files[name].blocks[index]:
            raise DamagedArtifact(f"{self.directory / name}: block {index} was changed after it was written")

    def read_bytes(self, name: str) -> bytes:
        """Return the verified content of a file. Raises ``DamagedArtifact`` if it is missing or damaged."""
        if name not in self.files:
            raise DamagedArtifact(f"{self.directory / name}: missing; expected a complete artifact of kind {self.kind}")
        with self.open_file(name) as file:
            data = file.read(self.files[name].size)
        view, step = memoryview(data), self.files[name].block_bytes
        for index in range(len(self.files[name].blocks)):
            self.check_block(name, index, view[index * step : (index + 1) * step])
        return data

    def read_json(self, name: str) -> Any:
        """Return the parsed JSON of a file.

        Raises ``DamagedArtifact`` if the file is missing, damaged or not JSON.
        """
        try:
            return parse_json(self.read_bytes(name))
        except UserError:
            raise
        except ValueError as error:
            raise DamagedArtifact(f"{self.directory / name}: not JSON ({error})") from None

    def check(self) -> Artifact:
        """Verify the XXH3 of all blocks and return ``self``. Raises ``DamagedArtifact`` for a mismatch."""
        for name, record in self.files.items():
            with self.open_file(name) as file:
                for index in range(len(record.blocks)):
                    self.check_block(name, index, file.read(min(record.block_bytes, record.size)))
        return self

    def check_sha256(self, names: Iterable[str] | None = None) -> Artifact:
        """Verify the SHA-256 of the files ``names``, by default of all, and return ``self``.

        Unlike :meth:`check`, it also detects deliberate changes. Raises ``DamagedArtifact`` for a mismatch.
        """
        for name in self.files if names is None else names:
            with self.open_file(name) as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != self.files[name].sha256:
                    raise DamagedArtifact(f"{self.directory / name}: its SHA-256 differs from the manifest's")
        return self


def open_file(directory: Path, name: str) -> BufferedReader:
    """Open the file ``name`` of the artifact in ``directory`` for reading.

    Raises ``DamagedArtifact`` if it is missing, or if its name or a symbolic link leads out of ``directory``.
    """
    check_name(name, directory, DamagedArtifact)
    try:
        with refused_is_damaged():
            return open_untrusted(directory, name)
    except FileNotFoundError:
        raise DamagedArtifact(f"{directory / name}: missing, though the manifest lists it") from None


@contextmanager
def refused_is_damaged() -> Iterator[None]:
    """Convert a ``RefusedFile`` error in the block to ``DamagedArtifact``."""
    try:
        yield
    except RefusedFile as refused:
        raise DamagedArtifact(str(refused)) from None


def content_of(kind: str, files: Mapping[str, FileRecord]) -> str:
    """Return the SHA-256 (hex) of an artifact's kind, file names and digests.

    Files in ``figures`` of the stage (:class:`.Stage`), such as timings, are left out.
    """
    figures = STAGES[kind].figures if kind in STAGES else ()
    digests = {name: record.sha256 for name, record in files.items() if name not in figures}
    return hashlib.sha256(canonical_json({"kind": kind, "files": digests})).hexdigest()


def hash_file(path: Path, block_bytes: int = BLOCK_BYTES) -> FileRecord:
    with path.open("rb") as source, Path(os.devnull).open("wb") as nowhere:
        file = HashingFile(nowhere, block_bytes)
        while piece := source.read(block_bytes):
            file.write(piece)
    return file.record()


def canonical_json(value: object) -> bytes:
    """Return JSON bytes with sorted keys, equal for equal values. Raises ``ValueError`` for NaN and infinity."""
    return (json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False) + "\n").encode()
