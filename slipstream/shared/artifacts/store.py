"""Local store of artifacts, ``.slipstream/<stage>/<key>/``; the key is a digest of all inputs.

Unlike Flyte's local cache it verifies all bytes before reuse, replaces damaged or deleted artifacts, and reports reuse.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from filelock import Timeout

from slipstream.shared.artifacts.format import Artifact, DamagedArtifact, canonical_json
from slipstream.shared.artifacts.workspaces import temporary_workspace
from slipstream.shared.logs import logger
from slipstream.shared.storage.local import file_lock

#: Default store, in the working directory.
STORE = Path(".slipstream")


def content_key(stage: str, version: str, inputs: Mapping[str, object]) -> str:
    """Return the key of a stage's result: a digest of stage, code version and all inputs."""
    return hashlib.sha256(canonical_json({"stage": stage, "version": version, "inputs": inputs})).hexdigest()[:32]


class ArtifactStore:
    """Finished artifacts by stage and key; an entry appears complete, by a rename."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def entry(self, stage: str, key: str) -> Path:
        return self.root / stage / key

    def checkpoints(self, stage: str, key: str) -> Path:
        """Return the directory for unfinished work on an entry; it is removed once the entry is published."""
        return self.root / stage / f"{key}.checkpoints"

    def find(self, stage: str, key: str) -> Artifact | DamagedArtifact | None:
        """Return the verified entry; the error if it is damaged; None if it does not exist."""
        directory = self.entry(stage, key)
        if not directory.exists():
            return None
        try:
            return Artifact.open(directory, stage).check()
        except DamagedArtifact as damage:
            return damage
        except OSError as error:
            return DamagedArtifact(f"{directory}: {error}")

    @contextmanager
    def turn(self, stage: str, key: str) -> Iterator[bool]:
        """Lock an entry, so that only one process at a time works in its directory of unfinished work.

        Yields True if this process waited for another, which may have made the entry. On a disk without locks nothing
        waits: two processes may make the same entry, and one of the results is published.
        """
        unfinished, lock = self.checkpoints(stage, key), file_lock(self.root / stage / f"{key}.lock")
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        waited = False
        try:
            lock.acquire(blocking=False)
        except Timeout:
            logger(stage).info("another run is making this artifact; waiting for it")
            lock.acquire()
            waited = True
        except OSError as error:
            why = error.strerror
            logger(stage).warning(
                "%s is on a disk without locks (%s); a second run would repeat this work", self.root, why
            )
        try:
            unfinished.mkdir(exist_ok=True)
            yield waited
        finally:
            with suppress(OSError):
                unfinished.rmdir()  # if it is empty
            # Removed while it is held: filelock lets those who wait for an unlinked file try again on a fresh one.
            Path(lock.lock_file).unlink(missing_ok=True)
            lock.release()

    def workspace(self, stage: str) -> AbstractContextManager[Path]:
        """Return a context with a new directory on the store's disk, removed at the end unless it was published."""
        return temporary_workspace(self.root / stage)

    def publish(self, directory: Path, stage: str, key: str) -> Artifact:
        """Rename a finished workspace to its entry, replacing a damaged entry."""
        Artifact.open(directory, stage)
        target = self.entry(stage, key)
        if isinstance(self.find(stage, key), DamagedArtifact):
            shutil.rmtree(target)
        try:
            directory.rename(target)
        except OSError:
            # Another process published the same work first.
            if not isinstance(self.find(stage, key), Artifact):
                raise
        shutil.rmtree(self.checkpoints(stage, key), ignore_errors=True)
        return Artifact.open(target, stage)
