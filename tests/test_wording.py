"""The wording of messages is kept in golden files: what tests compare, and all that the sources can say."""

import ast
import difflib
import json
import re
from pathlib import Path

import pytest

from tests.support import REPOSITORY, wording
from tests.support.source_messages import source_messages
from tests.support.wording import GOLDEN, RunningTest, compared, refuses, same_wording, vanished

TESTS = Path(__file__).parent
SOURCES = ("slipstream", "tasks", "workflows")
MESSAGES = TESTS / "messages.txt"
#: Three words in a row, as no name or value has them.
ENGLISH = re.compile(r"(?<![\w.])[a-z']{2,}(?:[,;:]? [a-z']+){2,}")
#: Files that match English: its wording is their subject, or libraries and helpers of tests say it.
MATCH_ENGLISH = (
    "collectives/test_links.py",
    "gpu_proof/test_telemetry_check.py",
    "language/test_failing_tokenizers.py",
    "train/parallel/test_no_waits.py",
    "train/test_no_copies.py",
)


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


def test_every_message_of_the_sources_is_in_the_golden_file() -> None:
    found = source_messages(REPOSITORY, SOURCES)
    if wording.STORING:
        MESSAGES.write_text(found, encoding="utf-8")
    changed = list(difflib.unified_diff(MESSAGES.read_text(encoding="utf-8").splitlines(), found.splitlines(), n=0))
    assert not changed, "\n".join([f"if they are right: STORE=1 pytest {Path(__file__).name}", *changed])


def test_messages_are_read_from_the_sources(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package/a.py").write_text(
        "PLACE = 'data.rows'\n"
        "class Bad(ValueError): ...\n"
        "def f(n):\n"
        "    reason = f'{n} of ' '%d rows' % 3\n"
        "    log.info('reads %s', n)\n"
        "    logger('x').warning('slow' if n else 'fast', extra=1)\n"
        "    print('not one')\n"
        "    raise Bad(f'{PLACE}: {reason}') if n else KeyError(n)\n"
    )
    texts = ["reads %s", "(slow|fast)", "data.rows: {…} of %d rows"]
    assert source_messages(tmp_path, ("package",)).splitlines() == ["package.a", *(f"  {text}" for text in texts)]


def test_no_test_matches_english_outside_of_the_list() -> None:
    found = {str(path.relative_to(TESTS)): english_matches(path) for path in sorted(TESTS.rglob("test_*.py"))}
    assert {name: lines for name, lines in found.items() if lines and name not in MATCH_ENGLISH} == {}
    assert [name for name in MATCH_ENGLISH if not found[name]] == []


def english_matches(path: Path) -> list[str]:
    """Return the English texts that are given to ``match=`` in a file."""
    if "match=" not in (text := path.read_text(encoding="utf-8")):
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    given = [word.value for call in calls for word in call.keywords if word.arg == "match"]
    texts = [node.value for match in given for node in ast.walk(match) if isinstance(node, ast.Constant)]
    return [text for text in texts if isinstance(text, str) and ENGLISH.search(text.replace("\\", ""))]
