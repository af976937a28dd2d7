"""The history: profiles and the tuner's results by fingerprint, in a directory or a store.

Those of a fingerprint are below ``<history>/<digest>`` and ``<history>/<digest>.tuning``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from slipstream.artifacts.format import MANIFEST, Artifact, DamagedArtifact
from slipstream.errors import UserError
from slipstream.interconnect import profile as network_profile
from slipstream.interconnect import tuning as network_tuning
from slipstream.interconnect.artifact_repository import ArtifactRepository
from slipstream.interconnect.profile import Fingerprint, NetworkProfile, TrendPoint, read_profile
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
        found = []
        for name in self.names()[-(most or 0) :]:
            try:
                found.append(self.fetch(name))
            except UserError as error:
                LOG.warning("skipped: %s", error.message)
        return found

    def course(self, most: int = 30) -> list[TrendPoint]:
        """The largest all_reduce of the youngest profiles that have one, the oldest first."""
        return list(chain.from_iterable(map(trend_points, self.profiles(most))))

    def take(self, settings: Mapping[str, Any], days: float, directory: Path) -> str:
        """Copy the newest profile into the fresh ``directory``, if it is younger than so many ``days`` and was measured
        with these ``settings``. Returns its address, or "" if there is none."""
        for name in reversed(self.names()):
            try:
                profile = self.fetch(name)
                if age_in_days(profile) >= days or profile.settings != settings:
                    return ""
                self.copy(name, directory)
                Artifact.open(directory, network_profile.KIND).check().read_bytes(network_profile.COURSE)
                return f"{self.address}/{name}"
            except UserError as error:
                LOG.warning("skipped: %s", error.message)
                shutil.rmtree(directory, ignore_errors=True)
        return ""


def trend_points(profile: NetworkProfile) -> list[TrendPoint]:
    """The largest all_reduce of a profile, if it has one."""
    points = []
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

    def publish(self, tuning: Tuning, made_by: dict[str, Any]) -> str:
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
