"""The history: profiles and the tuner's results by fingerprint, in a directory or a store.

Those of a fingerprint are below ``<history>/<digest>`` and ``<history>/<digest>.tuning``.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from slipstream.artifacts.format import MANIFEST, DamagedArtifact
from slipstream.errors import UserError
from slipstream.interconnect import profile as network_profile
from slipstream.interconnect import tuning as network_tuning
from slipstream.interconnect.artifact_repository import ArtifactRepository
from slipstream.interconnect.profile import Fingerprint, NetworkProfile, TrendPoint, read_profile, write_profile
from slipstream.interconnect.tuning import Tuning, read_tuning, write_tuning
from slipstream.logs import logger
from slipstream.storage import storage_for

LOG = logger("network")
SECONDS_A_DAY = 86_400


class ProfileHistory(ArtifactRepository[NetworkProfile]):
    """The profiles of one fingerprint below ``root``."""

    file = network_profile.FILE

    def __init__(self, root: str, fingerprint: Fingerprint) -> None:
        super().__init__(f"{root.rstrip('/')}/{fingerprint.digest}")
        self._fingerprint = fingerprint

    def load(self, directory: Path, name: str) -> NetworkProfile:
        profile = read_profile(directory)
        if profile.fingerprint != self._fingerprint:
            raise DamagedArtifact(f"{self.address}/{name}: a profile of other hardware, versions or world")
        return profile

    def profiles(self, most: int | None = None) -> list[NetworkProfile]:
        """All profiles that can be read, the oldest first, among the newest ``most``. A warning names the others."""
        readable = []
        for name in self.names()[-(most or 0) :]:
            try:
                readable.append(self.fetch(name))
            except UserError as error:
                LOG.warning("skipped: %s", error.message)
        return readable

    def course(self, most: int = 30) -> list[TrendPoint]:
        """The largest all_reduce of the youngest profiles that have one, the oldest first."""
        points = []
        for profile in self.profiles(most):
            for m in profile.of("all_reduce")[-1:]:
                low, high = m.interval() or (None, None)
                points.append(
                    TrendPoint(
                        measured_at=profile.measured_at,
                        bytes=m.bytes,
                        busbw=m.busbw(),
                        low=None if high is None else m.busbw(high),
                        high=None if low is None else m.busbw(low),
                    )
                )
        return points

    def publish(self, profile: NetworkProfile, made_by: Mapping[str, object]) -> str:
        """Write the profile; returns its address. Raises ``UserError`` if the history cannot be written."""
        with tempfile.TemporaryDirectory(prefix="profile-") as scratch:
            directory = Path(scratch) / "profile"
            write_profile(directory, profile, made_by)
            return self.add(directory, profile.measured_at)


class TuningHistory(ArtifactRepository[Tuning]):
    """The tuner's results for one fingerprint below ``root``."""

    file = network_tuning.FILE

    def __init__(self, root: str, fingerprint: Fingerprint) -> None:
        super().__init__(f"{root.rstrip('/')}/{fingerprint.digest}.tuning")
        self._fingerprint = fingerprint

    def load(self, directory: Path, name: str) -> Tuning:
        tuning = read_tuning(directory)
        if tuning.fingerprint != self._fingerprint:
            raise DamagedArtifact(f"{self.address}/{name}: of other hardware, versions or world")
        return tuning

    def publish(self, tuning: Tuning, made_by: Mapping[str, object]) -> str:
        """Write the result; returns its address. Raises ``UserError`` if the history cannot be written."""
        with tempfile.TemporaryDirectory(prefix="tuning-") as scratch:
            directory = Path(scratch) / "tuning"
            write_tuning(directory, tuning, made_by)
            return self.add(directory, time.time())


def tuning_at(address: str, fingerprint: Fingerprint) -> Tuning | None:
    """The tuner's result at ``address``, or the newest of this fingerprint if that is a history; a warning says why
    there is none. Raises ``UserError`` if what is there cannot be read."""
    storage = storage_for(address)
    if network_tuning.FILE not in storage.list(network_tuning.FILE):
        tuning = TuningHistory(address, fingerprint).latest()
        if tuning is None:
            LOG.warning("%s: holds no result of the tuner for this hardware, versions and world", address)
        return tuning
    with tempfile.TemporaryDirectory(prefix="tuning-") as scratch:
        for file in (MANIFEST, network_tuning.FILE):
            path = storage.get(file, Path(scratch))
        tuning = read_tuning(path.parent)
    if tuning.fingerprint == fingerprint:
        return tuning
    then, now = vars(tuning.fingerprint), vars(fingerprint)
    name = next(name for name in then if then[name] != now[name])
    LOG.warning("%s: ignored, as it is of other hardware: its %s is %s, here %s", address, name, then[name], now[name])
    return None


def age_in_days(profile: NetworkProfile) -> float:
    return (time.time() - profile.measured_at) / SECONDS_A_DAY
