"""A repository of artifacts of one kind below one address: they are listed, read and published.

``<address>/<time>-<id>/`` is an artifact. Its manifest is written last: a directory without one is incomplete, and is
not listed. Names sort by time.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from slipstream.artifacts.format import MANIFEST
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import storage_for

LOG = logger("network")
T = TypeVar("T")


class ArtifactRepository(ABC, Generic[T]):
    """The artifacts below ``address``."""

    #: The one file of an artifact besides its manifest.
    file: str

    def __init__(self, address: str) -> None:
        self.address = address
        self._storage = storage_for(address)

    @abstractmethod
    def load(self, directory: Path, name: str) -> T:
        """Read the artifact in ``directory``. Raises ``UserError`` naming what is wrong with ``name``."""

    def names(self) -> list[str]:
        """The names of all artifacts, the oldest first."""
        keys = self._storage.list()
        return sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}"))

    def fetch(self, name: str) -> T:
        """Fetch and read an artifact. Raises ``UserError`` (``DamagedArtifact``) naming what is wrong."""
        with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
            for file in (MANIFEST, self.file):
                path = self._storage.get(f"{name}/{file}", Path(scratch))
            return self.load(path.parent, name)

    def latest(self) -> T | None:
        """The newest artifact that can be read, if any; a warning names newer ones that cannot."""
        for name in reversed(self.names()):
            try:
                return self.fetch(name)
            except UserError as error:
                LOG.warning("skipped: %s", error.message)
        return None

    def add(self, directory: Path, made_at: float) -> str:
        """Publish the artifact in ``directory``; returns its address. Raises ``UserError`` if nothing can be
        written there."""
        name = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime(made_at))}-{uuid.uuid4().hex[:6]}"
        for file in (self.file, MANIFEST):
            self._storage.put(f"{name}/{file}", (directory / file).read_bytes())
        return f"{self.address}/{name}"

    def check_writable(self) -> None:
        """Raise ``UserError`` unless something can be written here: called before a long measurement."""
        probe = f".probe-{uuid.uuid4().hex}"
        self._storage.put(probe, b"")
        self._storage.delete([probe])
