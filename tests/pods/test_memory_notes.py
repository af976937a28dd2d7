"""Memory notes of attempts, one rule at a time; ``test_out_of_memory.py`` runs whole pods."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.flyte import memory_notes
from slipstream.flyte.memory_notes import MemoryNote, noted_memory, place_of_note, read_note, write_note
from slipstream.operations.proofs.rehearsal.rendering import raw_output
from slipstream.shared.errors import UserError
from slipstream.shared.machine.limits import MemoryCounters

GIB = 1 << 30


class Pod:
    """The attempts of one node of an execution, whose memory is made up."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, execution: str = "execution") -> None:
        self.directory, self.patch, self.execution = directory, monkeypatch, execution
        self.used, self.limit = 0, 4.0 * GIB

    @contextmanager
    def attempt(self, number: int, progress: Callable[[], str] = lambda: "") -> Iterator[None]:
        prefixes = SimpleNamespace(
            output_metadata_prefix=f"{self.directory}/metadata/{self.execution}/n0/data/{number}",
            raw_output_prefix=raw_output(f"{self.directory}/data", self.execution, "n0", number),
        )
        self.patch.setattr(memory_notes, "current_context", lambda: prefixes)
        self.patch.setattr(memory_notes, "memory_used", lambda: self.used)
        self.patch.setattr(memory_notes, "memory_limit", lambda: self.limit)
        self.patch.setattr(memory_notes, "LOOK_S", 0.01)
        self.patch.setenv("FLYTE_ATTEMPT_NUMBER", str(number))
        with noted_memory("export", progress):
            yield

    def note(self) -> MemoryNote | None:
        return read_note(place_of_note())

    def killed(self, number: int, used: int = int(3.8 * GIB), progress: str = "") -> MemoryNote:
        """An attempt that takes so much and is killed without a word; what it had noted."""
        with self.attempt(number, lambda: progress):
            self.used = used
            deadline = time.monotonic() + 10
            while (note := self.note()) is None or note.attempt != number:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.used = 0
        write_note(place_of_note(), note)  # as a killed pod takes nothing away
        return note


@pytest.fixture
def pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pod:
    return Pod(tmp_path, monkeypatch)


def test_the_third_refuses_and_says_what_to_raise(pod: Pod) -> None:
    assert [pod.killed(number).times for number in range(2)] == [1, 2]
    line = r"^export: out of memory: the last 2 attempts were killed when they had taken 3\.80 GiB of 4 GiB; raise "
    with pytest.raises(UserError, match=line + r"stages\.export\.memory .*'local'$"), pod.attempt(2):
        raise AssertionError("began")
    assert not list(pod.directory.rglob("*.json")), "a refusal that was given stays"


def test_executions_with_names_of_63_characters_have_their_own_notes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Propeller hashes such names in the prefix of raw output."""
    hungry, healthy = (Pod(tmp_path, monkeypatch, "f" * 62 + last) for last in "ab")
    healthy.killed(0, used=int(3.7 * GIB))  # with its node
    assert [hungry.killed(number).times for number in range(2)] == [1, 2]
    for number in range(1, 3):
        with healthy.attempt(number):
            pass
    assert healthy.note() is None
    line = r"^export: out of memory"
    with pytest.raises(UserError, match=line), hungry.attempt(2):
        raise AssertionError("began")


def test_more_memory_or_progress_is_another_case(pod: Pod) -> None:
    assert [pod.killed(number, progress=f"{number}").times for number in range(3)] == [1, 1, 1]
    pod.limit *= 2
    assert pod.killed(3, used=int(7.7 * GIB), progress="2").times == 1
    assert pod.killed(4, used=int(7.7 * GIB), progress="2").times == 2
    with pod.attempt(5, lambda: "3"):
        pass
    assert pod.note() is None


def test_who_lives_to_read_the_kernels_counters_leaves_word_for_the_next(
    pod: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flyte does not read the error of a plain pod in which the kernel killed a process: it tries again."""
    counters = MemoryCounters(0, 0, pod.limit)
    monkeypatch.setattr(memory_notes, "memory_counters", lambda: counters)
    with pytest.raises(RuntimeError, match="lost to SIGKILL"), pod.attempt(0, lambda: "20"):
        counters = MemoryCounters(1, 4 * GIB, pod.limit)
        raise RuntimeError("the worker of rank 0 was lost to SIGKILL")
    line = r"^export: out of memory: the kernel killed 1 process at the limit of 4 GiB \(peak 4 GiB\); raise "
    line += r"stages\.export\.memory .*'local'$"
    with pytest.raises(UserError, match=line), pod.attempt(1, lambda: "20"):
        raise AssertionError("began")
    pod.limit *= 2
    with pod.attempt(2, lambda: "20"):
        pass
    assert pod.note() is None


def test_a_node_without_memory_is_no_fault_of_the_pods(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = MemoryCounters(0, 0, pod.limit)
    monkeypatch.setattr(memory_notes, "memory_counters", lambda: counters)
    with pytest.raises(RuntimeError), pod.attempt(0):
        counters = MemoryCounters(1, GIB, pod.limit)
        raise RuntimeError("the worker of rank 0 was lost to SIGKILL")
    assert pod.note() is None


@pytest.mark.parametrize("error", [None, RuntimeError("a peer was lost"), KeyboardInterrupt()])
def test_another_end_takes_the_note_away(pod: Pod, error: BaseException | None) -> None:
    pod.killed(0)
    with pytest.raises(type(error)) if error else nullcontext(), pod.attempt(1):
        pod.used = int(3.9 * GIB)
        while (note := pod.note()) is None or note.attempt != 1:
            time.sleep(0.01)
        if error:
            raise error
    assert pod.note() is None


def test_enough_memory_leaves_no_note_and_asks_the_store_nothing(pod: Pod) -> None:
    pod.used = int(3.5 * GIB)
    with pod.attempt(0):
        time.sleep(0.1)
    assert not list(pod.directory.rglob("*"))
