"""Requests to Azure Blob Storage, through adlfs.

Account and credentials are configured as usual for adlfs (``AZURE_STORAGE_*``, or the pod's identity). Missing settings
come from flytekit's ``FLYTE_AZURE_*`` variables. The address may contain the account:
``abfs://container@account.dfs.core.windows.net/key``.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import aiohttp
import azure.core.exceptions as errors
from adlfs import AzureBlobFileSystem
from azure.core import MatchConditions
from azure.core.pipeline.transport import AioHttpTransport
from azure.storage.blob import BlobBlock
from azure.storage.blob.aio import BlobClient, BlobServiceClient, ContainerClient
from fsspec.asyn import sync

from slipstream.shared.errors import UserError, first_line
from slipstream.shared.storage import retry
from slipstream.shared.storage.base import (
    CONCURRENCY,
    PAGE,
    PART_BYTES,
    AlreadyThere,
    MissingObject,
    ObjectStat,
    RetriedRequest,
    StorageUnavailable,
)
from slipstream.shared.storage.retry import CONNECT_TIMEOUT_S, READ_TIMEOUT_S, TRANSIENT_STATUS, current_limit

MOST_BLOCKS = 50_000
#: Options for a single try per request, since the client's own pauses start at 15 seconds.
ONCE: dict[str, Any] = {"retry_total": 0, "connection_timeout": CONNECT_TIMEOUT_S, "read_timeout": READ_TIMEOUT_S}
#: Options for an MD5 that the receiver checks; downloads are then requested in chunks of 4 MiB.
CHECKED = {**ONCE, "validate_content": True}
TRANSIENT_CODES = {"Md5Mismatch", "OperationTimedOut", "ContainerBeingDeleted"}
TRANSIENT_ERRORS = (errors.ServiceRequestError, errors.ServiceResponseError, errors.IncompleteReadError, TimeoutError)
SETTINGS = {
    "account_name": "STORAGE_ACCOUNT_NAME",
    "account_key": "STORAGE_ACCOUNT_KEY",
    "tenant_id": "TENANT_ID",
    "client_id": "CLIENT_ID",
    "client_secret": "CLIENT_SECRET",
}


class AzureFilesystem(AzureBlobFileSystem):
    """Filesystem of adlfs with a second client, which opens new connections, for time-limited requests."""

    @cached_property
    def fresh_service(self) -> BlobServiceClient:
        service, session = sync(self.loop, self._connect_freshly)
        weakref.finalize(self, sync, self.loop, session.close)
        return service

    async def _connect_freshly(self) -> tuple[BlobServiceClient, aiohttp.ClientSession]:
        shared, connector = self.service_client, aiohttp.TCPConnector(force_close=True)
        # Otherwise like azure-core's own session.
        session = aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=True, auto_decompress=False
        )
        transport = AioHttpTransport(session=session)
        return BlobServiceClient(shared.url, credential=shared.credential, transport=transport), session


def client(account: str) -> AzureFilesystem:
    """Return the client of this process; connections and the event loop must not be shared across a fork."""
    return client_of(os.getpid(), account)


@cache
def client_of(process: int, account: str) -> AzureFilesystem:
    settings = flyte_settings()
    if account:
        settings["account_name"] = account
    return AzureFilesystem(**settings, skip_instance_cache=True)


def flyte_settings() -> dict[str, str]:
    """Return settings from Flyte's variables; none if adlfs's own variables name an account."""
    given = os.environ
    if given.keys() & {"AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"}:
        return {}
    flyte = {setting: f"FLYTE_AZURE_{name}" for setting, name in SETTINGS.items()}
    return {setting: given[name] for setting, name in flyte.items() if name in given}


class AzureContainer:
    """Container of Azure (a ``BucketClient``); an object's version is its ETag."""

    def __init__(self, name: str) -> None:
        self._container, _, host = name.partition("@")
        self._account = host.partition(".")[0]

    def _call(self, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        limit = current_limit()
        timeout = limit.try_s if limit else None
        return sync(client(self._account).loop, method, *arguments, timeout=timeout, **named)

    def _service(self) -> BlobServiceClient:
        shared = client(self._account)
        return shared.fresh_service if current_limit() else shared.service_client

    def _containers(self) -> ContainerClient:
        return self._service().get_container_client(self._container)

    def _blob(self, key: str) -> BlobClient:
        return self._service().get_blob_client(self._container, key)

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        return self._call(self._page, self._containers(), prefix, token)

    async def _page(self, container: ContainerClient, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        options = {**ONCE, "include": ["metadata"], "results_per_page": PAGE}
        blobs = container.list_blobs(prefix, **options)
        pages: Any = blobs.by_page(continuation_token=token or None)
        page = [blob async for blob in await anext(pages)]
        # An account with a hierarchical namespace lists directories, too.
        files = [blob for blob in page if not (blob.metadata or {}).get("hdi_isfolder")]
        stats = [
            ObjectStat(blob.name, blob.size, blob.etag.strip('"'), modified=blob.last_modified.timestamp())
            for blob in files
        ]
        return stats, pages.continuation_token or ""

    def date(self, prefix: str) -> str:
        return self._call(self._date, prefix)

    async def _date(self, prefix: str) -> str:
        dates: list[str] = []

        def note(response: Any) -> None:
            dates.append(response.http_response.headers.get("Date", ""))

        options = {**ONCE, "results_per_page": 1, "raw_response_hook": note}
        await anext(self._containers().list_blobs(prefix, **options).by_page())
        return dates[-1] if dates else ""

    def stat(self, key: str) -> ObjectStat:
        properties = self._call(self._blob(key).get_blob_properties, **ONCE)
        return ObjectStat(key, properties.size, properties.etag.strip('"'))

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        return self._call(self._read, self._blob(key), start, end, version)

    async def _read(self, blob: BlobClient, start: int, end: int, version: str) -> bytes:
        same = {"etag": f'"{version}"', "match_condition": MatchConditions.IfNotModified} if version else {}
        options = {**CHECKED, **same, "decompress": False}
        stream = await blob.download_blob(start, end - start, **options)
        return await stream.readall()

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None:
        self._call(self._blob(key).upload_blob, data, overwrite=not fresh, **CHECKED)

    def put_file(self, key: str, path: Path, ask: RetriedRequest) -> None:
        size = path.stat().st_size
        if size <= PART_BYTES:
            ask(lambda: self.put_bytes(key, path.read_bytes(), fresh=False))
            return
        block_bytes = max(PART_BYTES, -(-size // MOST_BLOCKS))
        blob = self._blob(key)
        with path.open("rb") as file, ThreadPoolExecutor(CONCURRENCY) as pool:

            def stage(start: int) -> BlobBlock:
                block = f"{start:032d}"
                data = os.pread(file.fileno(), block_bytes, start)
                ask(lambda: self._call(blob.stage_block, block, data, **CHECKED))
                return BlobBlock(block)

            blocks = list(pool.map(stage, range(0, size, block_bytes)))
        ask(lambda: self._call(blob.commit_block_list, blocks, **ONCE))

    def checksum(self, path: Path) -> str:
        return ""

    def delete(self, key: str) -> None:
        self._call(self._blob(key).delete_blob, **ONCE)

    def explain(self, uri: str, error: Exception) -> Exception:
        status = getattr(error, "status_code", None)
        answered = getattr(error, "error_code", None) or status
        code = str(getattr(answered, "value", answered))
        if isinstance(error, TRANSIENT_ERRORS):
            return StorageUnavailable(
                f"{uri}: the store did not answer {retry.retries_in_words()} ({first_line(error)})"
            )
        if isinstance(error, errors.AzureError) and "MD5 mismatch" in str(error):
            return StorageUnavailable(f"{uri}: the received bytes differ from the stored ones ({first_line(error)})")
        if code in TRANSIENT_CODES or status in TRANSIENT_STATUS:
            return StorageUnavailable(f"{uri}: the store kept answering {status} {code} {retry.retries_in_words()}")
        if code in ("BlobAlreadyExists", "ConditionNotMet", "412"):
            return AlreadyThere(uri)
        if code == "ContainerNotFound":
            return UserError(
                f"{uri}: there is no container {self._container!r}; create it, or check the name and the account"
            )
        if status == 404:
            return MissingObject(f"{uri}: no such object; check container {self._container!r} and the key")
        if code in ("AuthenticationFailed", "InvalidAuthenticationInfo") or status == 401:
            return UserError(f"{uri}: the credentials were refused ({code}); renew them")
        if status == 403:
            return UserError(
                f"{uri}: access denied ({code}); the identity in use needs the role Storage Blob Data Contributor on "
                f"container {self._container!r}"
            )
        if isinstance(error, errors.ClientAuthenticationError | ValueError):
            return UserError(
                f"{uri}: no usable account or credentials ({first_line(error)}); set AZURE_STORAGE_ACCOUNT_NAME, and "
                f"AZURE_STORAGE_ACCOUNT_KEY or an identity of the pod's service account"
            )
        if isinstance(error, errors.HttpResponseError):
            return UserError(f"{uri}: the store refused the request ({status} {code})")
        return error
