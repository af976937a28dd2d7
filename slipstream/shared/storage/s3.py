"""Store on S3, or on a service with its protocol, through boto3.

Endpoint, region, addressing style, credentials and proxies are configured as usual for boto3 (environment, shared
configuration, roles). Missing settings come from Flyte's ``FLYTE_AWS_*`` variables.
"""

from __future__ import annotations

import base64
import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import boto3
import botocore.exceptions as errors
from boto3.exceptions import S3UploadFailedError
from boto3.s3.transfer import TransferConfig
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.client import BaseClient
from botocore.config import Config
from s3transfer.exceptions import RetriesExceededError

from slipstream.shared.errors import UserError
from slipstream.shared.storage import retry
from slipstream.shared.storage.base import (
    CONCURRENCY,
    PART_BYTES,
    S3,
    AlreadyThere,
    MissingObject,
    ObjectInfo,
    StorageUnavailable,
    check_size,
    not_deleted,
    object_holds,
    ranged_reader,
)
from slipstream.shared.storage.conditional import ConditionalWrite
from slipstream.shared.storage.names import check_keys, check_name, check_prefix, path_below
from slipstream.shared.storage.retry import (
    CONNECT_TIMEOUT_S,
    READ_TIMEOUT_S,
    TRANSIENT_STATUS,
    current_limit,
    pause_before_next,
    retry_transient,
)

#: Largest file copied by a single request, whose answer has the file's checksum (S3 allows 5 GiB); size of the parts of
#: a larger copy.
COPY_BYTES, PART_COPY_BYTES = 2 << 30, 256 << 20
MOST_PARTS = 10_000
#: Seconds, for time-limited requests. The system resends a lost packet of a new connection after a second.
LIMITED_CONNECT_TIMEOUT_S = 1
#: Number of keys deleted by one request.
MOST_DELETED = 1000

TRANSIENT_CODES = {
    *("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "ThrottlingException"),
    # Another request writes this key at the same time, and their order is still open.
    *("ConditionalRequestConflict", "OperationAborted"),
    # The received bytes do not match their checksum or signature.
    *("BadDigest", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"),
    # A machine that was suspended sets its clock soon after.
    "RequestTimeTooSkewed",
}
#: Errors of connections that failed or ended before the answer was complete.
TRANSIENT_ERRORS = (
    errors.ConnectionError,
    errors.HTTPClientError,
    errors.IncompleteReadError,
    errors.ResponseStreamingError,
    RetriesExceededError,
)


def split_uri(uri: str) -> tuple[str, str]:
    bucket, _, key = uri[len(S3) :].partition("/")
    if not bucket:
        raise UserError(f"{uri}: names no bucket; expected s3://bucket/key")
    return bucket, key


def client() -> BaseClient:
    """Return the S3 client of this process; connections must not be shared across a fork."""
    return client_of(os.getpid(), is_limited=current_limit() is not None)


@cache
def client_of(process: int, *, is_limited: bool = False) -> BaseClient:
    """Return the client for data requests, or for time-limited requests, with short timeouts and new connections."""
    # A new session, because boto3's default one caches the credentials that it found first.
    s3_client = boto3.session.Session().client(
        "s3",
        **flyte_settings(),
        config=Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=LIMITED_CONNECT_TIMEOUT_S if is_limited else CONNECT_TIMEOUT_S,
            read_timeout=READ_TIMEOUT_S,
            max_pool_connections=2 * CONCURRENCY,
            tcp_keepalive=True,
            **({"s3": {"addressing_style": "path"}} if "endpoint_url" in flyte_settings() else {}),
        ),
    )
    s3_client.meta.events.register("needs-retry.s3", pause_before_retry)
    if is_limited:
        s3_client.meta.events.register("before-send.s3", partial(limit_try, s3_client))
    return s3_client


def limit_try(s3_client: BaseClient, request: AWSPreparedRequest, **_: object) -> None:
    """Handle botocore's ``before-send`` event: limit the time of this try, and use a new connection."""
    s3_client.close()  # Drops idle connections; the next request opens one.
    if limit := current_limit():
        if not limit.remaining_s:
            raise errors.ReadTimeoutError(endpoint_url=request.url, error="no time is left")
        request.context["read_timeout"] = limit.try_s
        # With this header botocore waits a second longer before it sends the body.
        request.headers.pop("Expect", None)


def flyte_settings() -> dict[str, str]:
    """Return settings from Flyte's variables that boto3's own variables do not set."""
    given = os.environ
    settings = {}
    if "FLYTE_AWS_ENDPOINT" in given and not given.keys() & {"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"}:
        settings["endpoint_url"] = given["FLYTE_AWS_ENDPOINT"]
    own = {"AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE"}
    if "FLYTE_AWS_ACCESS_KEY_ID" in given and not given.keys() & own:
        settings["aws_access_key_id"] = given["FLYTE_AWS_ACCESS_KEY_ID"]
        settings["aws_secret_access_key"] = given.get("FLYTE_AWS_SECRET_ACCESS_KEY", "")
    return settings


def pause_before_retry(
    response: tuple[AWSResponse, Mapping[str, Mapping[str, str]]],
    attempts: int,
    caught_exception: Exception | None,
    **_: object,
) -> float | None:
    """Handle botocore's ``needs-retry`` event: return the pause in seconds before the next try, or None for no retry.

    botocore's own policy has a retry quota, which ends retries early if many requests fail at once.
    """
    if caught_exception is not None:
        return pause_before_next(attempts) if isinstance(caught_exception, TRANSIENT_ERRORS) else None
    http, parsed = response
    code = parsed.get("Error", {}).get("Code")
    is_transient = http.status_code in TRANSIENT_STATUS or code in TRANSIENT_CODES
    return pause_before_next(attempts) if is_transient else None


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Convert botocore's exceptions in the block to ``UserError``, ``AlreadyThere`` or ``StorageUnavailable``."""
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
        raise StorageUnavailable(f"{uri}: the store did not answer {retry.retries_in_words()} ({error})") from None
    except errors.FlexibleChecksumError as error:
        raise StorageUnavailable(f"{uri}: the received bytes differ from the stored ones ({error})") from None
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
    if code == "PreconditionFailed" or status == 412:
        return AlreadyThere(uri)
    if code == "NoSuchBucket":
        return UserError(f"{uri}: there is no bucket {bucket!r}; create it, or check the name and the endpoint")
    if code == "NoSuchKey" or status == 404:
        return MissingObject(f"{uri}: no such object; check bucket {bucket!r} and the key")
    if code == "RequestTimeTooSkewed":
        return UserError(f"{uri}: the clock of this machine is wrong by more than 15 minutes; set it")
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
        client_of.cache_clear()  # The next client rereads the credentials, which may be renewed meanwhile.
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
        answer = status if code == str(status) else f"{status} {code}"
        return StorageUnavailable(f"{uri}: the store kept answering {answer} {retry.retries_in_words()}")
    return UserError(f"{uri}: the store refused the request ({status} {error})")


def listed(uri: str) -> Iterator[ObjectInfo]:
    bucket, prefix = split_uri(uri)
    with explained(uri):
        for page in client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
            for item in page.get("Contents", []):
                modified = item["LastModified"].timestamp()
                yield ObjectInfo(f"{S3}{bucket}/{item['Key']}", item["Size"], item["ETag"].strip('"'), modified)


def date(uri: str) -> str:
    bucket, prefix = split_uri(uri)
    with explained(uri):
        answer = client().list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
    headers: Mapping[str, str] = answer["ResponseMetadata"]["HTTPHeaders"]
    return headers.get("date", "")


def stat(uri: str) -> ObjectInfo:
    bucket, key = split_uri(uri)
    with explained(uri):
        headers = client().head_object(Bucket=bucket, Key=key)
    return ObjectInfo(uri, headers["ContentLength"], headers["ETag"].strip('"'))


def fetch(source: ObjectInfo, start: int, end: int) -> bytes:
    """Return the bytes from ``start`` to ``end`` (exclusive).

    Unlike in botocore, a failed read of the *body* is retried, too. Raises ``AlreadyThere`` if the ETag has changed.
    """
    bucket, key = split_uri(source.uri)

    def request() -> bytes:
        answer = client().get_object(
            Bucket=bucket, Key=key, Range=f"bytes={start}-{end - 1}", IfMatch=f'"{source.etag}"'
        )
        data: bytes = answer["Body"].read()
        if len(data) != end - start:
            raise errors.IncompleteReadError(actual_bytes=len(data), expected_bytes=end - start)
        return data

    with explained(source.uri):
        return retry_transient(request, lambda error: isinstance(error, TRANSIENT_ERRORS))


def lifecycle_rules(uri: str) -> list[Mapping[str, Any]]:
    """Return the lifecycle rules of a bucket as S3 describes them."""
    with explained(uri):
        try:
            return list(client().get_bucket_lifecycle_configuration(Bucket=split_uri(uri)[0])["Rules"])
        except errors.ClientError as error:
            if error.response.get("Error", {}).get("Code") == "NoSuchLifecycleConfiguration":
                return []
            raise


def copy_object(source: str, target: str, size: int, sha256: str) -> None:
    """Copy an object; see :func:`slipstream.shared.storage.copy_within_s3`."""
    (bucket, key), (target_bucket, target_key) = split_uri(source), split_uri(target)
    stat(source)  # S3 reports a missing source like a missing target.
    origin, told = {"Bucket": bucket, "Key": key}, ""
    with explained(target):
        if size <= COPY_BYTES:
            answer = client().copy_object(
                CopySource=origin, Bucket=target_bucket, Key=target_key, ChecksumAlgorithm="SHA256"
            )
            told = answer["CopyObjectResult"].get("ChecksumSHA256", "")
        else:
            parts = TransferConfig(PART_COPY_BYTES, CONCURRENCY, PART_COPY_BYTES)
            client().copy(origin, target_bucket, target_key, Config=parts)
    stored = stat(target)
    if told:
        found = base64.b64decode(told).hex()
    else:
        with ranged_reader(stored, fetch) as copied:
            digest = hashlib.sha256()
            while piece := copied.read(PART_BYTES):
                digest.update(piece)
            found = digest.hexdigest()
    if (stored.size, found) != (size, sha256):
        raise UserError(
            f"{source}: was changed after it was written: its copy {target} has {stored.size} bytes with the SHA-256 "
            f"{found}, expected {size} with {sha256}; create it again"
        )


class S3Storage:
    """Objects under a prefix of a bucket."""

    def __init__(self, uri: str) -> None:
        self.base = uri.rstrip("/")
        self._bucket, self._prefix = split_uri(self.base + "/")

    def scratch(self) -> Path:
        return Path(tempfile.gettempdir())

    def put(self, key: str, source: Path | bytes) -> None:
        # boto3 sends a CRC with every object and every part; S3 checks it before it stores anything.
        uri, name = f"{self.base}/{key}", self._prefix + check_name(key, self.base)
        if isinstance(source, bytes):
            with explained(uri):
                client().put_object(Bucket=self._bucket, Key=name, Body=source)
            check_size(stat(uri), len(source))
        else:
            size = source.stat().st_size
            part_bytes = max(PART_BYTES, -(-size // MOST_PARTS))
            parts = TransferConfig(part_bytes, CONCURRENCY, part_bytes)
            with explained(uri):
                client().upload_file(str(source), self._bucket, name, Config=parts)
            check_size(stat(uri), size)
            source.unlink()

    def create(self, key: str, data: bytes, *, exactly_one: bool = True) -> None:
        uri, name = f"{self.base}/{key}", self._prefix + check_name(key, self.base)

        def write() -> None:
            with explained(uri):
                client().put_object(Bucket=self._bucket, Key=name, Body=data, IfNoneMatch="*")

        creation = ConditionalWrite(
            uri, write, partial(object_holds, stat, fetch, uri, data), partial(self.delete, [key])
        )
        creation.run(exactly_one=exactly_one)

    def get(self, key: str, directory: Path) -> Path:
        path = path_below(directory, key, self.base)
        path.parent.mkdir(parents=True, exist_ok=True)
        with explained(f"{self.base}/{key}"):
            config = TransferConfig(PART_BYTES, CONCURRENCY, PART_BYTES, num_download_attempts=retry.ATTEMPTS)
            client().download_file(self._bucket, self._prefix + key, str(path), Config=config)
        return path

    def list(self, prefix: str = "") -> list[str]:
        objects = listed(f"{self.base}/{check_prefix(prefix, self.base)}")
        return check_keys((info.uri[len(self.base) + 1 :] for info in objects), self.base)

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._prefix + check_name(key, self.base) for key in keys]
        batches = [names[start : start + MOST_DELETED] for start in range(0, len(names), MOST_DELETED)]
        codes = [code for batch in batches for code in self._delete(batch)]
        if codes:
            needed = f"; the identity in use needs s3:DeleteObject on bucket {self._bucket!r}"
            why = f"({', '.join(sorted(set(codes)))}){needed if 'AccessDenied' in codes else ''}"
            raise not_deleted(self.base, len(codes), len(names), why)

    def _delete(self, names: Sequence[str]) -> Sequence[str]:
        """Delete objects by one request; return the error codes of refused objects.

        The answer lists refused objects although its status is 200. Transient refusals are retried.
        """
        refused: list[str] = []
        pending = names

        def request() -> None:
            nonlocal pending
            asked: Any = {"Objects": [{"Key": name} for name in pending], "Quiet": True}
            failed = client().delete_objects(Bucket=self._bucket, Delete=asked).get("Errors", [])
            pending = [error["Key"] for error in failed if error["Code"] in TRANSIENT_CODES]
            refused.extend(error["Code"] for error in failed if error["Code"] not in {*TRANSIENT_CODES, "NoSuchKey"})
            if pending:
                code = next(error["Code"] for error in failed if error["Code"] in TRANSIENT_CODES)
                raise StorageUnavailable(
                    f"{self.base}: {len(pending)} of {len(names)} files were not deleted: the store kept answering "
                    f"{code} {retry.retries_in_words()}"
                )

        with explained(self.base):
            retry_transient(request, lambda error: isinstance(error, StorageUnavailable))
        return refused


storage_at = S3Storage
