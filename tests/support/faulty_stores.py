"""Google's and Azure's stores on loopback, their emulators behind the same proxy as :mod:`tests.support.faulty_s3`."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from azure.core.exceptions import ResourceNotFoundError
from azure.storage.blob import BlobClient
from gcp_storage_emulator.server import create_server

from slipstream.operations.proofs.processes import free_port
from slipstream.shared.storage import Storage, storage_for
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3, Handler, faulty

ROOT = Path(__file__).parents[2]
#: The account that Azurite knows, with its published key.
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

#: The fixture of each store that is reached by requests, and the method by which bytes get there.
REMOTE = {"s3": ("store", "PUT"), "gs": ("google", "POST"), "abfs": ("azure", "PUT")}
#: What a process needs to find a store, by the variables that the fixtures set.
VARIABLES = (*CREDENTIALS, "AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING")


@dataclass(frozen=True)
class Remote:
    """A prefix of a store behind the faulty proxy."""

    base: str
    proxy: FaultyS3
    write: str

    @property
    def storage(self) -> Storage:
        return storage_for(self.base)

    @property
    def environment(self) -> dict[str, str]:
        return {name: os.environ[name] for name in VARIABLES if name in os.environ}


class GoogleHandler(Handler):
    """Adds Google's behaviour that the emulator lacks.

    It refuses a request whose ``ifGenerationMatch`` does not hold, lists by pages, and returns no range of an upload
    before its first byte.
    """

    turn = threading.Lock()

    def forward(self) -> None:
        with self.turn:
            super().forward()

    def drop_condition(self, path: str, headers: dict[str, str]) -> str:
        # The emulator knows no condition: what it is asked for must not be refused here.
        if parse_qs(urlsplit(path).query).get("ifGenerationMatch") == ["0"]:
            self.server.fired.append((self.command, f"ignored the condition of {path}"))
        return path

    def refusal(self, body: bytes) -> tuple[int, str] | None:
        asked = urlsplit(self.path)
        wanted = parse_qs(asked.query).get("ifGenerationMatch")
        if wanted is None:
            return None
        path = asked.path
        if self.command == "POST":
            name = json.loads(body.split(b"\r\n\r\n", 2)[1].split(b"\r\n", 1)[0])["name"]
            path = f"{path.removeprefix('/upload')}/{quote(name, safe='')}"
        connection = HTTPConnection(*self.server.upstream, timeout=60)
        connection.request("GET", path)
        answer = connection.getresponse()
        data = answer.read()
        connection.close()
        if answer.status != 200:
            return None  # which is what "0" asks for; a read finds out for itself
        return None if json.loads(data)["generation"] == wanted[0] else (412, "conditionNotMet")

    def error(self, status: int, code: str) -> None:
        text = json.dumps({"error": {"code": status, "message": code}}).encode()
        self.answer(status, [("Content-Type", "application/json")], text, len(text))

    def answer(self, status: int, headers: list[tuple[str, str]], data: bytes, size: int) -> None:
        if status == 308:
            headers = [header for header in headers if header != ("Range", "bytes=0-0")]
        asked = parse_qs(urlsplit(self.path).query)
        if status == 200 and size == len(data) and "maxResults" in asked:
            data = page_of(json.loads(data), int(asked["maxResults"][0]), asked.get("pageToken", [""])[0])
            size = len(data)
        super().answer(status, headers, data, size)


def page_of(listing: dict[str, Any], most: int, token: str) -> bytes:
    items = [item for item in listing.get("items", []) if item["name"] > token]
    more = {"nextPageToken": items[most - 1]["name"]} if len(items) > most else {}
    return json.dumps({"items": items[:most], **more}).encode()


class AzureHandler(Handler):
    """Refuses bytes that are not those of their MD5 with Azure's code; Azurite has another."""

    def drop_condition(self, path: str, headers: dict[str, str]) -> str:
        # The signature covers the condition, so what stands in its way is deleted instead.
        if "If-None-Match" in headers:
            _, _, container, key = unquote(urlsplit(path).path).split("/", 3)
            url = f"http://{self.server.upstream[0]}:{self.server.upstream[1]}"
            with suppress(ResourceNotFoundError):
                BlobClient.from_connection_string(connection_string(url), container, key).delete_blob()
            self.server.fired.append((self.command, f"ignored the condition of {path}"))
        return path

    def refusal(self, body: bytes) -> tuple[int, str] | None:
        sent = self.headers.get("Content-MD5")
        same = sent is None or base64.b64decode(sent) == hashlib.md5(body).digest()
        return None if same else (400, "Md5Mismatch")

    def error(self, status: int, code: str) -> None:
        code = {"AccessDenied": "AuthorizationPermissionMismatch", "SlowDown": "ServerBusy"}.get(code, code)
        text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>injected</Message></Error>'.encode()
        self.answer(status, [("Content-Type", "application/xml"), ("x-ms-error-code", code)], text, len(text))


@contextmanager
def faulty_google() -> Iterator[FaultyS3]:
    """With the bucket ``bucket``."""
    port = free_port()
    emulator = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    emulator.start()
    try:
        with faulty(("127.0.0.1", port), GoogleHandler) as proxy:
            yield proxy
    finally:
        emulator.stop()


def azurite() -> str | None:
    """The command, if ``npm install azurite`` was run here or globally."""
    local = ROOT / "node_modules" / ".bin"
    return shutil.which("azurite-blob", path=f"{local}{os.pathsep}{os.environ.get('PATH', '')}")


def connection_string(url: str) -> str:
    return f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={url}/{ACCOUNT};"


@contextmanager
def faulty_azure(directory: Path) -> Iterator[FaultyS3]:
    """With no container yet."""
    port = free_port()
    command = [azurite() or "azurite-blob", "--blobPort", str(port)]
    command += ["--inMemoryPersistence", "--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next((line for line in process.stdout if "successfully listens" in line), "")
            assert said, "Azurite did not start"
            with faulty(("127.0.0.1", port), AzureHandler) as proxy:
                yield proxy
        finally:
            process.terminate()
            process.wait()
