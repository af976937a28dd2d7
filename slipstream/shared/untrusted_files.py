"""Files of untrusted directories: bases, tokenizers, packages, artifacts and registries that others made.

Their author may replace a file by a symbolic link to a user's file or a device at any time. So a file is opened before
the real path of its descriptor is compared with the directory's.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

#: Flags for files: opening a pipe does not wait for its writer, and no terminal takes control.
READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY
#: Flags for directories, which are not read here, so permission to search them is enough.
PASS = os.O_DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)
#: Paths in Hugging Face's cache: ``<repository>/snapshots/<revision>/<file>`` links to ``<repository>/blobs/<digest>``.
SNAPSHOTS, BLOBS = "snapshots", "blobs"
COPIED_BYTES = 1 << 20
LONGEST_PATH = 1024


class RefusedFile(Exception):
    """Error for a file that is not opened, or not read to its end; the message names the file."""


def open_untrusted(directory: Path, name: str) -> BufferedReader:
    """Open the regular file ``name`` of an untrusted directory for reading.

    A symbolic link is followed to a regular file inside the directory, and from a snapshot in Hugging Face's cache to a
    file directly in the ``blobs`` next to the snapshots. Raises ``FileNotFoundError``, and ``RefusedFile`` for anything
    else.
    """
    path = directory / name
    try:
        with opened(os.open(directory, PASS)) as root:
            descriptor = os.open(name, READ, dir_fd=root)
            try:
                check_opened(descriptor, root, path)
                return os.fdopen(descriptor, "rb")
            except BaseException:
                os.close(descriptor)
                raise
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise RefusedFile(f"{path}: cannot be read ({error.strerror}); expected a regular file") from None
        if path.is_symlink():
            raise RefusedFile(f"{path}: a broken symbolic link; expected a regular file") from None
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path)) from None


def read_untrusted(directory: Path, name: str, most: int) -> bytes:
    """Return the content of a file of at most ``most`` bytes. Raises as :func:`open_untrusted`."""
    with open_untrusted(directory, name) as file:
        # ``read`` allocates what it is asked for.
        content = file.read(min(most, os.fstat(file.fileno()).st_size) + 1)
    if len(content) > most:
        raise RefusedFile(f"{directory / name}: has more than {most:,} bytes; expected a smaller file")
    return content


def copy_untrusted(directory: Path, name: str, target: Path, size: int) -> None:
    """Copy a file of ``size`` bytes to the new file ``target``. Raises as :func:`open_untrusted`."""
    with open_untrusted(directory, name) as source, target.open("xb") as file:
        left = size
        while left and (content := source.read(min(left, COPIED_BYTES))):
            file.write(content)
            left -= len(content)
        if left or source.read(1):
            raise RefusedFile(f"{directory / name}: has another size than {size:,} bytes; start again")


def link_or_copy(directory: Path, name: str, target: Path) -> None:
    """Make ``target`` a hard link to a file, or a copy where links fail. Raises as :func:`open_untrusted`."""
    with open_untrusted(directory, name) as source:
        status = os.fstat(source.fileno())
        try:
            os.link(directory / name, target, follow_symlinks=False)
        except OSError:
            pass  # the disk has no hard links, or it is another disk
        else:
            if os.path.samestat(target.lstat(), status):
                return
            target.unlink()  # a link to a symbolic link, or to a file that has replaced the opened one
        copy_untrusted(directory, name, target, status.st_size)


def check_opened(descriptor: int, root: int, path: Path) -> None:
    """Raise ``RefusedFile`` unless ``descriptor`` is a regular file in the directory open as ``root``."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        raise RefusedFile(f"{path}: is not a regular file; expected one")
    found, directory = real_path(descriptor), real_path(root)
    if not belongs(found, directory):
        raise RefusedFile(
            f"{path}: leads to {found}, outside of {directory}; expected a file inside of it, so copy the file there"
        )


def belongs(file: Path, directory: Path) -> bool:
    """Return True if a file is in a directory or is one of its blobs in Hugging Face's cache, by real paths."""
    snapshots = directory.parent
    # The file's path has no links, so ``blobs`` is not one either.
    is_blob = snapshots.name == SNAPSHOTS and file.parent == snapshots.parent / BLOBS
    return is_blob or directory in file.parents


def real_path(descriptor: int) -> Path:
    """Return the path of an open descriptor, without symbolic links."""
    if hasattr(fcntl, "F_GETPATH"):  # macOS
        found = fcntl.fcntl(descriptor, fcntl.F_GETPATH, bytes(LONGEST_PATH))
        return Path(os.fsdecode(found.rstrip(b"\0")))
    return Path(f"/proc/self/fd/{descriptor}").readlink()


@contextmanager
def opened(descriptor: int) -> Iterator[int]:
    """Close the descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)
