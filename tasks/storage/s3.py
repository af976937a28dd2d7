"""A store on S3, or on a service with its protocol, through boto3.

Endpoint, region, addressing style, credentials and proxies are configured as usual for boto3 (environment, shared
configuration, roles). What is not configured there comes from the ``FLYTE_AWS_*`` variables that Flyte sets in pods.
"""

from __future__ import annotations

import io
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import boto3
import botocore.exceptions as errors
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from s3transfer.exceptions import RetriesExceededError

from tasks.errors import UserError
from tasks.storage.base import S3, AlreadyThere, MissingObject, ObjectInfo, StorageUnavailable

#: Attempts per request; the pauses between them sum to 33 to 45 seconds.
ATTEMPTS = 12
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 8.0
CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 20
PART_BYTES = 16 << 20
#: Largest size that is copied within the store by one request.
COPY_BYTES = 256 << 20
MOST_PARTS = 10_000
READ_AHEAD_BYTES = 4 << 20
CONCURRENCY = 8
TRANSIENT_STATUS = {429, 500, 502, 503, 504}
TRANSIENT_CODES = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ThrottlingException"),
    # The bytes that arrived do not match the checksum, or the signature, that was sent with them.
    *("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
}
#: The connection failed or ended before the whole answer was there.
TRANSIENT_ERRORS = (
    errors.ConnectionError,
    errors.HTTPClientError,
    errors.IncompleteReadError,
    errors.ResponseStreamingError,
    RetriesExceededError,
)
#: A generator for jitter. botocore draws from Python's global one, so that a retry would change a model's numbers.
JITTER = random.Random()

T = TypeVar("T")


def split_uri(uri: str) -> tuple[str, str]:
    bucket, _, key = uri[len(S3) :].partition("/")
    if not bucket:
        raise UserError(f"{uri}: names no bucket; expected s3://bucket/key")
    return bucket, key


def client() -> Any:
    """The S3 client of this process; connections must not be shared across a fork."""
    return client_of(os.getpid())


@cache
def client_of(process: int) -> Any:
    # A new session, because boto3's default one caches the credentials that it found first.
    made = boto3.session.Session().client(
        "s3",
        **flyte_settings(),
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=2 * CONCURRENCY,
            tcp_keepalive=True,
            **({"s3": {"addressing_style": "path"}} if "endpoint_url" in flyte_settings() else {}),
        ),
    )
    made.meta.events.register("needs-retry.s3", pause_before_retry)
    return made


def flyte_settings() -> dict[str, str]:
    """Settings from Flyte's variables, for those that boto3's own variables do not set."""
    given = os.environ
    settings = {}
    if "FLYTE_AWS_ENDPOINT" in given and not given.keys() & {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}:
        settings["endpoint_url"] = given["FLYTE_AWS_ENDPOINT"]
    own = {"AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"}
    if "FLYTE_AWS_ACCESS_KEY_ID" in given and not given.keys() & own:
        settings["aws_access_key_id"] = given["FLYTE_AWS_ACCESS_KEY_ID"]
        settings["aws_secret_access_key"] = given.get("FLYTE_AWS_SECRET_ACCESS_KEY", "")
    return settings


def pause(attempt: int) -> float:
    """Seconds to wait after this attempt (from 1): doubled each time, with jitter of up to a quarter."""
    longest = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (attempt - 1))
    return longest * JITTER.uniform(0.75, 1.0)


def pause_before_retry(response: Any, attempts: int, caught_exception: Exception | None, **_: Any) -> float | None:
    """Handle botocore's ``needs-retry`` event: return the pause before the next attempt, or None for no retry.

    botocore's own policy has a retry quota, which ends retries early if many requests fail at once, as they do when a
    store is unavailable.
    """
    if attempts >= ATTEMPTS:
        return None
    if caught_exception is not None:
        return pause(attempts) if isinstance(caught_exception, TRANSIENT_ERRORS) else None
    http, parsed = response
    code = parsed.get("Error", {}).get("Code")
    return pause(attempts) if http.status_code in TRANSIENT_STATUS or code in TRANSIENT_CODES else None


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Convert botocore's exceptions to ``UserError``, ``AlreadyThere`` or ``StorageUnavailable``."""
    try:
        yield
    except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.CredentialRetrievalError) as error:
        raise UserError(
            f"{uri}: no usable credentials ({error}); set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
            f"a role of the pod's service account"
        ) from None
    except (errors.ParamValidationError, errors.ProfileNotFound, ValueError) as error:
        raise UserError(f"{uri}: {error}; check the URI and the AWS settings") from None
    except TRANSIENT_ERRORS as error:
        raise StorageUnavailable(f"{uri}: the store did not answer in {ATTEMPTS} attempts ({error})") from None
    except errors.FlexibleChecksumError as error:
        raise StorageUnavailable(f"{uri}: other bytes arrived than the store holds ({error})") from None
    except S3UploadFailedError as error:
        # boto3 makes a text of the cause, but keeps it in the exception chain.
        if error.__context__ is None:
            raise
        with explained(uri):
            raise error.__context__ from None
    except errors.ClientError as error:
        raise explain(uri, error) from None


def explain(uri: str, error: errors.ClientError) -> Exception:
    code = error.response.get("Error", {}).get("Code", "")
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    bucket = split_uri(uri)[0]
    if code in ("PreconditionFailed", "ConditionalRequestConflict"):
        return AlreadyThere(uri)
    if code == "NoSuchBucket":
        return UserError(f"{uri}: there is no bucket {bucket!r}; create it, or check the name and the endpoint")
    if code == "NoSuchKey" or status == 404:
        return MissingObject(f"{uri}: no such object; check bucket {bucket!r} and the key")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
        return UserError(f"{uri}: the credentials were refused ({code}); renew AWS_ACCESS_KEY_ID and its secret")
    if status in (401, 403):
        return UserError(
            f"{uri}: access denied ({code}); the identity in use needs s3:ListBucket, s3:GetObject, s3:PutObject and "
            f"s3:DeleteObject on bucket {bucket!r}"
        )
    if code == "PermanentRedirect" or status == 301:
        return UserError(f"{uri}: bucket {bucket!r} is in another region; set AWS_REGION to the bucket's")
    if status in TRANSIENT_STATUS or code in TRANSIENT_CODES:
        # An answer to HEAD has no body: its code is the status once more.
        said = status if code == str(status) else f"{status} {code}"
        return StorageUnavailable(f"{uri}: the store kept answering {said} in {ATTEMPTS} attempts")
    return UserError(f"{uri}: the store refused the request ({status} {error})")


def listed(bucket: str, prefix: str) -> Iterator[ObjectInfo]:
    with explained(f"{S3}{bucket}/{prefix}"):
        for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                yield ObjectInfo(f"{S3}{bucket}/{item['Key']}", item["Size"], item["ETag"].strip('"'))


def list_s3(uri: str) -> list[ObjectInfo]:
    """:func:`tasks.storage.open.list_objects` for S3."""
    bucket, key = split_uri(uri)
    if not key or key.endswith("/"):
        return [info for info in listed(bucket, key) if not info.uri.endswith("/")]
    found = list(listed(bucket, key))
    exact = [info for info in found if info.uri == uri]
    return exact or [info for info in found if info.uri.startswith(uri + "/") and not info.uri.endswith("/")]


def head(uri: str) -> dict[str, Any]:
    bucket, key = split_uri(uri)
    with explained(uri):
        return client().head_object(Bucket=bucket, Key=key)


def open_s3(uri: str) -> BinaryIO:
    """:func:`tasks.storage.open.open_reader` for S3."""
    found = head(uri)
    return open_version(ObjectInfo(uri, found["ContentLength"], found["ETag"].strip('"')))


def open_version(source: ObjectInfo) -> BinaryIO:
    """:func:`tasks.storage.open.open_listed` for S3: each read is conditional on the ETag."""
    raw = RangedFile(source.uri, source.size, f'"{source.etag}"')
    return cast(BinaryIO, io.BufferedReader(raw, READ_AHEAD_BYTES))


def read_range(source: ObjectInfo, start: int, end: int) -> bytes:
    """The bytes from ``start`` to ``end`` of a listed object. Raises ``UserError`` if it was replaced since,
    ``StorageUnavailable``."""
    reader = RangedFile(source.uri, source.size, f'"{source.etag}"')
    reader.seek(start)
    return reader.read(end - start) or b""


def copy_object(source: str, target: str) -> None:
    """:func:`tasks.storage.open.copy_within_s3`. Raises ``UserError``, ``StorageUnavailable``."""
    (bucket, key), (target_bucket, target_key) = split_uri(source), split_uri(target)
    with explained(target):
        parts = TransferConfig(COPY_BYTES, CONCURRENCY, COPY_BYTES)
        client().copy({"Bucket": bucket, "Key": key}, target_bucket, target_key, Config=parts)


class RangedFile(io.RawIOBase):
    """An object as a file. Every read is one ranged request, on the condition that the object has not changed."""

    def __init__(self, uri: str, size: int, etag: str) -> None:
        self._uri = uri
        self._bucket, self._key = split_uri(uri)
        self._size = size
        self._etag = etag
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._uri}: cannot seek before the beginning")
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._position + len(view), self._size)
        if end <= self._position:
            return 0
        try:
            data = retried(self._uri, lambda: self._range(self._position, end))
        except AlreadyThere:
            raise UserError(f"{self._uri}: was replaced while it was read; start again") from None
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def readall(self) -> bytes:
        # The inherited method reads 8 KiB at a time.
        data = bytearray(max(0, self._size - self._position))
        self.readinto(data)
        return bytes(data)

    def _range(self, start: int, end: int) -> bytes:
        answer = client().get_object(
            Bucket=self._bucket, Key=self._key, Range=f"bytes={start}-{end - 1}", IfMatch=self._etag
        )
        data = answer["Body"].read()
        if len(data) != end - start:
            raise errors.IncompleteReadError(actual_bytes=len(data), expected_bytes=end - start)
        return data


def retried(uri: str, request: Callable[[], T]) -> T:
    """Run a request, and retry it if reading the response's *body* fails, which botocore does not do."""
    with explained(uri):
        for attempt in range(1, ATTEMPTS):
            try:
                return request()
            except TRANSIENT_ERRORS:
                time.sleep(pause(attempt))
        return request()


class S3Storage:
    """Objects under a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self.base = uri.rstrip("/")
        self._bucket, self._prefix = split_uri(self.base + "/")

    def scratch(self) -> Path:
        return Path(tempfile.gettempdir())

    def put(self, key: str, source: Path | bytes, *, fresh: bool = False) -> None:
        # boto3 sends a CRC with every object and every part; S3 checks it before it stores anything.
        uri, name = f"{self.base}/{key}", self._prefix + key
        if isinstance(source, bytes):
            size = len(source)
            self._put_bytes(uri, name, source, fresh)
        else:
            size = source.stat().st_size
            part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
            parts = TransferConfig(part_bytes, CONCURRENCY, part_bytes)
            with explained(uri):
                client().upload_file(str(source), self._bucket, name, Config=parts)
        # For stores that know no checksums.
        if (stored := head(uri)["ContentLength"]) != size:
            raise StorageUnavailable(f"{uri}: the store holds {stored} bytes, {size} were sent")
        if isinstance(source, Path):
            source.unlink()

    def _put_bytes(self, uri: str, name: str, source: bytes, fresh: bool) -> None:
        condition = {"IfNoneMatch": "*"} if fresh else {}
        try:
            with explained(uri):
                client().put_object(Bucket=self._bucket, Key=name, Body=source, **condition)
        except AlreadyThere:
            # If the answer to the first attempt was lost, the second one finds what the first one wrote.
            with open_s3(uri) as stored:
                if stored.read() != source:
                    raise

    def get(self, key: str, directory: Path) -> Path:
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained(f"{self.base}/{key}"):
            config = TransferConfig(PART_BYTES, CONCURRENCY, PART_BYTES, num_download_attempts=ATTEMPTS)
            client().download_file(self._bucket, self._prefix + key, str(path), Config=config)
        return path

    def list(self, prefix: str = "") -> list[str]:
        cut = len(S3) + len(self._bucket) + 1 + len(self._prefix)
        return sorted(info.uri[cut:] for info in listed(self._bucket, self._prefix + prefix))

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        for start in range(0, len(keys), 1000):
            names = [{"Key": self._prefix + key} for key in keys[start : start + 1000]]
            with explained(self.base):
                client().delete_objects(Bucket=self._bucket, Delete={"Objects": names, "Quiet": True})
