"""Files of the raw data (a file, directory, glob or prefix in a store), listed once per run.

Fingerprint and reads must see the same files, so a run lists its source once and passes the listing on. Every file has
a version: a file that changes after listing is an error, and a new file is not part of the run.
"""

from __future__ import annotations

import difflib
import errno
import glob
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import Format
from slipstream.shared.source.unsupported_formats import unsupported_extension
from slipstream.shared.storage import STORES, ObjectInfo, list_objects, open_listed

#: Format by file extension; a compression suffix is removed before.
FORMATS: dict[str, Format] = {
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
#: First bytes of files from which the format can be detected.
BEGINNINGS: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow"}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}


@dataclass(frozen=True)
class SourceFile:
    """One listed file of raw data.

    ``uri`` is a local path or an address in a store. ``version`` changes with the bytes: the ETag or generation of an
    object, modification time and inode of a local file. If it is "", any version is accepted.
    """

    uri: str
    size: int
    version: str = ""

    @property
    def name(self) -> str:
        return self.uri.rsplit("/", 1)[-1]

    @property
    def known_format(self) -> Format | None:
        """Format implied by the extension, or None."""
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
        """Open a seekable binary reader.

        Raise ``UserError``, also from reads, if an object in a store has changed since listing. Local files are checked
        by :func:`files_unchanged` after the last read.
        """
        if self.local:
            with may_fail(Path(self.uri)):
                return Path(self.uri).open("rb")
        return open_listed(ObjectInfo(self.uri, self.size, self.version))

    def check_unchanged(self) -> None:
        """Raise ``UserError`` if a local file has changed since listing; readers of stores check this themselves."""
        if not self.local:
            return
        now = local_file(Path(self.uri))
        if (now.size, now.version) != (self.size, self.version):
            raise UserError(f"{self.uri}: was changed while it was read; start again when no process writes to it")


@dataclass(frozen=True)
class Listing:
    """Files behind an address, sorted by URI; without address and files, scikit-learn's digits."""

    address: str
    files: tuple[SourceFile, ...] = ()
    #: Folder at the address, or above its first wildcard.
    folder: str = ""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def relative(self, file: SourceFile) -> str:
        folder = self.folder
        if not self.address.startswith(STORES):
            folder = "" if Path(folder) == Path() else str(Path(folder))
        inside = file.uri.removeprefix(folder.rstrip("/") + "/" if folder else "")
        return inside if file.uri != self.address else file.name


@contextmanager
def files_unchanged(files: Iterable[SourceFile]) -> Iterator[None]:
    """Check after the block that no file has changed since listing; raise ``UserError`` for the first that has.

    This error replaces any exception from the block, which the change may have caused.
    """
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
    """List the files at ``address``; raise ``UserError`` if there are none or all are empty."""
    if not address:
        return Listing("")
    files, folder = find_files(address)
    if not files:
        raise UserError(
            f"data: {address!r} holds no files; expected CSV, JSON Lines, Parquet, Arrow, text or image files"
        )
    if not any(file.size for file in files):
        raise UserError(f"data: {address!r} is empty (0 bytes); expected a header line and rows")
    return Listing(address, tuple(sorted(files, key=lambda file: file.uri)), folder)


def find_files(address: str) -> tuple[list[SourceFile], str]:
    """Return the files at an address, and the folder that contains them.

    As in a shell, brackets are literal if no name matches the pattern.
    """
    stored = address.startswith(STORES)
    if not stored or not {"*", "?"} & set(address):
        files = stored_files(address) if stored else local_files(address)
        if files or not glob.has_magic(address):
            return files, address
    files, folder = [], address
    for pattern in dict.fromkeys((address, address.replace("[", "[[]"))):
        if not files:
            folder, below = split_pattern(pattern)
            files = stored_matches(folder, below) if stored else local_matches(folder, below)
    return files, folder


@contextmanager
def may_fail(path: Path) -> Iterator[None]:
    """Convert an ``OSError`` from a local path in the block to a ``UserError``."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: was removed while it was read; start again") from None
    except OSError as error:
        raise cannot_be_read(str(path), error) from None


def cannot_be_read(path: str, error: OSError) -> UserError:
    reason = os.strerror(error.errno) if error.errno else str(error)
    return UserError(f"{path}: cannot be read ({reason}); expected a path that exists and may be read; check it")


def local_file(path: Path, name: str = "") -> SourceFile:
    """Return a local file in its current version; ``name`` is its URI, by default the path.

    Raise ``UserError`` if it was removed.
    """
    with may_fail(path):
        status = path.stat()
    return SourceFile(name or str(path), status.st_size, f"{status.st_mtime_ns:x}-{status.st_ino:x}")


def stored_files(data: str) -> list[SourceFile]:
    """Return the object at a key, or all objects below a prefix."""
    return [SourceFile(o.uri, o.size, o.etag) for o in list_objects(data) if wanted(o.uri[len(data) :])]


def stored_matches(root: str, below: str) -> list[SourceFile]:
    """Return the objects below the prefix ``root`` that match the glob ``below`` or lie in a matching folder."""
    if root in STORES:
        raise UserError(f"data: {root + below!r} has a wildcard in the bucket's name; expected {root}bucket/pattern")
    matches = re.compile(pattern_of(below)).match
    return [file for file in stored_files(root) if matches(file.uri[len(root) :])]


def split_pattern(data: str) -> tuple[str, str]:
    """Split a glob into the folder above the first wildcard (with its slash) and the remaining pattern."""
    wildcard = next((mark for mark in re.finditer(r"\[\[\]|[*?[]", data) if mark[0] != "[[]"), None)
    end = data.rfind("/", 0, wildcard.start()) + 1 if wildcard else data.rfind("/") + 1
    return data[:end].replace("[[]", "["), data[end:]


def pattern_of(data: str) -> str:
    """Return a glob as a regular expression; ``*`` stays in one folder, ``**`` spans any number of folders."""
    wildcards = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]", "[[]": r"\["}

    def spelled(match: re.Match[str]) -> str:
        token = match[0]
        return wildcards.get(token) or (token.replace("[!", "[^") if token.endswith("]") else re.escape(token))

    return re.sub(r"\*\*/|\[!?[^]]+\]|.", spelled, data, flags=re.DOTALL) + r"(?:/.*)?\Z"


def local_files(data: str) -> list[SourceFile]:
    """Return the file at a path, or all files below a folder; none if the path does not exist but may be a glob.

    Raise ``UserError`` if a path without wildcards does not exist.
    """
    path = Path(data)
    kind = kind_of(path)
    if kind == "file":
        return [local_file(path, data)]
    if kind == "folder":
        return [local_file(file) for file in files_below(path)]
    if kind:
        raise UserError(f"data: {data!r} is a device, a pipe or a socket; expected a file that can be read twice")
    if glob.has_magic(data):
        return []
    close = difflib.get_close_matches(path.name, siblings_of(path), n=1)
    hint = f"; did you mean {str(path.parent / close[0])!r}?" if close else ""
    raise UserError(
        f"data: {data!r} does not exist; expected a file, a directory, a glob or an address on s3://, gs:// or "
        f"abfs://{hint}"
    )


def local_matches(root: str, below: str) -> list[SourceFile]:
    return [local_file(path) for path in dict.fromkeys(matching_files(root, below))]


def kind_of(path: Path) -> str:
    """Return "file", "folder", "other", or "" if the path does not exist, following symbolic links.

    Raise ``UserError`` if the path cannot be read.
    """
    try:
        mode = path.stat().st_mode
    except ValueError:
        return ""  # it cannot be a path
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return ""
        raise cannot_be_read(str(path), error) from None
    return "file" if stat.S_ISREG(mode) else "folder" if stat.S_ISDIR(mode) else "other"


def siblings_of(path: Path) -> list[str]:
    try:
        return [sibling.name for sibling in path.parent.iterdir() if sibling.name != path.name]
    except (OSError, ValueError):
        return []


def files_below(folder: Path, above: Iterable[str] = ()) -> Iterator[Path]:
    """Yield the :func:`wanted` files below a folder, following symbolic links.

    A link to one of the folders that contain it is skipped; ``above`` are the real paths of folders around ``folder``.
    Raise ``UserError`` for a folder that cannot be read.
    """
    waiting = [(folder, frozenset(above))]
    while waiting:
        current, above = waiting.pop()
        here = os.path.realpath(current)
        if here in above:
            continue
        with may_fail(current), os.scandir(current) as entries:
            inside = {current / entry.name: kind_of_entry(entry) for entry in entries if wanted(entry.name)}
        yield from (path for path, kind in inside.items() if kind == "file")
        waiting += [(path, above | {here}) for path, kind in inside.items() if kind == "folder"]


def kind_of_entry(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        return kind_of(Path(entry.path))
    return "file" if entry.is_file() else "folder" if entry.is_dir() else "other"


def matching_files(root: str, below: str) -> Iterator[Path]:
    """Yield the files below the folder ``root`` that match the glob ``below`` or lie in a matching folder.

    Raise ``UserError`` for a folder that cannot be read.
    """
    if "**" in below:
        # Unlike glob, this does not follow links in circles.
        matches = re.compile(pattern_of(below)).match
        yield from (path for path in files_below(Path(root)) if matches(path.relative_to(root).as_posix()))
        return
    parts = below.split("/")
    for depth, part in enumerate(parts):
        # glob skips unreadable folders silently.
        for path in paths_matching(root, "/".join(parts[:depth])):
            check_folder(path, listed=glob.has_magic(part))
    for path in paths_matching(root, below):
        kind = kind_of(path)
        if kind == "folder":
            yield from files_below(path, real_parents(path, Path(root)))
        elif kind == "file":
            yield path


def real_parents(path: Path, root: Path) -> list[str]:
    """Return the folders from a path up to ``root`` with symbolic links resolved."""
    return [os.path.realpath(folder) for folder in path.parents if folder == root or root in folder.parents]


def paths_matching(root: str, below: str) -> list[Path]:
    """Return the :func:`wanted` paths below a folder that match a glob."""
    pattern = glob.escape(root) + below
    names = glob.glob(pattern) if pattern else ["."]  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [Path(name) for name in names if wanted(name.removeprefix(root).strip("/")) or name == "."]


def check_folder(path: Path, *, listed: bool) -> None:
    """Raise ``UserError`` for a folder that cannot be entered or, with ``listed=True``, cannot be listed."""
    if kind_of(path) == "folder":
        with may_fail(path):
            (path / "..").stat()
            if listed:
                os.scandir(path).close()


def wanted(relative: str) -> bool:
    """Return True if a relative path is data: not hidden, and not a job's marker such as ``_SUCCESS``."""
    return not any(part.startswith((".", "_")) for part in relative.split("/"))


def file_format(file: SourceFile, declared: Format) -> Format:
    """Return the format of a file: ``declared`` unless "auto", else by extension, else by first bytes.

    Raise ``UserError`` if it is unknown.
    """
    format = declared if declared != "auto" else file.known_format or format_inside(file)
    if not format and (unsupported := unsupported_extension(file.name)):
        raise UserError(f"{file.uri}: {unsupported}")
    if not format:
        raise UserError(
            f"{file.uri}: the extension {Path(file.name).suffix!r} is not a known format; set data.format to csv, "
            "parquet, arrow, json, images, arrays or text"
        )
    return format


def format_inside(file: SourceFile) -> Format | None:
    """Return the format detected from a file's first bytes: "parquet", "arrow" or None."""
    with file.open() as stream:
        beginning = stream.read(max(map(len, BEGINNINGS)))
    return next((format for mark, format in BEGINNINGS.items() if beginning.startswith(mark)), None)


def parquet_address(uri: str, format: str) -> str:
    """Return the ``data`` address of a table that another Flyte task passes as StructuredDataset or DataFrame.

    ``format`` is Flyte's format of the dataset, or "". Raise ``UserError`` unless all files at ``uri`` are Parquet.
    """
    other = (
        format if format not in ("", "parquet") else next(filter(None, map(not_parquet, list_source(uri).files)), "")
    )
    if other:
        raise UserError(f"dataset: {uri!r} is not Parquet but {other}; pass Parquet as dataset, or the address as data")
    return uri


def not_parquet(file: SourceFile) -> str:
    inside = format_inside(file)
    if inside == "parquet":
        return ""
    named = file.known_format if file.known_format != "parquet" else None
    return inside or named or "something else"
