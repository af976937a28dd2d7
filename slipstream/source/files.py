"""The files of the raw data: a file, a directory, a glob or a prefix of a store, listed once.

What is fingerprinted has to be what is read, so a run lists its source once and hands the listing down. Every file in
it has a version: a file that changes after it was listed is an error, and a file that appears is no part of the run.
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

from slipstream.errors import UserError
from slipstream.source.config import Format
from slipstream.source.foreign import by_name
from slipstream.storage import STORES, ObjectInfo, list_objects, open_listed

#: What each extension holds; a compression suffix is looked through.
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
#: How files begin that say themselves what they are.
BEGINNINGS: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow"}
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
    def known_format(self) -> Format | None:
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
            with may_fail(Path(self.uri)):
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
    #: The folder that the address names, or the one above its first wildcard.
    folder: str = ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    def relative(self, file: SourceFile) -> str:
        """The path of a file below the folder."""
        folder = self.folder
        if not self.address.startswith(STORES):
            folder = "" if Path(folder) == Path() else str(Path(folder))
        inside = file.uri.removeprefix(folder.rstrip("/") + "/" if folder else "")
        return inside if file.uri != self.address else file.name


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
    files, folder = find_files(address)
    if not files:
        raise UserError(
            f"data: {address!r} holds no files; expected CSV, JSON Lines, Parquet, Arrow, text or image files"
        )
    if not any(file.size for file in files):
        raise UserError(f"data: {address!r} is empty (0 bytes); expected a header line and rows")
    return Listing(address, tuple(sorted(files, key=lambda file: file.uri)), folder)


def find_files(address: str) -> tuple[list[SourceFile], str]:
    """The files, and the folder that they are found below. As for a shell, brackets are part of a name if nothing has a
    name that they match."""
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
    """Raise ``UserError`` for what the operating system says about a local file or folder that was found."""
    try:
        yield
    except FileNotFoundError:
        raise UserError(f"{path}: was removed while it was read; start again") from None
    except OSError as error:
        raise cannot_be_read(str(path), error) from None


def cannot_be_read(path: str, error: OSError) -> UserError:
    """The user error for an operating system's error, of which there is the number."""
    reason = os.strerror(error.errno) if error.errno else str(error)
    return UserError(f"{path}: cannot be read ({reason}); expected a path that exists and may be read; check it")


def local_file(path: Path, name: str = "") -> SourceFile:
    """A local file as it is now, called ``name`` (default: its path). Raises ``UserError`` if it is gone."""
    with may_fail(path):
        status = path.stat()
    return SourceFile(name or str(path), status.st_size, f"{status.st_mtime_ns:x}-{status.st_ino:x}")


def stored_files(data: str) -> list[SourceFile]:
    """The object at a key, or all below a prefix."""
    return [SourceFile(o.uri, o.size, o.etag) for o in list_objects(data) if wanted(o.uri[len(data) :])]


def stored_matches(root: str, below: str) -> list[SourceFile]:
    """The objects that a pattern ``below`` a prefix names; a folder that it matches stands for all in it."""
    if root in STORES:
        raise UserError(f"data: {root + below!r} has a wildcard in the bucket's name; expected {root}bucket/pattern")
    matches = re.compile(pattern_of(below)).match
    return [file for file in stored_files(root) if matches(file.uri[len(root) :])]


def split_pattern(data: str) -> tuple[str, str]:
    """The folder above the first part of a path that has a wildcard, with its slash, and the pattern below it."""
    wildcard = next((mark for mark in re.finditer(r"\[\[\]|[*?[]", data) if mark[0] != "[[]"), None)
    end = data.rfind("/", 0, wildcard.start()) + 1 if wildcard else data.rfind("/") + 1
    return data[:end].replace("[[]", "["), data[end:]


def pattern_of(data: str) -> str:
    """The regular expression of a glob, of which ``*`` stays in one folder and ``**`` spans any number of them."""
    wildcards = {"**/": "(?:[^/]+/)*", "*": "[^/]*", "?": "[^/]", "[[]": r"\["}

    def spelled(match: re.Match[str]) -> str:
        token = match[0]
        return wildcards.get(token) or (token.replace("[!", "[^") if token.endswith("]") else re.escape(token))

    return re.sub(r"\*\*/|\[!?[^]]+\]|.", spelled, data, flags=re.DOTALL) + r"(?:/.*)?\Z"


def local_files(data: str) -> list[SourceFile]:
    """The file at a path, or all below a folder; none if there is nothing at what may be a pattern. Raises
    ``UserError`` if there is nothing at a path."""
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
    """What is there, behind symbolic links: "file", "folder", "other" or "" for nothing. Raises ``UserError``."""
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
    """The files in a folder and in those below it that are :func:`wanted`, behind symbolic links too.

    A link to a folder that it is in itself is left out; ``above`` are the real paths of those that this one is in.
    Raises ``UserError`` for a folder that cannot be read.
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
    """As :func:`kind_of`, which asks the system for each file."""
    if entry.is_symlink():
        return kind_of(Path(entry.path))
    return "file" if entry.is_file() else "folder" if entry.is_dir() else "other"


def matching_files(root: str, below: str) -> Iterator[Path]:
    """The files that a glob ``below`` the folder ``root`` matches, and those below the folders that it matches. Raises
    ``UserError`` for a folder that cannot be read."""
    if "**" in below:
        # Unlike glob, this does not follow links round and round.
        matches = re.compile(pattern_of(below)).match
        yield from (path for path in files_below(Path(root)) if matches(path.relative_to(root).as_posix()))
        return
    parts = below.split("/")
    for depth, part in enumerate(parts):
        # glob passes over folders that it may not read.
        for path in paths_matching(root, "/".join(parts[:depth])):
            check_folder(path, listed=glob.has_magic(part))
    for path in paths_matching(root, below):
        kind = kind_of(path)
        if kind == "folder":
            yield from files_below(path, real_parents(path, Path(root)))
        elif kind == "file":
            yield path


def real_parents(path: Path, root: Path) -> list[str]:
    """The folders that a path is in, up to ``root``, without symbolic links."""
    return [os.path.realpath(folder) for folder in path.parents if folder == root or root in folder.parents]


def paths_matching(root: str, below: str) -> list[Path]:
    """What a pattern matches below a folder, but for what is not :func:`wanted`."""
    pattern = glob.escape(root) + below
    names = glob.glob(pattern) if pattern else ["."]  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [Path(name) for name in names if wanted(name.removeprefix(root).strip("/")) or name == "."]


def check_folder(path: Path, *, listed: bool) -> None:
    """Raise ``UserError`` for a folder that cannot be gone through or, if it has to be, ``listed``."""
    if kind_of(path) == "folder":
        with may_fail(path):
            (path / "..").stat()
            if listed:
                os.scandir(path).close()


def wanted(relative: str) -> bool:
    """Whether a file below a directory is data: job markers such as ``_SUCCESS`` and hidden files are not."""
    return not any(part.startswith((".", "_")) for part in relative.split("/"))


def format_of(file: SourceFile, declared: Format) -> Format:
    """One of the values of ``FORMATS``. Raises ``UserError`` when neither extension nor beginning tells."""
    format = declared if declared != "auto" else file.known_format or format_inside(file)
    if not format and (foreign := by_name(file.name)):
        raise UserError(f"{file.uri}: {foreign}")
    if not format:
        raise UserError(
            f"{file.uri}: the extension {Path(file.name).suffix!r} does not tell the format; set data.format to csv, "
            "parquet, arrow, json, images, arrays or text"
        )
    return format


def format_inside(file: SourceFile) -> Format | None:
    """What the first bytes say: "parquet", "arrow" or nothing."""
    with file.open() as stream:
        beginning = stream.read(max(map(len, BEGINNINGS)))
    return next((format for mark, format in BEGINNINGS.items() if beginning.startswith(mark)), None)


def parquet_address(uri: str, format: str) -> str:
    """The address to pass as ``data`` for a table that another Flyte task hands over as a StructuredDataset, which is
    also what becomes of its DataFrames. ``format`` is what Flyte knows of it, "" if nothing.

    Raises ``UserError`` unless all that lies at ``uri`` is Parquet.
    """
    other = (
        format if format not in ("", "parquet") else next(filter(None, map(not_parquet, list_source(uri).files)), "")
    )
    if other:
        raise UserError(f"dataset: {uri!r} is not Parquet but {other}; hand over Parquet, or pass its address as data")
    return uri


def not_parquet(file: SourceFile) -> str:
    """What the file is instead; "" if it is Parquet."""
    inside = format_inside(file)
    if inside == "parquet":
        return ""
    named = file.known_format if file.known_format != "parquet" else None
    return inside or named or "something else"
