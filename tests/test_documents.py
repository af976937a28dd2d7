"""Documents: generated pages equal their source, no promise gets lost, and every page is short."""

import itertools
import re
import tomllib
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from tests.support.documents import picture, promises, settings
from tests.support.documents.imports import imports_between_folders, without_implied
from tests.support.documents.words import (
    MOST_IN_DOCSTRINGS,
    MOST_IN_SUM,
    MOST_ON_A_PAGE,
    words_by_page,
    words_of,
    words_of_docstrings,
)

BEFORE = ROOT / "tests/promises_before.toml"


def test_the_page_of_the_promises_is_up_to_date() -> None:
    drawn = promises.page(promises.read_promises())
    assert promises.PAGE.read_text(encoding="utf-8") == drawn, "run `make docs`"


def test_the_page_of_the_settings_is_up_to_date() -> None:
    assert settings.PAGE.read_text(encoding="utf-8") == settings.page(), "run `make docs`"


def test_the_page_of_the_settings_names_every_setting_and_argument() -> None:
    rows = re.findall(r"^\| (\w+) \| .* \| .{15,} \|$", settings.page(), re.MULTILINE)
    assert {"learning_rate", "checkpoint_interval", "frequencies", "word_width", "rope_type"} <= set(rows)
    assert len(rows) > 150 and "checkpoint_every" not in rows


def test_a_promise_has_an_id_of_its_own_one_sentence_or_more_and_a_test() -> None:
    rows = [promise for area in promises.read_promises().values() for promise in area]
    assert not [name for name, count in Counter(promise.id for promise in rows).items() if count > 1]
    assert not [promise.id for promise in rows if not promise.tests]
    assert not [promise.id for promise in rows if not promise.text.endswith((".", ".)")) or "|" in promise.text]


def test_every_promise_has_a_test_in_make_test_or_a_reason() -> None:
    rows = [promise for area in promises.read_promises().values() for promise in area]
    assert not [promise.id for promise in rows if ("make test" in promise.commands) == bool(promise.only_proved)]


def test_every_long_test_guards_a_promise() -> None:
    rows = [promise for area in promises.read_promises().values() for promise in area]
    guarded = promises.long_tests(rows)
    assert len(guarded) > 100 and not [path for path, found in guarded.items() if not found]


def test_no_promise_gets_lost() -> None:
    """Compared with every row of the page that was written by hand: the promise and each of its tests, or a reason."""
    now = {promise.id: set(promise.tests) for area in promises.read_promises().values() for promise in area}
    before = tomllib.loads(BEFORE.read_text(encoding="utf-8"))
    gone: dict[str, str] = before["gone"]
    assert (len(before["first"]), len(before["first"] | before["added"])) == (179, 202)
    for section in ("first", "added"):
        lost = {name: tests for name, tests in before[section].items() if not set(tests) <= now.get(name, set())}
        assert lost.keys() <= gone.keys(), f"lost promises, or tests of promises: {lost}"
    assert not gone.keys() & now.keys() and all(len(reason.split()) > 3 for reason in gone.values())


def test_a_test_that_does_not_exist_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "guarantees.toml"
    file.write_text('[[Data]]\nid = "a"\npromise = "A."\ntests = ["tests/test_none.py"]\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"guarantees\.toml: a: tests/test_none\.py"):
        promises.read_promises(file)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("tests/test_glossary.py", {"make test"}),
        ("tests/fuzz/test_tables.py", {"make prove"}),
        ("tests/compress/test_distillation.py", {"make test", "make prove"}),
        ("tests/train/fault_tolerance/test_sequences.py", {"make prove"}),
        ("tests/gpu_proof/test_on_gpu.py", {"make test", "make gpu"}),
        ("tests/train/fault_tolerance", {"make test", "make prove"}),
        ("benchmarks/storm.py", {"make bench"}),
    ],
)
def test_the_commands_of_a_test_follow_from_its_markers(path: str, expected: set[str]) -> None:
    assert promises.commands_of(path) == expected


def test_the_picture_is_up_to_date() -> None:
    drawn = picture.picture(imports_between_folders())
    assert picture.PICTURE.read_text(encoding="utf-8") == drawn, "run `make docs`"


def test_arrows_point_down_and_none_follows_from_others() -> None:
    graph = {"workflows": {"tasks", "models"}, "tasks": {"train", "models"}, "train": {"models"}, "models": set[str]()}
    reduced = without_implied(graph)
    assert reduced == {"workflows": {"tasks"}, "tasks": {"train"}, "train": {"models"}, "models": set()}
    drawn = ElementTree.fromstring(picture.picture(graph))
    tops = [int(box.get("y", "0")) for box in drawn.findall("{*}rect")[1:5]]
    assert len(drawn.findall("{*}path")) == 3 and tops == sorted(set(tops))


def test_boxes_do_not_overlap_and_arrows_end_at_boxes() -> None:
    drawn = ElementTree.fromstring(picture.PICTURE.read_text(encoding="utf-8"))
    graph = imports_between_folders()
    boxes = [tuple(int(box.attrib[name]) for name in ("x", "y", "width")) for box in drawn.findall("{*}rect")[1:]]
    boxes = boxes[: len(graph)]
    for left, right in itertools.combinations(boxes, 2):
        assert left[1] != right[1] or left[0] + left[2] < right[0] or right[0] + right[2] < left[0]
    paths = drawn.findall("{*}path")
    assert len(paths) == sum(map(len, without_implied(graph).values()))
    for path in paths:
        numbers = re.findall(r"[\d.]+", path.attrib["d"])
        assert float(numbers[-1]) + picture.TIP in {top for _, top, _ in boxes}


def test_a_cycle_is_no_picture() -> None:
    with pytest.raises(ValueError, match="train"):
        picture.picture({"workflows": {"tasks"}, "tasks": {"train"}, "train": {"models"}, "models": {"train"}})


def test_the_page_of_the_architecture_is_short() -> None:
    assert words_by_page()["docs/architecture.md"] <= 500


def test_words_are_counted_outside_fences() -> None:
    assert words_of("one two\n```\nnot these\n```\nthree\n~~~ text\nnor these\n~~~\n") == 3


def test_no_page_is_longer_than_the_limit() -> None:
    too_long = {page: words for page, words in words_by_page().items() if words > MOST_ON_A_PAGE}
    assert not too_long, f"more than {MOST_ON_A_PAGE} words; `make docs` counts them"


def test_all_pages_together_are_within_the_limit() -> None:
    counts = words_by_page()
    assert "docs/guarantees.md" not in counts and {"README.md", "SECURITY.md"} <= counts.keys()
    assert sum(counts.values()) <= MOST_IN_SUM, "`make docs` counts the words of every page"


def test_docstrings_do_not_grow() -> None:
    assert 10_000 < words_of_docstrings() <= MOST_IN_DOCSTRINGS
