"""History of profiles and tunings by fingerprint, in a directory or a store.

Profiles are below ``<history>/<digest of the fingerprint>``, tunings below ``<history>/<digest>.tuning``.
"""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Generic, TypeVar

from slipstream.shared.artifacts.format import MANIFEST, Artifact, DamagedArtifact
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect import profile as network_profile
from slipstream.shared.interconnect import tuning as network_tuning
from slipstream.shared.interconnect.profile import Fingerprint, NetworkProfile, TrendPoint, read_profile
from slipstream.shared.interconnect.tuning import Tuning, read_tuning, write_tuning
from slipstream.shared.logs import logger
from slipstream.shared.storage import storage_for

LOG = logger("network")
SECONDS_A_DAY = 86_400
T = TypeVar("T", NetworkProfile, Tuning)


class FingerprintHistory(ABC, Generic[T]):
    """Artifacts of one kind and one fingerprint below ``root``.

    An artifact is in ``<address>/<time>-<id>/``. Its manifest is written last: a directory without one is incomplete
    and is not listed. Names sort by time.
    """

    #: Main file of an artifact, suffix of the address, and noun for messages. Readable forms of the main file may lie
    #: next to it.
    file: str
    suffix: str
    noun: str

    def __init__(self, root: str, fingerprint: Fingerprint) -> None:
        self.address = f"{root.rstrip('/')}/{fingerprint.digest}{self.suffix}"
        self._fingerprint = fingerprint
        self._storage = storage_for(self.address)

    @abstractmethod
    def read(self, directory: Path) -> T:
        """Return the artifact in ``directory``.

        Raises ``UserError`` on failure.
        """

    def names(self) -> list[str]:
        """Return the names of all artifacts, the oldest first."""
        keys = self._storage.list()
        return sorted(key.partition("/")[0] for key in keys if key.endswith(f"/{MANIFEST}"))

    def fetch(self, name: str) -> T:
        """Fetch and read an artifact.

        Raises ``UserError`` on failure, ``DamagedArtifact`` if its content is wrong.
        """
        with tempfile.TemporaryDirectory(prefix="history-") as scratch:
            for file in (MANIFEST, self.file):
                path = self._storage.get(f"{name}/{file}", Path(scratch))
            content = self.read(path.parent)
        if content.fingerprint != self._fingerprint:
            raise DamagedArtifact(f"{self.address}/{name}: a {self.noun} of other hardware, versions or world")
        return content

    def newest(self, most: int = 0) -> Iterator[T]:
        """Yield the readable artifacts among the newest ``most`` (0: all), newest first.

        Warnings name unreadable ones.
        """
        for name in reversed(self.names()[-most:]):
            try:
                yield self.fetch(name)
            except UserError as error:
                LOG.warning("an unreadable entry of the history was skipped: %s", error.message)

    def latest(self) -> T | None:
        """Return the newest readable artifact, if any; warn about newer unreadable ones."""
        return next(self.newest(), None)

    def add(self, directory: Path, made_at: float) -> str:
        """Publish the artifact in ``directory`` and return its address.

        ``made_at`` is its time in seconds since 1970. Raises ``UserError`` if the history cannot be written.
        """
        name = f"{time.strftime('%Y-%m-%dT%H-%M-%S', time.gmtime(made_at))}-{uuid.uuid4().hex[:6]}"
        for file in sorted(directory.iterdir(), key=lambda file: file.name == MANIFEST):
            self._storage.put(f"{name}/{file.name}", file.read_bytes())
        return f"{self.address}/{name}"

    def copy(self, name: str, directory: Path) -> None:
        """Copy an artifact with all files into the fresh ``directory``.

        Raises ``MissingObject`` if it is being deleted.
        """
        directory.mkdir()
        with tempfile.TemporaryDirectory(prefix="history-") as scratch:
            for key in self._storage.list(f"{name}/"):
                file = self._storage.get(key, Path(scratch))
                (directory / file.name).write_bytes(file.read_bytes())

    def check_writable(self) -> None:
        """Raise ``UserError`` unless the history is writable; called before a long measurement."""
        probe = f".probe-{uuid.uuid4().hex}"
        self._storage.put(probe, b"")
        self._storage.delete([probe])


class ProfileHistory(FingerprintHistory[NetworkProfile]):
    """Profiles of one fingerprint."""

    file, suffix, noun = network_profile.FILE, "", "profile"

    def read(self, directory: Path) -> NetworkProfile:
        return read_profile(directory)

    def profiles(self, most: int = 0) -> list[NetworkProfile]:
        """Return the readable profiles among the newest ``most`` (0: all), the oldest first."""
        return [*self.newest(most)][::-1]

    def course(self, most: int = 30) -> list[TrendPoint]:
        """Return the largest all_reduce of each of the newest ``most`` profiles, the oldest first."""
        return list(chain.from_iterable(map(trend_points, self.profiles(most))))

    def take(self, settings: Mapping[str, object], days: float, directory: Path) -> str:
        """Copy the newest readable profile into the fresh ``directory`` and return its address.

        Returns "" unless it is younger than ``days`` and was measured with these ``settings``.
        """
        for name in reversed(self.names()):
            try:
                profile = self.fetch(name)
                if age_in_days(profile) >= days or profile.settings != settings:
                    return ""
                self.copy(name, directory)
                Artifact.open(directory, network_profile.KIND).check().read_bytes(network_profile.COURSE)
                return f"{self.address}/{name}"
            except UserError as error:
                LOG.warning("an unreadable entry of the history was skipped: %s", error.message)
                shutil.rmtree(directory, ignore_errors=True)
        return ""


def trend_points(profile: NetworkProfile) -> list[TrendPoint]:
    """Return the largest all_reduce of a profile; empty if it has none."""
    points = []
    for m in profile.of("all_reduce")[-1:]:
        low, high = m.interval() or (None, None)
        slow, fast = (None if seconds is None else m.busbw(seconds) for seconds in (high, low))
        points.append(TrendPoint(profile.measured_at, m.bytes, m.busbw(), slow, fast))
    return points


class TuningHistory(FingerprintHistory[Tuning]):
    """Tunings of one fingerprint."""

    file, suffix, noun = network_tuning.FILE, ".tuning", "tuning"

    def read(self, directory: Path) -> Tuning:
        return read_tuning(directory)

    def publish(self, tuning: Tuning, made_by: Mapping[str, object]) -> str:
        """Write the tuning and return its address.

        Raises ``UserError`` if that fails.
        """
        with tempfile.TemporaryDirectory(prefix="tuning-") as scratch:
            write_tuning(Path(scratch) / "tuning", tuning, made_by)
            return self.add(Path(scratch) / "tuning", time.time())


def tuning_at(address: str, fingerprint: Fingerprint) -> Tuning | None:
    """Return the tuning at ``address``, or the newest for this fingerprint if ``address`` is a history.

    None, with a warning, if there is none for this fingerprint. Raises ``UserError`` if it cannot be read.
    """
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
    LOG.warning(
        "%s: ignored, as it was measured on other hardware: its %s is %s, here %s", address, name, then[name], now[name]
    )
    return None


def age_in_days(profile: NetworkProfile) -> float:
    return (time.time() - profile.measured_at) / SECONDS_A_DAY
