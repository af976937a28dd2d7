"""Workspaces: hidden directories for unfinished work, removed by other processes when their owner has died.

The owner locks a file next to the directory; the system releases the lock when the process ends. Process ids would not
do: containers that share a disk have separate ids. The lock is taken before the directory is created, so a workspace in
use is always locked.

Not every disk shares locks between machines (NFS with local locks, a directory of a virtual machine's host). So
workspaces of another running system are removed only after :data:`FORSAKEN_S`. On a disk without locks none is removed.
"""

from __future__ import annotations

import errno
import hashlib
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from slipstream.shared.artifacts.format import Artifact, DamagedArtifact, canonical_json
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.storage import disk_time
from slipstream.shared.storage.local import file_lock

#: Suffixes of a workspace and of its lock file; the names are otherwise equal.
WORK, LOCK = ".work", ".lock"
#: Age in seconds at which an unlocked workspace of another system is removed.
FORSAKEN_S = 7 * 86_400
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@contextmanager
def temporary_workspace(parent: Path) -> Iterator[Path]:
    """Yield a new directory in ``parent``; remove it afterwards unless it was renamed.

    Workspaces of killed processes are removed first.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_orphaned_workspaces(parent)
    directory = parent / f".{secrets.token_hex(8)}{WORK}"
    with hold_workspace_lock(directory):
        try:
            directory.mkdir()
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def put_in_place(directory: Path, target: Path) -> None:
    """Rename a finished directory to ``target`` on the same disk.

    Raises ``UserError`` if another process has created ``target`` meanwhile.
    """
    try:
        directory.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise UserError(
            f"{target}: another process has just created it; expected a directory that does not exist"
        ) from None


@contextmanager
def hold_workspace_lock(directory: Path) -> Iterator[None]:
    """Hold the lock of a workspace before ``directory`` is created; do nothing on a disk without locks."""
    path = directory.with_suffix(LOCK)
    lock = file_lock(path)
    try:
        with suppress(OSError):
            lock.acquire()
            path.write_text(running_system(), encoding="ascii")
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked
        lock.release()


def remove_orphaned_workspaces(parent: Path) -> None:
    """Remove the workspaces in ``parent`` whose owners have died."""
    for path in parent.glob(f".{'[0-9a-f]' * 16}{LOCK}"):
        lock, directory = file_lock(path), path.with_suffix(WORK)
        with suppress(Timeout, OSError):
            lock.acquire(blocking=False)
            try:
                if not directory.exists() or is_forsaken(path):
                    shutil.rmtree(directory, ignore_errors=True)
                    path.unlink(missing_ok=True)
            finally:
                lock.release()


def is_forsaken(lock: Path) -> bool:
    """Return True if an unlocked workspace can be removed: it is this system's, or older than ``FORSAKEN_S``.

    The age is taken from the disk's clock, since this machine's clock may be wrong.
    """
    if lock.read_text(encoding="ascii") == running_system():
        return True
    return disk_time(lock.parent) - lock.stat().st_mtime > FORSAKEN_S


def running_system() -> str:
    """Return the kernel's boot id, which all containers on this machine share; "" if there is none."""
    with suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    return ""


# Unlike Flyte's local cache it verifies all bytes before reuse, replaces damaged or deleted artifacts, and reports
# reuse.
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
        """Lock an entry, so that only one process at a time works on it.

        Yields True if this process waited for another, which may have made the entry. On a disk without locks, two
        processes may make the same entry; one of the results is published.
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


# Flyte gives every attempt its own output prefix in a random shard and tells an attempt only its predecessor's. A
# checkpoint directory has the same address for all attempts, recoveries and relaunches of the same work, because its
# key is a digest of the inputs that decide the result.
#: Parent directories of all checkpoint directories and of all sweep stores. They lie below Flyte's raw output, the
#: profile's ``checkpoints`` or ``.slipstream``.
HOMES = "checkpoints"
SWEEPS = "sweeps"


@dataclass(frozen=True)
class Holder:
    """Attempt that holds a checkpoint directory, as stored in its lease."""

    #: Name of Flyte's execution, torch elastic's run id, or "" if there is none.
    execution: str = ""
    #: Flyte's number of the attempt (from 0), or the number of torch elastic's restarts.
    attempt: int = 0
    #: Output prefix shared by all processes of this attempt and by no other attempt; "" if there is none.
    prefix: str = ""

    def succeeds(self, other: Holder) -> bool:
        """Return True if this attempt may take over from ``other``.

        That is so if ``other`` is an earlier attempt of the same execution, or this attempt before torch elastic
        restarted its workers.
        """
        if not self.execution or other.execution != self.execution:
            return False
        return other == self or other.attempt < self.attempt

    def __str__(self) -> str:
        return f"attempt {self.attempt} of {self.execution}" if self.execution else "a run without a name"


def home_below(base: str, key: str, *above: str, among: str = HOMES) -> str:
    """Return the address below ``base`` of the checkpoint directory with this ``key``.

    ``above`` are the Flyte project and domain, or empty texts. ``among`` is ``HOMES`` or ``SWEEPS``.
    """
    return "/".join([base.rstrip("/"), among, *filter(None, above), key])
