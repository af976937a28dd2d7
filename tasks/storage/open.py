"""Choose the store for a path or URI. S3's client is imported for ``s3://`` URIs only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

from tasks.errors import UserError
from tasks.storage.base import S3, MissingObject, ObjectInfo, Storage
from tasks.storage.local import LocalStorage, local_info, local_path

#: Files that are downloaded at the same time.
DOWNLOADS = 8


def storage_for(uri: str) -> Storage:
    """The store for a directory's path, a ``file://`` or an ``s3://`` URI. Raises ``UserError`` for other schemes."""
    if uri.startswith(S3):
        from tasks.storage.s3 import S3Storage

        return S3Storage(uri)
    return LocalStorage(local_path(uri))


def list_objects(uri: str) -> list[ObjectInfo]:
    """The file at ``uri``, or all files below it, sorted by URI; empty if there are none. Raises ``UserError``.

    An S3 URI is one file if that key exists, otherwise a directory: the keys below ``uri/``.
    """
    if uri.startswith(S3):
        from tasks.storage.s3 import list_s3

        return list_s3(uri)
    path = local_path(uri)
    paths = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    return sorted((local_info(found) for found in paths), key=lambda info: info.uri)


def download_all(uri: str, directory: Path) -> Path:
    """Download all files below ``uri`` into ``directory``, which is returned. Raises ``MissingObject`` if there are
    none, ``StorageUnavailable``."""
    base = uri.rstrip("/") + "/"
    keys = [found.uri.removeprefix(base) for found in list_objects(base)]
    if not keys:
        raise MissingObject(f"{uri}: there is nothing; check the address")
    storage = storage_for(base)
    with ThreadPoolExecutor(DOWNLOADS) as pool:
        list(pool.map(lambda key: storage.get(key, directory), keys))
    return directory


def open_reader(uri: str) -> BinaryIO:
    """A seekable, buffered reader: of a file, or of an S3 object by ranged requests, which are retried."""
    if uri.startswith(S3):
        from tasks.storage.s3 import open_s3

        return open_s3(uri)
    path = local_path(uri)
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise MissingObject(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None


def open_listed(source: ObjectInfo) -> BinaryIO:
    """:func:`open_reader` for an S3 object as it was listed. Raises ``UserError`` once it is another or gone."""
    from tasks.storage.s3 import open_version

    return open_version(source)


def copy_within_s3(source: str, target: str) -> None:
    """Copy a file within S3; its bytes do not pass through this machine."""
    from tasks.storage.s3 import copy_object

    copy_object(source, target)
