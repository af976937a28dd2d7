"""Storage with the same operations on a local directory and on a prefix of S3, Google Cloud Storage or Azure.

The path or URI selects the store; only the client of that store is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO

from slipstream.shared.errors import UserError
from slipstream.shared.storage.base import (
    S3,
    STORES,
    AlreadyThere,
    MissingObject,
    ObjectInfo,
    Replaced,
    RequestStore,
    Storage,
    StorageUnavailable,
    at_or_below,
    create_next,
    fetch_listed,
    ranged_reader,
    try_create,
)
from slipstream.shared.storage.conditional import ConditionIgnored, check_conditional_writes
from slipstream.shared.storage.local import (
    LocalStorage,
    cannot_write,
    disk_time,
    fullest,
    list_files,
    local_path,
    out_of_space,
    writing_to,
)
from slipstream.shared.storage.names import check_name, path_below
from slipstream.shared.storage.retry import call_within
from slipstream.shared.untrusted_files import RefusedFile, open_untrusted

__all__ = [
    "S3",
    "STORES",
    "AlreadyThere",
    "ConditionIgnored",
    "MissingObject",
    "ObjectInfo",
    "Replaced",
    "Storage",
    "StorageUnavailable",
    "call_within",
    "cannot_write",
    "check_conditional_writes",
    "check_name",
    "copy_within_s3",
    "create_next",
    "disk_time",
    "download_all",
    "fullest",
    "lifecycle_rules",
    "list_names",
    "list_objects",
    "open_below",
    "open_listed",
    "open_reader",
    "out_of_space",
    "path_below",
    "read_below",
    "read_range",
    "stat_object",
    "storage_for",
    "store_time",
    "try_create",
    "writing_to",
]

#: Number of files downloaded concurrently.
DOWNLOADS = 8


def store_of(uri: str) -> RequestStore:
    """Return the module for a URI with a prefix in ``STORES``; raises ``UserError`` if its client is not installed."""
    if uri.startswith(S3):
        try:
            from slipstream.shared.storage import s3
        except ModuleNotFoundError as error:
            raise UserError(
                f"{uri}: boto3 is missing ({error}); expected an installed one: pip install boto3"
            ) from None
        return s3
    from slipstream.shared.storage import object_store

    return object_store


def storage_for(uri: str) -> Storage:
    """Return the store for a local path, a ``file://`` URI or a URI with a prefix in ``STORES``.

    Raises ``UserError`` for other URIs.
    """
    return store_of(uri).storage_at(uri) if uri.startswith(STORES) else LocalStorage(local_path(uri))


def list_objects(uri: str) -> list[ObjectInfo]:
    """Return the file at ``uri``, or all files below it, sorted by URI; empty if there are none.

    In a store, ``uri`` is a file if this key exists, otherwise a directory, with the keys below ``uri/``. Names are not
    checked, so use them only for reading; see :func:`list_names`. Raises ``UserError``.
    """
    if uri.startswith(STORES):
        return sorted(at_or_below(uri, store_of(uri).listed(uri)), key=lambda info: info.uri)
    return list_files(local_path(uri))


def list_names(uri: str) -> dict[str, ObjectInfo]:
    """Return all files below the directory ``uri`` by relative name.

    Raises ``UserError`` if a name could lead out of a local directory, since listings are untrusted.
    """
    base = uri.rstrip("/") + "/"
    return {check_name(info.uri.removeprefix(base), uri): info for info in list_objects(base)}


def lifecycle_rules(uri: str) -> list[Mapping[str, Any]]:
    """Return the lifecycle rules of the bucket of an S3 URI as S3 describes them.

    Raises ``UserError``, ``StorageUnavailable``.
    """
    from slipstream.shared.storage import s3

    return s3.lifecycle_rules(uri)


def store_time(uri: str) -> float:
    """Return the time in seconds since 1970 by the clock of the store at ``uri``.

    It is the date of the store's answer, in whole seconds, or the time of a new file in a local directory. Raises
    ``UserError`` if the store sends no date, ``StorageUnavailable``.
    """
    if not uri.startswith(STORES):
        return disk_time(local_path(uri))
    date = store_of(uri).date(uri)
    try:
        return parsedate_to_datetime(date).timestamp()
    except (ValueError, OverflowError):
        raise UserError(f"{uri}: the store's answer has the date {date!r}; expected an HTTP date") from None


def download_all(uri: str, directory: Path) -> Path:
    """Download all files below ``uri`` into ``directory`` and return it.

    Raises ``MissingObject`` if there are none, ``UserError`` for unsafe names, ``StorageUnavailable``.
    """
    names = list_names(uri)
    if not names:
        raise MissingObject(f"{uri}: does not exist; check the address")
    storage = storage_for(uri)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        list(pool.map(lambda name: storage.get(name, directory), names))
    return directory


def open_reader(uri: str) -> BinaryIO:
    """Open a seekable, buffered reader of a file, or of an object by ranged requests with retries."""
    if uri.startswith(STORES):
        store = store_of(uri)
        return ranged_reader(store.stat(uri), store.fetch)
    path = local_path(uri)
    try:
        return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingObject(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def open_below(directory: str, name: str) -> BinaryIO:
    """Open the file ``name`` of an untrusted directory or prefix as :func:`open_reader` does.

    Raises ``UserError`` if the name or a symbolic link leads out of ``directory``.
    """
    if directory.startswith(STORES):
        return open_reader(f"{directory.rstrip('/')}/{check_name(name, directory)}")
    path = local_path(directory)
    try:
        return open_untrusted(path, check_name(name, directory))
    except FileNotFoundError:
        raise MissingObject(f"{path / name}: no such file; check the path") from None
    except RefusedFile as refused:
        raise UserError(str(refused)) from None


def read_below(directory: str, name: str, most: int) -> bytes:
    """Return the content of a file of an untrusted directory.

    Raises ``UserError`` as :func:`open_below`, and if it has more than ``most`` bytes; at most ``most`` + 1 are read.
    """
    with open_below(directory, name) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UserError(f"{directory.rstrip('/')}/{name}: has more than {most:,} bytes; expected a smaller file")
    return content


def open_listed(source: ObjectInfo) -> BinaryIO:
    """Open a listed object as :func:`open_reader` does; reads raise ``UserError`` if it has changed since."""
    return ranged_reader(source, store_of(source.uri).fetch)


def stat_object(uri: str) -> ObjectInfo:
    """Return size and version of an object, for :func:`read_range`.

    Raises ``MissingObject``, ``StorageUnavailable``.
    """
    return store_of(uri).stat(uri)


def read_range(source: ObjectInfo, start: int, end: int) -> bytes:
    """Return the bytes from ``start`` to ``end`` (exclusive) of a listed object.

    Raises ``UserError`` if it was replaced since, ``StorageUnavailable``.
    """
    return fetch_listed(source, store_of(source.uri).fetch, start, end)


def copy_within_s3(source: str, target: str, size: int, sha256: str) -> None:
    """Copy a file within S3 and check its size and SHA-256; raise ``UserError`` if they differ.

    The bytes pass through this machine only if the file is very large or the service reports no SHA-256.
    """
    from slipstream.shared.storage.s3 import copy_object

    copy_object(source, target, size, sha256)
