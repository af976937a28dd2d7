"""The files of the raw data: a file, a directory, a glob or a prefix of a store, listed once.

What is fingerprinted has to be what is read, so a run lists its source once and hands the listing down. Every file in
it has a version: a file that changes after it was listed is an error, and a file that appears is no part of the run.
"""

from __future__ import annotations

import difflib
import glob
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from tasks.errors import UserError
from tasks.storage import STORES, ObjectInfo, list_objects, open_listed

#: What each extension holds; a compression suffix is looked through.
FORMATS = {
    ".csv": "csv",
    ".tsv": "csv",
    ".txt": "csv",
    ".jsonl": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".png": "images",
    ".jpg": "images",
    ".jpeg": "images",
    ".npz": "arrays",
}
IMAGE_FORMATS = ("images", "arrays")
#: How files begin that say themselves what they are.
BEGINNINGS = {b"PAR1": "parquet", b"ARROW1": "arrow"}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}


@dataclass(frozen=True)
class SourceFile:
    """One file of raw data, as it was listed.

    ``uri`` is a local path or one in a store. ``version`` changes when the bytes do: the ETag or generation of a
    store's object, modification time and inode of a local file. Without one, any version is read.
    """

    uri: str
    size: int
    version: str = ""

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]

    @property
    def known_format(self) -> str | None:
        """What the extension says that the file holds."""
        name = Path(self.name)
        suffix = Path(name.stem).suffix if self.compression else name.suffix
        return FORMATS.get(suffix.lower())

    @property
    def compression(self) -> str | None:
        return COMPRESSIONS.get(Path(self.name).suffix.lower())

    @property
    def local(self) -> bool:
        return not self.uri.startswith(STORES)

    def open(self) -> BinaryIO:
        """A seekable binary reader. Raises ``UserError`` if a store's object is no longer the one that was listed, also
        while it is read; local files are checked by :func:`unchanged`, after the last read."""
        if self.local:
            return Path(self.uri).open("rb")
        return open_listed(ObjectInfo(self.uri, self.size, self.version))

    def check_unchanged(self) -> None:
        """Raise ``UserError`` if a local file is not the one that was listed. Reads of stores check it themselves."""
        if not self.local:
            return
        now = local_file(Path(self.uri))
        if (now.size, now.version) != (self.size, self.version):
            raise UserError(f"{self.uri}: was changed while it was read; start again once nobody writes to it")


@dataclass(frozen=True)
class Listing:
    """The files behind an address, sorted by URI. No address and no files stand for the digits of scikit-learn."""

    address: str
    files: tuple[SourceFile, ...] = ()

    @property
    def filled(self) -> list[SourceFile]:
        """The files that are not empty."""
        return [file for file in self.files if file.size]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def relative(self, file: SourceFile) -> str:
        """The path of a file below the folder that the address names, or below the one above its first wildcard."""
        folder = root_of(self.address) if glob.has_magic(self.address) else self.address
        if not self.address.startswith(STORES):
            folder = "" if Path(folder) == Path() else str(Path(folder))
        inside = file.uri.removeprefix(folder.rstrip("/") + "/" if folder else "")
        return inside if file.uri != self.address else file.name

    def to_json(self) -> dict[str, Any]:
        return {"address": self.address, "files": [[file.uri, file.size, file.version] for file in self.files]}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Listing:
        return cls(data["address"], tuple(SourceFile(*file) for file in data["files"]))


@contextmanager
def unchanged(files: Iterable[SourceFile]) -> Iterator[None]:
    """Raise ``UserError`` naming the first local file that is not the one that was listed, once the block has read
    them: also instead of whatever that made go wrong."""
    try:
        yield
    except Exception:
        check_unchanged(files)
        raise
    check_unchanged(files)


def check_unchanged(files: Iterable[SourceFile]) -> None:
    for file in files:
        file.check_unchanged()


def list_source(address: str) -> Listing:
    """List what ``address`` names. Raises ``UserError`` when there are no files or nothing is in them."""
    if not address:
        return Listing("")
    found = stored_files(address) if address.startswith(STORES) else local_files(address)
    if not found:
        raise UserError(f"data: {address!r} holds no files; expected CSV, JSON Lines, Parquet, Arrow or image files")
    if not any(file.size for file in found):
        raise UserError(f"data: {address!r} is empty (0 bytes); expected a header line and rows")
    return Listing(address, tuple(sorted(found, key=lambda file: file.uri)))


def local_file(path: Path, name: str = "") -> SourceFile:
    """A local file as it is now, called ``name`` (default: its path). Raises ``UserError`` if it is gone."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: was removed while it was read; start again") from None
    return SourceFile(name or str(path), status.st_size, f"{status.st_mtime_ns:x}-{status.st_ino:x}")


def stored_files(data: str) -> list[SourceFile]:
    """The objects that a key, a prefix or a pattern names; a folder that a pattern matches stands for all in it."""
    fixed = root_of(data)
    if fixed in STORES:
        raise UserError(f"data: {data!r} has a wildcard in the bucket's name; expected {fixed}bucket/pattern")
    matches = re.compile(pattern_of(data) if glob.has_magic(data) else "").match
    return [
        SourceFile(o.uri, o.size, o.etag) for o in list_objects(fixed) if wanted(o.uri[len(fixed) :]) and matches(o.uri)
    ]


def root_of(data: str) -> str:
    """What comes before the first part of a path that has a wildcard, with its slash; all of it if none has."""
    wildcard = re.search(r"[*?[]", data)
    return data[: data.rfind("/", 0, wildcard.start()) + 1] if wildcard else data


def pattern_of(data: str) -> str:
    """The regular expression of a glob, of which ``*`` stays in one folder and ``**`` spans any number of them."""
    wildcards = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]"}

    def spelled(found: re.Match[str]) -> str:
        token = found[0]
        return wildcards.get(token) or (token.replace("[!", "[^") if token.endswith("]") else re.escape(token))

    return re.sub(r"\*\*/|\[!?[^]]+\]|.", spelled, data, flags=re.DOTALL) + r"(?:/.*)?\Z"


def local_files(data: str) -> list[SourceFile]:
    path = Path(data)
    if path.is_file():
        return [local_file(path, data)]
    if path.is_dir():
        paths = [p for p in path.rglob("*") if p.is_file() and wanted(p.relative_to(path).as_posix())]
    elif glob.has_magic(data):
        found = glob.glob(data, recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        below = [q for p in map(Path, found) for q in ([p] if p.is_file() else p.rglob("*")) if q.is_file()]
        paths = [p for p in dict.fromkeys(below) if wanted(str(p).removeprefix(root_of(data)))]
    elif path.exists():
        raise UserError(f"data: {data!r} is a device, a pipe or a socket; expected a file that can be read twice")
    else:
        siblings = [p.name for p in path.parent.iterdir() if p.name != path.name] if path.parent.is_dir() else []
        close = difflib.get_close_matches(path.name, siblings, n=1)
        hint = f"; did you mean {str(path.parent / close[0])!r}?" if close else ""
        raise UserError(
            f"data: {data!r} does not exist; expected a file, a directory, a glob or an address on s3://, gs:// or "
            f"abfs://{hint}"
        )
    return [local_file(p) for p in paths]


def wanted(relative: str) -> bool:
    """Whether a file below a directory is data: job markers such as ``_SUCCESS`` and hidden files are not."""
    return not any(part.startswith((".", "_")) for part in relative.split("/"))


def format_of(file: SourceFile, declared: str) -> str:
    """One of the values of ``FORMATS``. Raises ``UserError`` when neither extension nor beginning tells."""
    found = declared if declared != "auto" else file.known_format or format_inside(file)
    if not found:
        raise UserError(
            f"{file.uri}: the extension {Path(file.name).suffix!r} does not tell the format; set data.format to csv, "
            "parquet, arrow, json, images, arrays or text"
        )
    return found


def format_inside(file: SourceFile) -> str:
    """What the first bytes say: "parquet", "arrow" or ""."""
    with file.open() as stream:
        beginning = stream.read(max(map(len, BEGINNINGS)))
    return next((format for mark, format in BEGINNINGS.items() if beginning.startswith(mark)), "")
