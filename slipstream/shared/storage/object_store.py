"""Store on Google Cloud Storage (``gs://``) or Azure Blob Storage (``abfs://``), through fsspec.

gcsfs and adlfs provide credentials, connections and the event loop. Requests are made one by one, with a condition and,
if the service has one, a checksum; they are retried here, as for S3. fsspec's own operations have no conditional reads,
and the retries of gcsfs draw pauses from Python's global random generator.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from slipstream.shared.errors import UserError
from slipstream.shared.storage.base import (
    AZURE,
    CONCURRENCY,
    GCS,
    PART_BYTES,
    AlreadyThere,
    BucketClient,
    MissingObject,
    ObjectInfo,
    StorageUnavailable,
    check_size,
    fetch_listed,
    not_deleted,
    object_holds,
)
from slipstream.shared.storage.conditional import ConditionalWrite
from slipstream.shared.storage.names import check_keys, check_name, check_prefix, path_below
from slipstream.shared.storage.retry import retry_transient

#: Package of the client, and the extra that installs it, by scheme.
PACKAGES = {GCS: ("gcsfs", "gcs"), AZURE: ("adlfs", "azure")}

T = TypeVar("T")


def locate(uri: str) -> tuple[BucketClient, str, str]:
    """Return the bucket of a URI, the bucket's address with a final slash, and the key.

    Raises ``UserError`` if there is no bucket in it or the client is not installed.
    """
    scheme = GCS if uri.startswith(GCS) else AZURE
    name, _, key = uri[len(scheme) :].partition("/")
    if not name:
        raise UserError(f"{uri}: names no bucket; expected {scheme}bucket/key")
    try:
        return bucket_of(scheme, name), f"{scheme}{name}/", key
    except ModuleNotFoundError as error:
        package, extra = PACKAGES[scheme]
        raise UserError(f"{uri}: {package} is missing ({error}); install Slipstream with the extra [{extra}]") from None


def bucket_of(scheme: str, name: str) -> BucketClient:
    if scheme == GCS:
        from slipstream.shared.storage.gcs import GoogleBucket

        return GoogleBucket(name)
    from slipstream.shared.storage.azure import AzureContainer

    return AzureContainer(name)


def ask(bucket: BucketClient, uri: str, request: Callable[[], T]) -> T:
    """Make a request, retry it after transient errors, and return its result."""
    try:
        return retry_transient(request, lambda error: isinstance(bucket.explain(uri, error), StorageUnavailable))
    except (UserError, AlreadyThere, StorageUnavailable):
        raise
    except Exception as error:
        raise bucket.explain(uri, error) from None


def listed(uri: str) -> Iterator[ObjectInfo]:
    bucket, root, prefix = locate(uri)
    token = ""
    while True:
        objects, token = ask(bucket, uri, partial(bucket.page, prefix, token))
        yield from (ObjectInfo(root + each.key, each.size, each.version, each.modified) for each in objects)
        if not token:
            return


def date(uri: str) -> str:
    bucket, _, prefix = locate(uri)
    return ask(bucket, uri, partial(bucket.date, prefix))


def stat(uri: str) -> ObjectInfo:
    bucket, _, key = locate(uri)
    status = ask(bucket, uri, partial(bucket.stat, key))
    return ObjectInfo(uri, status.size, status.version)


def fetch(source: ObjectInfo, start: int, end: int) -> bytes:
    """Return the bytes from ``start`` to ``end`` (exclusive); raises ``AlreadyThere`` if the version has changed."""
    bucket, _, key = locate(source.uri)

    def request() -> bytes:
        data = bucket.read(key, start, end, source.etag)
        if len(data) != end - start:
            raise StorageUnavailable(f"{source.uri}: {len(data)} bytes arrived instead of {end - start}")
        return data

    return ask(bucket, source.uri, request)


class ObjectStorage:
    """Objects under a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self.base = uri.rstrip("/")
        self._bucket, _, self._prefix = locate(self.base + "/")

    def scratch(self) -> Path:
        return Path(tempfile.gettempdir())

    def put(self, key: str, source: Path | bytes) -> None:
        uri, name = f"{self.base}/{key}", self._prefix + check_name(key, self.base)
        if isinstance(source, bytes):
            ask(self._bucket, uri, partial(self._bucket.put_bytes, name, source, fresh=False))
            check_size(stat(uri), len(source))
        else:
            self._bucket.put_file(name, source, partial(ask, self._bucket, uri))
            check_size(stat(uri), source.stat().st_size)
            source.unlink()

    def create(self, key: str, data: bytes, *, exactly_one: bool = True) -> None:
        uri, name = f"{self.base}/{key}", self._prefix + check_name(key, self.base)
        write = partial(ask, self._bucket, uri, partial(self._bucket.put_bytes, name, data, fresh=True))
        creation = ConditionalWrite(
            uri, write, partial(object_holds, stat, fetch, uri, data), partial(self.delete, [key])
        )
        creation.run(exactly_one=exactly_one)

    def get(self, key: str, directory: Path) -> Path:
        path = path_below(directory, key, self.base)
        path.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{self.base}/{key}"
        current = ask(self._bucket, uri, partial(self._bucket.stat, self._prefix + key))
        source = ObjectInfo(uri, current.size, current.version)
        unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
        try:
            with unfinished.open("wb") as file, ThreadPoolExecutor(CONCURRENCY) as pool:

                def transfer(start: int) -> None:
                    end = min(start + PART_BYTES, current.size)
                    write_at(file.fileno(), fetch_listed(source, fetch, start, end), start)

                list(pool.map(transfer, range(0, current.size, PART_BYTES)))
            if self._bucket.checksum(unfinished) != current.checksum:
                raise StorageUnavailable(f"{uri}: the received bytes differ from the stored ones")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        return path

    def list(self, prefix: str = "") -> list[str]:
        objects = listed(f"{self.base}/{check_prefix(prefix, self.base)}")
        return check_keys((info.uri[len(self.base) + 1 :] for info in objects), self.base)

    def delete(self, keys: Iterable[str]) -> None:
        def remove(key: str) -> UserError | None:
            try:
                ask(self._bucket, f"{self.base}/{key}", partial(self._bucket.delete, self._prefix + key))
            except MissingObject:
                pass
            except UserError as error:
                return error
            return None

        keys = [check_name(key, self.base) for key in keys]
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            refused = [error for error in pool.map(remove, keys) if error]
        if refused:
            raise not_deleted(self.base, len(refused), len(keys), f"({refused[0].message})")


storage_at = ObjectStorage


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``; a single write to a disk that becomes full may write only a part."""
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
