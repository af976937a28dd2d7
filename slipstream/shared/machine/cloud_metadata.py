"""Clients of the clouds' metadata servers: one HTTP exchange, and AWS's protocol."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from email.message import Message

#: Metadata servers: LINK_LOCAL of AWS and Azure, GOOGLE of Google.
LINK_LOCAL = "http://169.254.169.254"
GOOGLE = "http://metadata.google.internal"
#: Timeout of an exchange in seconds.
TIMEOUT_S = 2.0
MAX_RESPONSE_BYTES = 1 << 16


class MetadataUnavailable(Exception):
    """Error for a metadata server that gives no documented answer; must not stop a run."""


def http_request(
    url: str, headers: dict[str, str], *, method: str = "GET", timeout: float = TIMEOUT_S
) -> tuple[int, bytes, Message]:
    """Return status, body and headers of one HTTP exchange, whatever the status.

    Raises ``MetadataUnavailable`` without an answer.
    """
    # No proxy, because it would forward the metadata of its own machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    asked = urllib.request.Request(url, headers=headers, method=method)
    try:
        try:
            with opener.open(asked, timeout=timeout) as answer:
                return answer.status, answer.read(MAX_RESPONSE_BYTES), answer.headers
        except urllib.error.HTTPError as error:
            return error.code, b"", error.headers
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise MetadataUnavailable(f"{url}: {error}") from None


def parse_mapping(body: bytes, url: str) -> dict[str, object]:
    """Parse a JSON mapping; raises ``MetadataUnavailable`` for anything else."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        raise MetadataUnavailable(f"{url}: not JSON") from None
    if not isinstance(value, dict):
        raise MetadataUnavailable(f"{url}: not a mapping")
    return value


class AwsMetadata:
    """Client of IMDSv2, in which every request carries a token; a rejected token is renewed."""

    TOKEN_S = 21600

    def __init__(self, base: str = LINK_LOCAL, timeout: float = TIMEOUT_S) -> None:
        self._base = base
        self._timeout = timeout
        self._token = ""

    def get(self, path: str) -> bytes | None:
        """Return the content at ``path``; None if it does not exist; raises ``MetadataUnavailable``."""
        for _ in range(2):
            if not self._token:
                self.renew()
            headers = {"X-aws-ec2-metadata-token": self._token}
            status, body, _headers = http_request(self._base + path, headers, timeout=self._timeout)
            if status == 404:
                return None
            if status == 200:
                return body
            if status != 401:
                break
            self._token = ""
        raise MetadataUnavailable(f"{path}: status {status}")

    def renew(self) -> None:
        """Request a new token; raises ``MetadataUnavailable``."""
        seconds = {"X-aws-ec2-metadata-token-ttl-seconds": str(self.TOKEN_S)}
        url = self._base + "/latest/api/token"
        status, body, _ = http_request(url, seconds, method="PUT", timeout=self._timeout)
        if status != 200 or not body.strip().isascii():
            raise MetadataUnavailable(f"/latest/api/token: status {status}")
        self._token = body.strip().decode()
        if not self._token.isprintable() or not self._token:
            self._token = ""
            raise MetadataUnavailable("/latest/api/token: not a token")
