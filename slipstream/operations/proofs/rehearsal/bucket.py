"""Bucket of a rehearsal, and the S3 on this machine that holds it."""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from google.protobuf.message import Message

SECRET = "a-secret-key-of-the-rehearsal"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "rehearsal", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_DEFAULT_REGION": "us-east-1"}
AnyMessage = TypeVar("AnyMessage", bound=Message)


class S3Bucket:
    """Messages and files below ``s3://name/`` on the S3 at ``endpoint``. Requests are repeated only if ``patient``."""

    def __init__(self, endpoint: str, name: str, patient: bool = True) -> None:
        self.endpoint, self.name = endpoint, name
        self.s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=SECRET,
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            config=Config(retries={} if patient else {"total_max_attempts": 1}),
        )
        self.s3.create_bucket(Bucket=name)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which a pod reaches the bucket."""
        return {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "FLYTE_AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            **CREDENTIALS,
        }

    def uri(self, key: str) -> str:
        return f"s3://{self.name}/{key}"

    def key_of(self, uri: str) -> str:
        return uri.removeprefix(f"s3://{self.name}/")

    def keys(self, prefix: str) -> list[str]:
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [found["Key"] for page in pages for found in page.get("Contents", [])]

    def read(self, key: str) -> bytes:
        return self.s3.get_object(Bucket=self.name, Key=key)["Body"].read()

    def write(self, key: str, content: bytes) -> None:
        self.s3.put_object(Bucket=self.name, Key=key, Body=content)

    def message(self, key: str, kind: type[AnyMessage]) -> AnyMessage | None:
        """Return the message at ``key``, or None if there is none."""
        try:
            return kind.FromString(self.read(key))
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise

    def upload(self, directory: Path, prefix: str) -> str:
        """Store all files below ``directory`` and return their common address."""
        for path in directory.rglob("*"):
            if path.is_file():
                self.write(f"{prefix}/{path.relative_to(directory).as_posix()}", path.read_bytes())
        return self.uri(prefix)

    def download(self, uri: str, into: Path) -> Path:
        prefix = self.key_of(uri)
        for key in self.keys(prefix):
            path = into / key.removeprefix(prefix).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.read(key))
        return into


class WatchedS3:
    """S3 of moto on loopback that reports every request, by method and path, before it acts on it."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.watcher: Callable[[str, str], None] = lambda method, path: None
        self.moto = DomainDispatcherApplication(create_backend_app)
        self.server = make_server("127.0.0.1", 0, self.answer, threaded=True, request_handler=MotoRequestHandler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        """Answer a request (WSGI). As in S3, a request whose body is incomplete changes nothing."""
        size = int(environ.get("CONTENT_LENGTH") or 0)
        body = environ["wsgi.input"].read() if environ.get("wsgi.input_terminated") else b""
        body = body or (environ["wsgi.input"].read(size) if size else b"")
        if len(body) < size:
            start_response("400 IncompleteBody", [("Content-Length", "0")])
            return []
        self.watcher(environ["REQUEST_METHOD"], environ["RAW_URI"])
        environ["wsgi.input"] = io.BytesIO(body)
        return self.moto(environ, start_response)


@contextmanager
def watched_s3() -> Iterator[WatchedS3]:
    s3 = WatchedS3()
    thread = threading.Thread(target=s3.server.serve_forever, daemon=True)
    thread.start()
    try:
        yield s3
    finally:
        s3.server.shutdown()
        s3.server.server_close()
        thread.join()
