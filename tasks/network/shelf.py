"""Artifacts of one kind below one address, each published whole.

``<address>/<time>-<id>/`` is an artifact whose manifest is written last, so that one without it is none. Names sort by
time.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Generic, TypeVar

from tasks.artifacts.format import MANIFEST
from tasks.errors import UserError
from tasks.logs import logger
from tasks.storage import storage_for

LOG = logger("network")
T = TypeVar("T")


class Shelf(ABC, Generic[T]):
    """What lies below ``address``; of each artifact the manifest and ``file``."""

    file: str

    def __init__(self, address: str) -> None:
        self.address = address
        self._storage = storage_for(address)

    @abstractmethod
    def opened(self, directory: Path, name: str) -> T:
        """The artifact in ``directory``. Raises ``UserError`` naming what is wrong with ``name``."""

    def names(self) -> list[str]:
        """Of what is published, the oldest first."""
        keys = self._storage.list()
        return sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}"))

    def read(self, name: str) -> T:
        """Raises ``UserError`` (``DamagedArtifact``) naming what is wrong."""
        with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
            for file in (MANIFEST, self.file):
                path = self._storage.get(f"{name}/{file}", Path(scratch))
            return self.opened(path.parent, name)

    def latest(self) -> T | None:
        """The youngest that can be read; a warning names younger ones that cannot."""
        for name in reversed(self.names()):
            try:
                return self.read(name)
            except UserError as error:
                LOG.warning("passed over: %s", error.message)
        return None

    def add(self, whole: Path, made_at: float) -> str:
        """Publish the artifact in the directory ``whole``; returns its address. Raises ``UserError`` if nothing can be
        written there."""
        name = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime(made_at))}-{uuid.uuid4().hex[:6]}"
        for file in (self.file, MANIFEST):
            self._storage.put(f"{name}/{file}", (whole / file).read_bytes())
        return f"{self.address}/{name}"

    def check_writable(self) -> None:
        """Raise ``UserError`` unless something can be written; before hours are spent on measuring it."""
        probe = f".probe-{uuid.uuid4().hex}"
        self._storage.put(probe, b"")
        self._storage.delete([probe])
