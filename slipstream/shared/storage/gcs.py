"""Requests to Google Cloud Storage's JSON API, through gcsfs.

Credentials are Google's application default credentials: ``GOOGLE_APPLICATION_CREDENTIALS``, gcloud's, or the pod's
service account. ``STORAGE_EMULATOR_HOST`` names an emulator, which needs none.
"""

from __future__ import annotations

import base64
import json
import os
import uuid
from collections.abc import Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

import aiohttp
import google.auth.exceptions
import google_crc32c
import requests
from fsspec.asyn import sync
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError

from slipstream.shared.errors import UserError
from slipstream.shared.storage import retry
from slipstream.shared.storage.base import (
    PAGE,
    PART_BYTES,
    AlreadyThere,
    MissingObject,
    ObjectStat,
    RetriedRequest,
    StorageUnavailable,
)
from slipstream.shared.storage.retry import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, TRANSIENT_STATUS, current_limit

#: Exceptions of gcsfs for status 502, for failed connections, and for an unresponsive token service.
TRANSIENT_ERRORS = (
    requests.exceptions.RequestException,
    aiohttp.ClientError,
    TimeoutError,
    ConnectionError,
    google.auth.exceptions.TransportError,
)


class GoogleFilesystem(GCSFileSystem):
    """Client of gcsfs without its own retries, whose pauses would use Python's global random generator."""

    _request = GCSFileSystem._request.__wrapped__


class FreshGoogleFilesystem(GoogleFilesystem):
    """Client that opens a new connection for every request."""

    async def _set_session(self) -> aiohttp.ClientSession:
        session = await super()._set_session()
        session.connector._force_close = True
        return session


def client() -> GoogleFilesystem:
    """Return the client of this process; connections and the event loop must not be shared across a fork."""
    return client_of(os.getpid(), is_limited=current_limit() is not None)


@cache
def client_of(process: int, *, is_limited: bool = False) -> GoogleFilesystem:
    """Return the client for data requests, or for time-limited requests, with new connections."""
    return (FreshGoogleFilesystem if is_limited else GoogleFilesystem)(
        token="anon" if os.environ.get("STORAGE_EMULATOR_HOST") else "google_default",
        requests_timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_TIMEOUT_S, sock_read=READ_TIMEOUT_S),
        skip_instance_cache=True,
    )


class GoogleResponse(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes


def call(method: str, path: str, *parts: str, **options: object) -> GoogleResponse:
    """Make one request; ``parts`` are quoted into ``path``, and options that gcsfs does not know become the query."""
    fs = client()
    limit = current_limit()
    timeout = limit.try_s if limit else None
    status, headers, _, body = sync(fs.loop, fs._request, method, path, *parts, timeout=timeout, **options)
    return GoogleResponse(status, headers, body)


def upload_path() -> str:
    return client().base.replace("/storage/v1/", "/upload/storage/v1/") + "b/{}/o"


class GoogleBucket:
    """Bucket of Google (a ``BucketClient``); an object's version is its generation."""

    def __init__(self, name: str) -> None:
        self._name = name

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        answer = call(
            "GET",
            "b/{}/o",
            self._name,
            prefix=prefix,
            pageToken=token or None,
            maxResults=PAGE,
            fields="items(name,size,generation,updated),nextPageToken",
        )
        page = json.loads(answer.body)
        return [object_stat(item) for item in page.get("items", [])], page.get("nextPageToken", "")

    def date(self, prefix: str) -> str:
        answer = call("GET", "b/{}/o", self._name, prefix=prefix, maxResults=1, fields="kind")
        return answer.headers.get("Date", "")

    def stat(self, key: str) -> ObjectStat:
        return object_stat(json.loads(call("GET", "b/{}/o/{}", self._name, key).body))

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        return call(
            "GET", "b/{}/o/{}", self._name, key, alt="media", ifGenerationMatch=version or None, headers=headers
        ).body

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None:
        boundary = uuid.uuid4().hex
        resource = json.dumps({"name": key, "crc32c": base64.b64encode(google_crc32c.Checksum(data).digest()).decode()})
        head = f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{resource}\r\n"
        content = f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
        call(
            "POST",
            upload_path(),
            self._name,
            uploadType="multipart",
            ifGenerationMatch="0" if fresh else None,
            headers={"Content-Type": f"multipart/related; boundary={boundary}"},
            data=(head + content).encode() + data + f"\r\n--{boundary}--\r\n".encode(),
        )

    def put_file(self, key: str, path: Path, ask: RetriedRequest) -> None:
        size = path.stat().st_size
        if size <= PART_BYTES:
            ask(lambda: self.put_bytes(key, path.read_bytes(), fresh=False))
            return
        resource = {"name": key, "crc32c": self.checksum(path)}
        session = ask(lambda: call("POST", upload_path(), self._name, uploadType="resumable", json=resource))
        address = session.headers["Location"]
        #: Number of bytes that the store has received; None if its answer was lost.
        received: int | None = 0

        def send() -> int:
            nonlocal received
            if received is None:
                received = arrived(call("PUT", address, headers={"Content-Range": f"bytes */{size}"}), size)
            if received < size:
                start = received
                file.seek(start)
                part = file.read(PART_BYTES)
                span = {"Content-Range": f"bytes {start}-{start + len(part) - 1}/{size}"}
                received = None
                # Not PUT, which aiohttp may send twice.
                received = arrived(call("POST", address, headers=span, data=part), size)
            return received

        with path.open("rb") as file:
            while ask(send) < size:
                pass

    def checksum(self, path: Path) -> str:
        total = google_crc32c.Checksum()
        with path.open("rb") as file:
            while piece := file.read(PART_BYTES):
                total.update(piece)
        return base64.b64encode(total.digest()).decode()

    def delete(self, key: str) -> None:
        call("DELETE", "b/{}/o/{}", self._name, key)

    def explain(self, uri: str, error: Exception) -> Exception:
        unavailable = StorageUnavailable(f"{uri}: the store did not answer {retry.retries_in_words()} ({error!r})")
        if isinstance(error, TRANSIENT_ERRORS):
            return unavailable
        if isinstance(error, FileExistsError):
            return AlreadyThere(uri)
        if isinstance(error, FileNotFoundError):
            if str(error).endswith("/o"):
                return UserError(f"{uri}: there is no bucket {self._name!r}; create it, or check the name")
            return MissingObject(f"{uri}: no such object; check bucket {self._name!r} and the key")
        if isinstance(error, HttpError):
            status, message = int(error.code or 0), str(error.message)
            # A checksum mismatch, and a token that expired on the way.
            if "match calculated" in message or (status == 401 and "Invalid Credentials" in message):
                return unavailable
            if status in TRANSIENT_STATUS:
                return StorageUnavailable(f"{uri}: the store kept answering {status} {retry.retries_in_words()}")
            if status == 401:
                return UserError(f"{uri}: the credentials were refused ({message}); renew them")
            return UserError(f"{uri}: the store refused the request ({message})")
        if isinstance(error, google.auth.exceptions.GoogleAuthError):
            return UserError(
                f"{uri}: no usable credentials ({str(error).splitlines()[0]}); set GOOGLE_APPLICATION_CREDENTIALS, or "
                f"give the pod's service account a role"
            )
        if isinstance(error, OSError) and str(error).startswith("Forbidden"):
            return UserError(
                f"{uri}: access denied; the identity in use needs storage.objects.list, get, create and delete "
                f"(roles/storage.objectUser) on bucket {self._name!r}"
            )
        if isinstance(error, ValueError):
            return UserError(f"{uri}: {' '.join(str(error).split())}; check the address")
        return error


def object_stat(resource: Mapping[str, str]) -> ObjectStat:
    # Some emulators omit it.
    written = datetime.fromisoformat(resource["updated"]).timestamp() if "updated" in resource else 0.0
    size, generation = int(resource["size"]), resource["generation"]
    return ObjectStat(resource["name"], size, generation, resource.get("crc32c", ""), written)


def arrived(answer: GoogleResponse, size: int) -> int:
    """Return the number of bytes of a resumable upload, of ``size``, that the store has received.

    An unfinished upload is answered by 308 with a range, or without one if there are none.
    """
    if answer.status != 308:
        return size
    return int(answer.headers["Range"].rpartition("-")[2]) + 1 if "Range" in answer.headers else 0
