"""A chat template that hangs or takes memory ends the preparation with a line that names row and template."""

from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.language import corpus, read
from slipstream.shared.errors import UserError
from slipstream.shared.language import template_process as processes
from slipstream.shared.language.template_process import template_process
from slipstream.shared.source import quarantine
from tests.support.corpora import own_tokenizer, prepare_language, write_lines
from tests.support.wording import refuses, same_wording

SHOWN = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
ASKED = "{% if add_generation_prompt %}assistant: {% endif %}"
HANGS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TAKES_MEMORY = "{{ '%1000000000d' % 1 }}"


def at(word: str, statement: str) -> str:
    """A template with a statement for the conversations in which the user says a word."""
    return f"{{% if '{word}' in messages[0].content %}}{statement}{{% endif %}}" + SHOWN + ASKED


def rows(count: int, **others: str) -> list[dict[str, str]]:
    """Return ``count`` questions; ``others`` replaces the text of some, as in ``at_31``."""
    return [
        {"prompt": others.get(f"at_{number}", f"What is {number}?"), "completion": f"It is {number}."}
        for number in range(1, count + 1)
    ]


def refused(tmp_path: Path, talks: list[dict[str, str]] | Path, template: str, workers: int = 1) -> str:
    path = talks if isinstance(talks, Path) else write_lines(tmp_path / "talks.jsonl", talks)
    where = own_tokenizer(tmp_path / "own", template)
    with refuses(UserError) as error:
        prepare_language(tmp_path / "data", path, workers, tokenizer=where, length=96, quarantine_limit=1.0)
    assert not (tmp_path / "data/manifest.json").exists()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.prove
def test_a_row_at_which_it_hangs_ends_the_preparation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SECONDS", 3.0)
    monkeypatch.setattr(corpus, "PIECE_BYTES", 700)
    monkeypatch.setattr(read, "AT_ONCE", 5)
    talks = [*rows(60, at_31="Hang!")[:25], "", *rows(60, at_31="Hang!")[25:]]
    found = refused(tmp_path, talks, at("Hang", HANGS))  # type: ignore[arg-type]
    assert f"{tmp_path / 'talks.jsonl'}, line 32: " in found
    same_wording(found)
    assert template_process()._child is None


@pytest.mark.prove
def test_in_workers_too_and_nothing_of_them_is_left(tmp_path: Path) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    table = pa.Table.from_pylist(rows(60, at_31="Take!"))
    pq.write_table(table, tmp_path / "talks.parquet", row_group_size=7)
    found = refused(tmp_path, tmp_path / "talks.parquet", at("Take", TAKES_MEMORY), workers=2)
    assert "talks.parquet, line 31: " in found
    same_wording(found)
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    child = template_process()._child
    ours = child.process if child else None
    assert {child.pid for child in left if "spawn_main" in " ".join(child.cmdline())} <= {ours.pid if ours else 0}


@pytest.mark.prove
def test_the_limits_of_time_as_they_are_in_workers(tmp_path: Path) -> None:
    found = refused(tmp_path, rows(60, at_31="Hang!"), at("Hang", HANGS), workers=2)
    assert "line 31: " in found and "needed more than 10 s" in found


def test_chance_in_a_row_ends_the_preparation(tmp_path: Path) -> None:
    found = refused(tmp_path, rows(60, at_31="Throw dice!"), at("dice", "{{ range(6)|random }}"))
    assert "line 31: " in found
    same_wording(found)


def test_an_error_of_the_template_quarantines_the_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talks.jsonl", rows(60, at_31="Refuse!", at_40="Divide!"))
    divides = "{% if 'Divide' in messages[0].content %}{{ 1 // 0 }}{% endif %}"
    template = divides + at("Refuse", "{{ raise_exception('no') }}")
    where = own_tokenizer(tmp_path / "own", template)
    data = prepare_language(tmp_path / "data", path, tokenizer=where, length=96, quarantine_limit=0.1)
    assert [(row.line, row.reason) for row in quarantine.read_quarantine(data.artifact)] == [
        (31, "the chat template says: no"),
        (40, "the chat template fails: ZeroDivisionError: integer division or modulo by zero"),
    ]


@pytest.mark.parametrize(
    ("template", "shown"), [(SHOWN + ASKED, False), ("{{ strftime_now('%Y') }}" + SHOWN + ASKED, True)]
)
def test_the_card_shows_the_date_if_the_template_asked_for_it(template: str, shown: bool, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talks.jsonl", rows(60))
    where = own_tokenizer(tmp_path / "own", template)
    data = prepare_language(tmp_path / "data", path, tokenizer=where, length=96, date="2025-01-31")
    note = "the chat template asked for the date and was given 2025-01-31 (data.date)"
    assert (note in data.card["warnings"]) is shown


def test_what_is_prepared_depends_on_data_date_and_not_on_the_day(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "talks.jsonl", rows(60))
    where = own_tokenizer(tmp_path / "own", "{{ strftime_now('%d %b %Y') }}" + SHOWN + ASKED)
    same = {"tokenizer": where, "length": 96}

    def made(name: str, workers: int = 1, **settings: Any) -> dict[str, bytes]:
        artifact = prepare_language(tmp_path / name, path, workers, **same, **settings).artifact
        return {file: artifact.read_bytes(file) for file in artifact.files}

    first = made("first")
    assert made("workers", workers=2) == first == made("as by default", date="2024-07-26")
    assert made("other", date="2024-07-27") != first


@pytest.mark.parametrize("date", ["26 Jul 2024", "2024-7-26", "2024-02-30", "", "20240726"])
def test_a_date_that_is_none(date: str, tmp_path: Path) -> None:
    with refuses(UserError, match=r"data\.date:"):
        prepare_language(tmp_path / "data", "nowhere", date=date)
