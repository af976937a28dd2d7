"""Notes of an attempt's memory use for the next attempt, since an attempt may be killed without a message.

With cgroup v2, Kubernetes has the kernel kill all processes of a container at once, so none is left to report it
(:mod:`slipstream.shared.machine.limits` needs one). Flyte sees ``OOMKilled`` and retries with the same memory. So a pod
whose memory is nearly full writes a note next to its node's output, and removes it when it ends in any other way. After
two notes in a row, with one memory limit and without progress, the next attempt refuses to start.

If the kernel kills only one process, the task can raise an error, but Flyte ignores it for a single pod and retries. So
that attempt notes its message, and the next raises it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from flytekit import current_context

from slipstream.shared.artifacts.records import LARGEST_RECORD, decode_record, to_json
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import size_text
from slipstream.shared.logs import logger
from slipstream.shared.machine.limits import memory_counters, memory_limit, memory_used, what_was_killed
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.storage import MissingObject, StorageUnavailable, open_reader, storage_for

LOG = logger("flyte")
#: Fraction of the memory limit above which a pod writes a note.
NEARLY = 0.9
#: Interval between checks in seconds.
LOOK_S = 0.5
#: Number of successive attempts killed with nearly full memory after which the next refuses to start.
ENOUGH = 2


@dataclass(frozen=True)
class MemoryNote:
    """Note of an attempt that used ``used`` of ``limit`` bytes of memory.

    ``progress`` is its newest checkpoint. ``times`` counts successive notes with equal limit and progress. ``killed``
    is the error message if the attempt survived the kill of some of its processes, else "".
    """

    attempt: int
    used: int
    limit: float
    progress: str
    times: int
    killed: str = ""

    def repeated_by(self, attempt: int, limit: float, progress: str) -> bool:
        """Return True if a later attempt has the same memory limit and no more progress."""
        return attempt > self.attempt and (limit, progress) == (self.limit, self.progress)

    def __str__(self) -> str:
        """Return why a retry would fail again; "" if another attempt may succeed."""
        if self.killed or self.times < ENOUGH:
            return self.killed
        return (
            f"out of memory: the last {self.times} attempts were killed when they had taken "
            f"{size_text(self.used)} of {size_text(self.limit)}"
        )


def no_progress() -> str:
    """Return "": for a stage without checkpoints."""
    return ""


@contextmanager
def noted_memory(stage: str, progress: Callable[[], str] = no_progress) -> Iterator[None]:
    """Run a pod's work in the block and write a note if memory is nearly full.

    ``progress`` returns the checkpoint from which a later attempt would resume. Raises ``UserError`` before the work if
    earlier attempts were killed with the same limit and progress. Without the store the note is lost and the work
    continues.
    """
    limit, attempt = memory_limit(), int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0"))
    if limit is None:
        yield
        return
    uri = place_of_note()
    earlier = read_note(uri) if attempt else None
    if earlier and str(earlier) and earlier.repeated_by(attempt, limit, progress()):
        remove_note(uri)
        raise UserError(f"{stage}: {earlier}; raise stages.{stage}.memory in the profile {current_profile().name!r}")
    ended, noted, killed = threading.Event(), threading.Event(), ""
    before = memory_counters()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            if (used := memory_used()) >= NEARLY * limit:
                noted.set()
                LOG.warning("memory is nearly full: %s of %s", size_text(used), size_text(limit))
                with suppress(StorageUnavailable, UserError):
                    kept = progress()
                    again = earlier and earlier.repeated_by(attempt, limit, kept)
                    write_note(
                        uri, MemoryNote(attempt, used, limit, kept, earlier.times + 1 if earlier and again else 1)
                    )
                return

    watching = threading.Thread(target=watch, name="memory", daemon=True)
    watching.start()
    try:
        yield
    except Exception:
        now = memory_counters()
        killed = what_was_killed(before, now) if now.at_limit else ""
        raise
    finally:
        ended.set()
        watching.join()
        if killed:
            with suppress(StorageUnavailable, UserError):
                write_note(uri, MemoryNote(attempt, int(limit), limit, progress(), 1, killed))
        elif attempt or noted.is_set():
            remove_note(uri)


def place_of_note() -> str:
    """Return the address of the note, the same for all attempts of this pod.

    It is next to the attempts' output prefixes, which propeller calls ``…/<execution>/<node>/data/<attempt>`` with the
    full names; in ``raw_output_prefix`` it hashes long ones.
    """
    node = current_context().output_metadata_prefix.rstrip("/").rpartition("/")[0]
    pod = os.environ.get("HOSTNAME", "").rpartition("-")[2] if "PET_NNODES" in os.environ else "0"
    return f"{node}/memory/{pod}.json"


def read_note(uri: str) -> MemoryNote | None:
    try:
        with open_reader(uri) as file:
            note = decode_record(file.read(LARGEST_RECORD + 1), MemoryNote)
    except MissingObject:
        return None
    except (StorageUnavailable, UserError) as error:
        LOG.warning("the previous attempt's memory note could not be read (%s)", error)
        return None
    if note is None:
        LOG.warning("%s is not a memory note; it is ignored", uri)
    return note


def write_note(uri: str, note: MemoryNote) -> None:
    base, _, name = uri.rpartition("/")
    storage_for(base).put(name, to_json(note))


def remove_note(uri: str) -> None:
    base, _, name = uri.rpartition("/")
    with suppress(StorageUnavailable, UserError):
        storage_for(base).delete([name])
