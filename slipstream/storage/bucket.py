"""What :mod:`slipstream.storage.object_store` needs of a service: its requests, one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PART_BYTES = 16 << 20
CONCURRENCY = 8
#: Objects that are listed by one request.
PAGE = 1000


class ObjectStat(NamedTuple):
    """An object in its bucket. ``version`` changes whenever it is written."""

    key: str
    size: int
    version: str
    checksum: str = ""
    #: When it was written, in seconds; 0 where nobody asked.
    modified: float = 0.0


class Bucket(Protocol):
    """A bucket, or a container. Every method but ``put_file`` is one request, which is not retried; what it raises is
    turned by ``explain`` into what :class:`slipstream.storage.base.Storage` promises."""

    def page(self, prefix: str, token: str) -> tuple[list[ObjectStat], str]:
        """Objects whose keys begin with ``prefix``, and the token of the next page ("" for none)."""

    def stat(self, key: str) -> ObjectStat: ...

    def read(self, key: str, start: int, end: int, version: str) -> bytes:
        """The bytes from ``start`` to ``end`` of this version."""

    def put_bytes(self, key: str, data: bytes, *, fresh: bool) -> None: ...

    def put_file(self, key: str, path: Path, ask: Callable[[Callable[[], Any]], Any]) -> None:
        """Store a file by requests that ``ask`` makes and retries."""

    def checksum(self, path: Path) -> str:
        """What ``stat`` finds as ``checksum`` if these are its bytes: "" where each piece of a download is checked."""

    def delete(self, key: str) -> None: ...

    def explain(self, uri: str, error: Exception) -> Exception:
        """``StorageUnavailable`` for an error after which another attempt may succeed, else what to raise."""
