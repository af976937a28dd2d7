"""Files of the raw data (a file, directory, glob or prefix in a store), listed once per run.

Fingerprint and reads must see the same files, so a run lists its source once. A file whose version changes after
listing is an error.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from slipstream.shared.errors import UserError
from slipstream.shared.source.config import DataConfig, Format
from slipstream.shared.source.unsupported_formats import logged_table, logged_table_on_disk, unsupported_extension
from slipstream.shared.storage import STORES, ObjectInfo, list_objects, open_listed
from slipstream.shared.storage.local import with_home

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
#: Formats of tables of documents or conversations.
LANGUAGE_TABLES = ("json", "parquet", "arrow")
#: First bytes of files from which the format can be detected.
BEGINNINGS: dict[bytes, Format] = {b"PAR1": "parquet", b"ARROW1": "arrow"}
#: Files of other programs, which hold no rows: hidden and not counted as skipped.
OF_PROGRAMS = re.compile(
    r"_SUCCESS|_(common_)?metadata|_(committed|started)_.*|\.DS_Store|\._.*|\..*\.crc|(?i:(eh)?thumbs\.db|desktop\.ini)"
)
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4", ".br": "brotli"}


@dataclass(frozen=True)
class SourceFile:
    """One listed file of raw data.

    ``uri`` is a local path or store address. ``version`` changes with the bytes: the ETag or generation of an object,
    modification time and inode of a local file. If it is "", any version is accepted.
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
    #: Hidden files, and hidden folders, whose files were not listed.
    hidden: tuple[SourceFile, ...] = ()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def relative(self, file: SourceFile) -> str:
        folder = self.folder
        if not self.address.startswith(STORES):
            folder = "" if Path(folder) == Path() else str(Path(folder))
        inside = file.uri.removeprefix(folder.rstrip("/") + "/" if folder else "")
        return inside if file.uri != self.address else file.name

    @property
    def skipped(self) -> list[str]:
        names = set()
        for parts in (self.relative(file).split("/") for file in self.hidden):
            first = next(depth for depth, part in enumerate(parts) if not wanted(part))
            if not OF_PROGRAMS.fullmatch(parts[-1]) and not OF_PROGRAMS.fullmatch(parts[first]):
                names.add("/".join(parts[: first + 1]))
        return sorted(names)

    @property
    def warnings(self) -> list[str]:
        names = self.skipped
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        one = len(names) == 1
        return [
            f"{', '.join(map(repr, names[:3]))}{more} {'was' if one else 'were'} skipped, as "
            f"{'its name starts' if one else 'their names start'} with '.' or '_'; "
            f"rename {'it if it is' if one else 'them if they are'} data"
        ][: len(names)]

    def with_underscores(self, format: Format) -> Listing:
        """Return the listing for ``format``: in folders of images and texts only a leading dot hides a name."""
        if format not in (*IMAGE_FORMATS, "text"):
            return self
        suffixes = {Path(file.name).suffix.lower() for file in self.files}
        hidden: list[SourceFile] = []
        shown = list(self.files)
        for file in self.hidden:
            parts = self.relative(file).split("/")
            never = any(part.startswith(".") for part in parts) or OF_PROGRAMS.fullmatch(parts[-1])
            alike = not suffixes or Path(file.name).suffix.lower() in suffixes
            fits = file.known_format in IMAGE_FORMATS if format in IMAGE_FORMATS else alike
            (hidden if never or not fits else shown).append(file)
        return replace(self, files=by_uri(shown), hidden=tuple(hidden))


@contextmanager
def files_unchanged(files: Iterable[SourceFile]) -> Iterator[None]:
    """Check after the block that no file has changed since listing; raise ``UserError`` for the first that has.

    It replaces any exception from the block, which the change may have caused.
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


def list_source(address: str, target: str = "", config: DataConfig | None = None) -> Listing:
    """List the files at ``address``; raise ``UserError`` if there are none, all are empty, or a log lists them."""
    if not address:
        return Listing("")
    address = with_home(address)  # shells leave the ~ of --data=~/x
    files, folder = find_files(address)
    listing = Listing(address, (), folder)
    shown = [wanted(listing.relative(file)) or file.uri == address for file in files]
    listing = replace(
        listing,
        files=by_uri(file for file, show in zip(files, shown, strict=True) if show),
        hidden=by_uri(file for file, show in zip(files, shown, strict=True) if not show),
    )
    listing = listing.with_underscores(format_of_all(listing, target, config or DataConfig()))
    if not listing.files:
        skipped = f"; {listing.warnings[0]}" if listing.skipped else ""
        raise UserError(
            f"data: {address!r} holds no files; expected CSV, JSON Lines, Parquet, Arrow, text or image files{skipped}"
        )
    if not any(file.size for file in listing.files):
        raise UserError(f"data: {address!r} is empty (0 bytes); expected a header line and rows")
    return listing


def by_uri(files: Iterable[SourceFile]) -> tuple[SourceFile, ...]:
    return tuple(sorted(files, key=lambda file: file.uri))


def format_of_all(listing: Listing, target: str, config: DataConfig) -> Format:
    """Return the format of all files together: the declared one, else from their extensions.

    "images" if there are any, "text" if every file is a ``.txt`` in a folder and no target is set, else "auto". For
    language "text" unless a file is a table. Hidden files count only if there are no others.
    """
    files = listing.files or listing.hidden
    if config.format != "auto":
        return config.format
    if config.task == "language":
        return "auto" if any(file.known_format in LANGUAGE_TABLES for file in files) else "text"
    if any(file.known_format in IMAGE_FORMATS for file in files):
        return "images"
    in_folders = all("/" in listing.relative(file) and file.name.lower().endswith(".txt") for file in files)
    return "text" if files and in_folders and not target else "auto"


def find_files(address: str) -> tuple[list[SourceFile], str]:
    """Return the files at an address, hidden ones included, and the folder that contains them.

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


def stored_files(data: str, below: str = "") -> list[SourceFile]:
    listed = list_objects(data)
    matches = re.compile(pattern_of(below) if below else "", re.DOTALL).match
    files = [SourceFile(o.uri, o.size, o.etag) for o in listed if matches(o.uri[len(data) :])]
    if table := logged_table([file.uri for file in files], (o.uri for o in listed)):
        raise UserError(table)
    return files


def stored_matches(root: str, below: str) -> list[SourceFile]:
    """Return the objects below the prefix ``root`` that match the glob ``below`` or lie in a matching folder."""
    if root in STORES:
        raise UserError(f"data: {root + below!r} has a wildcard in the bucket's name; expected {root}bucket/pattern")
    return stored_files(root, below)


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
        if table := logged_table_on_disk(path.parent, [path.parent]):
            raise UserError(table)
        return [local_file(path, data)]
    if kind == "folder":
        return local_listing(path, files_below(path))
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
    return local_listing(Path(root), dict.fromkeys(matching_files(root, below)))


def local_listing(root: Path, paths: Iterable[Path]) -> list[SourceFile]:
    files, folders = [], {root}
    for path in paths:
        try:
            files.append(local_file(path))
        except UserError:
            if wanted(path.relative_to(root).as_posix()):
                raise
            files.append(SourceFile(str(path), 0))
        folders.add(path.parent)
    if files and (table := logged_table_on_disk(root, folders)):
        raise UserError(table)
    return files


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
    """Yield the files below a folder, following symbolic links; a folder with a leading dot is yielded itself.

    A link to one of the folders that contain it is skipped; ``above`` are the real paths of folders around ``folder``.
    Raise ``UserError`` for a folder that cannot be read; a hidden one is yielded itself.
    """
    waiting = [(folder, frozenset(above), True)]
    while waiting:
        current, above, shown = waiting.pop()
        here = os.path.realpath(current)
        if here in above:
            continue
        try:
            with may_fail(current), os.scandir(current) as entries:
                inside = {current / entry.name: kind_of_entry(entry) for entry in entries}
        except UserError:
            if shown:
                raise
            inside = {current: "file"}
        for path, kind in inside.items():
            if kind == "folder" and not path.name.startswith("."):
                waiting.append((path, above | {here}, shown and wanted(path.name)))
            elif kind in ("file", "folder"):
                yield path


def kind_of_entry(entry: os.DirEntry[str]) -> str:
    if entry.is_symlink():
        try:
            return kind_of(Path(entry.path))
        except UserError:
            if wanted(entry.name):
                raise
            return ""
    return "file" if entry.is_file() else "folder" if entry.is_dir() else "other"


def matching_files(root: str, below: str) -> Iterator[Path]:
    """Yield the files below the folder ``root`` that match the glob ``below`` or lie in a matching folder.

    Hidden files are as in :func:`files_below`. Raise ``UserError`` for a folder that cannot be read.
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
            if wanted(str(path).removeprefix(root).strip("/")):
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
    pattern = glob.escape(root) + below
    names = glob.glob(pattern) if pattern else ["."]  # noqa: PTH207 - Path.glob takes no absolute pattern
    return [Path(name) for name in names]


def check_folder(path: Path, *, listed: bool) -> None:
    """Raise ``UserError`` for a folder that cannot be entered or, with ``listed=True``, cannot be listed."""
    if kind_of(path) == "folder":
        with may_fail(path):
            (path / "..").stat()
            if listed:
                os.scandir(path).close()


def wanted(relative: str) -> bool:
    """Return True if a relative path is data: no name on it is hidden or of :data:`OF_PROGRAMS`."""
    parts = relative.split("/")
    return not any(part.startswith((".", "_")) for part in parts) and not OF_PROGRAMS.fullmatch(parts[-1])


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
