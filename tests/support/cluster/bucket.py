"""The bucket of a rehearsal, shared by propeller and the pods."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from google.protobuf.message import Message

from tests.support.faulty_s3 import CREDENTIALS

Kind = TypeVar("Kind", bound=Message)


class Bucket:
    """Messages and files below ``s3://name/``, on the S3 at ``endpoint``. Requests are repeated only if ``patient``."""

    def __init__(self, endpoint: str, name: str, patient: bool = True) -> None:
        self.endpoint, self.name = endpoint, name
        self.s3 = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=CREDENTIALS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
            region_name=CREDENTIALS["AWS_DEFAULT_REGION"],
            config=Config(retries={} if patient else {"total_max_attempts": 1}),
        )
        self.s3.create_bucket(Bucket=name)

    @property
    def environment(self) -> dict[str, str]:
        """By which a pod finds it: in a cluster the pods' service account and Flyte's settings do this."""
        return {
            "FLYTE_AWS_ENDPOINT": self.endpoint,
            "FLYTE_AWS_ACCESS_KEY_ID": CREDENTIALS["AWS_ACCESS_KEY_ID"],
            "FLYTE_AWS_SECRET_ACCESS_KEY": CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
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

    def message(self, key: str, kind: type[Kind]) -> Kind | None:
        """The message at ``key``; None if there is none."""
        try:
            return kind.FromString(self.read(key))
        except ClientError as error:
            if error.response["Error"]["Code"] == "NoSuchKey":
                return None
            raise

    def upload(self, directory: Path, prefix: str) -> str:
        """Store all files below ``directory``; returns their address."""
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
