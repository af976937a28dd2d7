"""The wording of messages is kept in golden files: what tests compare, and all that the sources can say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import wording
from tests.support.wording import GOLDEN, RunningTest, compared, refuses, same_wording, vanished

TESTS = Path(__file__).parent


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The golden file of a test ``test_it`` that compares messages."""
    monkeypatch.setattr(wording, "STORING", False)
    (tmp_path / "test_a.py").touch()
    (tmp_path / GOLDEN).write_text(json.dumps({"test_a.py::test_it": ["one", "<tmp>/a: two"]}))
    return tmp_path / GOLDEN


def run(golden: Path, *messages: str) -> None:
    with compared(golden.with_name("test_a.py"), "test_it"):
        for message in messages:
            same_wording(message)
        wording.end()


def test_messages_are_compared_in_order(golden: Path) -> None:
    run(golden, "one", f"{golden.parent}/a: two\n")


@pytest.mark.parametrize("messages", [("one",), ("one", "two"), ("one", "<tmp>/a: two", "three"), ()])
def test_another_message_fails_and_names_the_command(golden: Path, messages: tuple[str, ...]) -> None:
    with pytest.raises(AssertionError, match=rf"STORE=1 pytest {golden.parent}/test_a\.py"):
        run(golden, *messages)


def test_messages_are_stored_if_the_test_passes(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wording, "STORING", True)
    with pytest.raises(ZeroDivisionError), compared(golden.with_name("test_a.py"), "test_it"):
        same_wording("half")
        raise ZeroDivisionError
    assert len(RunningTest(golden.with_name("test_a.py"), "test_it").stored) == 2
    run(golden, "other")
    assert json.loads(golden.read_text()) == {"test_a.py::test_it": ["other"]}
    run(golden)
    assert json.loads(golden.read_text()) == {}


def test_an_error_of_another_kind_or_name_is_none() -> None:
    with pytest.raises(ZeroDivisionError), refuses(KeyError):
        raise ZeroDivisionError
    with pytest.raises(AssertionError), refuses(KeyError, match="other"):
        raise KeyError("name")


def test_tests_that_are_gone_are_found(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = golden.with_name("test_a.py")
    assert vanished(golden) == []
    monkeypatch.setitem(wording.collected, path, {"test_other"})
    assert vanished(golden) == ["test_a.py::test_it"]
    monkeypatch.delitem(wording.collected, path)
    path.unlink()
    assert vanished(golden) == ["test_a.py::test_it"]


def test_no_golden_is_kept_of_a_test_that_is_gone() -> None:
    goldens = sorted(TESTS.rglob(GOLDEN))
    assert goldens
    gone = {str(path.relative_to(TESTS)): names for path in goldens if (names := vanished(path))}
    assert not gone, f"STORE=1 pytest {' '.join(gone)} removes them"
