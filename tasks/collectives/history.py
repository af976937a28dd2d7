"""The history: profiles by fingerprint, in a directory or a store, each published whole.

``<history>/<digest of the fingerprint>/<time>-<id>/`` is an artifact whose manifest is written last, so that a profile
without one is none. Names sort by time.
"""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from tasks.artifacts.format import MANIFEST, DamagedArtifact
from tasks.artifacts.network_profile import FILE, Fingerprint, NetworkProfile, Point, read_profile, write_profile
from tasks.errors import UserError
from tasks.logs import logger
from tasks.storage import storage_for

LOG = logger("collectives")
SECONDS_A_DAY = 86_400


class History:
    """The profiles of one fingerprint below ``root``."""

    def __init__(self, root: str, fingerprint: Fingerprint) -> None:
        self._fingerprint = fingerprint
        self.address = f"{root.rstrip('/')}/{fingerprint.digest}"
        self._storage = storage_for(self.address)

    def names(self) -> list[str]:
        """Of the published profiles, the oldest first."""
        keys = self._storage.list()
        return sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}"))

    def read(self, name: str) -> NetworkProfile:
        """Raises ``UserError`` (``DamagedArtifact``) naming what is wrong."""
        with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
            for file in (MANIFEST, FILE):
                path = self._storage.get(f"{name}/{file}", Path(scratch))
            profile = read_profile(path.parent)
        if profile.fingerprint != self._fingerprint:
            raise DamagedArtifact(f"{self.address}/{name}: a profile of other hardware, versions or world")
        return profile

    def profiles(self, most: int | None = None) -> list[NetworkProfile]:
        """All that can be read, or of the youngest so many; the oldest first. A warning names those that cannot."""
        found = []
        for name in self.names()[-(most or 0) :]:
            try:
                found.append(self.read(name))
            except UserError as error:
                LOG.warning("passed over: %s", error.message)
        return found

    def course(self, most: int = 30) -> list[Point]:
        """The largest all_reduce of the youngest profiles that have one, the oldest first."""
        found = []
        for profile in self.profiles(most):
            for m in profile.of("all_reduce")[-1:]:
                low, high = m.interval() or (None, None)
                found.append(
                    Point(
                        measured_at=profile.measured_at,
                        bytes=m.bytes,
                        busbw=m.busbw(),
                        low=None if high is None else m.busbw(high),
                        high=None if low is None else m.busbw(low),
                    )
                )
        return found

    def latest(self) -> NetworkProfile | None:
        """The youngest that can be read; a warning names younger ones that cannot."""
        for name in reversed(self.names()):
            try:
                return self.read(name)
            except UserError as error:
                LOG.warning("passed over: %s", error.message)
        return None

    def publish(self, profile: NetworkProfile, made_by: dict[str, Any]) -> str:
        """Write the profile; returns its address. Raises ``UserError`` if the history cannot be written."""
        measured = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime(profile.measured_at))
        name = f"{measured}-{uuid.uuid4().hex[:6]}"
        with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
            whole = Path(scratch) / "profile"
            write_profile(whole, profile, made_by)
            for file in (FILE, MANIFEST):
                self._storage.put(f"{name}/{file}", (whole / file).read_bytes())
        return f"{self.address}/{name}"

    def check_writable(self) -> None:
        """Raise ``UserError`` unless something can be written; before hours are spent on measuring it."""
        probe = f".probe-{uuid.uuid4().hex}"
        self._storage.put(probe, b"")
        self._storage.delete([probe])


def age_in_days(profile: NetworkProfile) -> float:
    return (time.time() - profile.measured_at) / SECONDS_A_DAY
