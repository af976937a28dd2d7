"""Conversations to rows of tokens: only answers are learned, none is cut, and invalid rows are named."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.language import corpus
from slipstream.pipeline.report.engine import data_card_page
from slipstream.pipeline.report.stage_results import answers_sentence, data_figures
from slipstream.pipeline.report.terminal import data_lines
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.artifacts.prepared.documents import read_documents
from slipstream.shared.errors import UserError
from slipstream.shared.language.chat_template import (
    CannotRender,
    ChatTemplate,
    RenderedConversation,
    load_chat_template,
    row_conversation,
)
from slipstream.shared.language.tokenizer import Tokenizer
from slipstream.shared.source import quarantine
from tests.support import chat_templates
from tests.support.corpora import own_tokenizer, prepare_language, rows_of, story, write_lines
from tests.support.wording import refuses, same_wording

END, TURN, TURN_ENDS = 256, 257, 258
LENGTH = 160


def question(number: int) -> dict[str, str]:
    return {"prompt": f"What is {number} plus 1?", "completion": f"It is {number + 1}" + "!" * (number % 30)}


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def prepared(tmp_path: Path, rows: list[Any], **settings: Any) -> Any:
    path = write_lines(tmp_path / "talks.jsonl", rows)
    return prepare_language(tmp_path / "data", path, **{"length": LENGTH, **settings})


def learned_in(row: np.ndarray) -> bytes:
    """The bytes that are learned in a row; the end of a turn is a line break's place."""
    return bytes(token if token < END else 0 for token in row.tolist() if token >= 0)


def test_only_answers_are_learned_and_a_row_is_one_conversation(tmp_path: Path) -> None:
    data = prepared(tmp_path, [question(number) for number in range(80)], shuffle=False)
    assert data.signature.document_end == -1
    rows = np.concatenate([rows_of(data, split) for split in ("train", "validation", "test")])
    assert rows.shape == (80, LENGTH + 1) and rows.dtype == np.int16
    expected = {question(number)["completion"].encode() + b"\0\n" for number in range(80)}
    assert {learned_in(row) for row in rows} == expected
    for row in rows:
        ids = np.where(row < 0, -1 - row, row).tolist()
        assert ids[0] == TURN and ids.count(TURN) == ids.count(TURN_ENDS) == 2
        assert set(row[row.tolist().index(ord("\n"), ids.index(TURN_ENDS) + 3) + 1 :].tolist()) <= {-1 - END}
    counts = [len(learned_in(row)) for row in rows_of(data, "train")]
    assert data.signature.learned == pytest.approx(np.mean(counts), abs=1e-12)
    tested = read_documents(data.artifact, "test")
    assert len(tested) == data.card["rows"]["test"] and all(each.texts[0].startswith("It is") for each in tested)
    assert all(int((each.tokens >= 0).sum()) == each.bytes + 2 for each in tested)
    template = json.loads(json.dumps(data.artifact.read_bytes("tokenizer/chat_template.jinja").decode()))
    assert "add_generation_prompt" in template


def test_of_several_turns_each_answer_is_learned_and_a_last_question_is_left_out(tmp_path: Path) -> None:
    rows = [
        talk(
            ("system", f"s{n}"), ("user", "a"), ("assistant", f"b{n}"), ("user", "c"), ("assistant", "d"), ("user", "e")
        )
        for n in range(60)
    ]
    path = tmp_path / "talks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    data = prepare_language(tmp_path / "data", path, length=LENGTH)
    found = np.concatenate([rows_of(data, split) for split in ("train", "validation", "test")])
    assert {learned_in(row) for row in found} == {f"b{n}\0\nd\0\n".encode() for n in range(60)}
    assert all(row.tolist().count(-1 - TURN) == 5 for row in found)


def test_a_longer_one_is_set_aside_and_never_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"prompt": "tell", "completion": story(3) * 3}
    rows = [question(number) for number in range(80)]
    monkeypatch.setattr(corpus, "PIECE_BYTES", 700)
    data = prepared(tmp_path, [*rows[:70], "", long, *rows[70:]], quarantine_limit=0.1)
    (bad,) = quarantine.read_quarantine(data.artifact)
    assert bad.line == 72 and bad.reason.startswith("a conversation of ") and "data.length + 1, 161" in bad.reason
    assert data.card["rows"]["kept"] == 80 and data.card["rows"]["quarantined"] == 1
    assert sum(len(rows_of(data, split)) for split in ("train", "validation", "test")) == 80


def test_a_trained_tokenizer_knows_the_turns_and_not_their_spelling(tmp_path: Path) -> None:
    data = prepared(tmp_path, [question(number) for number in range(80)], tokenizer="train", vocabulary=300)
    files = {
        name: data.artifact.read_bytes(f"tokenizer/{name}").decode()
        for name in ("tokenizer.json", "tokenizer_config.json")
    }
    vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
    assert Tokenizer(files).specials == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert not [token for token in vocabulary if "im_" in token and token not in Tokenizer(files).specials]


def test_several_turns_of_qwen_3_teach_the_last_answer_or_every_answer_of_its_own_row(tmp_path: Path) -> None:
    rows = [
        talk(("developer", "x"), ("user", "a"), ("assistant", f"b{n}"), ("user", "c"), ("assistant", "d"))
        for n in range(60)
    ]
    where = own_tokenizer(tmp_path / "own", chat_templates.FAMILIES["qwen3"])
    (tmp_path / "each").mkdir()
    data = prepared(tmp_path, rows, tokenizer=where)
    each = prepared(tmp_path / "each", rows, tokenizer=where, answers="each")
    counted = {
        "rows": {"marked": 0, "all": 0, "last": 60},
        "learned": 60,
        "not_learned": 60,
        "left_out": {"developer": 60},
    }
    assert data.card["answers"] == counted
    assert data.card["warnings"] == ["the chat template leaves out 60 messages with the role 'developer'"]
    thinks = b"<think>\n\n</think>\n\n"
    assert {learned_in(row) for split in SPLITS for row in rows_of(data, split)} == {thinks + b"d\0\n"}
    found = [learned_in(row) for split in SPLITS for row in rows_of(each, split)]
    assert sorted(found) == sorted([thinks + b"d\0\n"] * 60 + [thinks + b"b%d\0\n" % n for n in range(60)])
    assert (each.card["answers"]["learned"], each.card["answers"]["not_learned"]) == (120, 0)
    assert each.card["rows"]["test"] == 2 * data.card["rows"]["test"], "the rows of a conversation share a split"
    sentence = answers_sentence(data.card)
    assert sentence.startswith("60 answers learned, 60 not learned; rule: the last, since ")
    assert answers_sentence(each.card) == "120 answers learned, none not learned; rule: all"
    page = data_card_page(data.card, [], datetime(2024, 7, 26))
    assert "60 not learned" in page and any(
        "60 not learned" in line for line in data_lines(data_figures(data.card, data.signature))
    )


def test_columns_and_lines_of_tool_calls_give_the_same_rows(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"{n}?"},
                {"role": "assistant", "content": "", "reasoning_content": "I add.", "tool_calls": [call]},
                {"role": "tool", "content": "3"},
                {"role": "assistant", "content": "It is 3.", "weight": n % 2},
            ],
            "tools": tools,
        }
        for n in range(60)
    ]
    where = own_tokenizer(tmp_path / "own", chat_templates.FAMILIES["qwen3"])
    lines = prepared(tmp_path, rows, tokenizer=where, length=900)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "talks.parquet", row_group_size=7)
    columns = prepare_language(tmp_path / "columns", tmp_path / "talks.parquet", tokenizer=where, length=900)
    for split in SPLITS:
        assert (rows_of(lines, split) == rows_of(columns, split)).all()
    assert lines.card["answers"] == columns.card["answers"]
    assert (lines.card["answers"]["learned"], lines.card["answers"]["not_learned"]) == (90, 30)
    assert not lines.card["warnings"]
    learned = {learned_in(row) for split in SPLITS for row in rows_of(lines, split)}
    calls = b'<think>\nI add.\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\0\n'
    assert learned == {calls, calls + b"<think>\n\n</think>\n\nIt is 3.\0\n"}


PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def test_a_template_of_the_user_renders_with_the_special_tokens(tmp_path: Path) -> None:
    where = own_tokenizer(tmp_path / "own", PLAIN)
    data = prepared(tmp_path, [question(number) for number in range(60)], tokenizer=where)
    # A conversation has its split whatever template renders it, and in either form.
    ours = prepare_language(
        tmp_path / "ours",
        write_lines(
            tmp_path / "messages.jsonl",
            [talk(("user", q["prompt"]), ("assistant", q["completion"])) for q in map(question, range(60))],
        ),
        length=LENGTH,
    )
    assert [each.texts for each in read_documents(ours.artifact, "test")] == [
        each.texts for each in read_documents(data.artifact, "test")
    ]
    rows = rows_of(data, "train")
    assert all(learned_in(row).endswith(b"\0") and learned_in(row).startswith(b"It is") for row in rows)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_gets_nowhere_from_the_sandbox(attack: str) -> None:
    with refuses(UserError):
        ChatTemplate(attack, {}, "2024-07-26")


def test_a_template_that_changes_what_went_before_teaches_the_last_answer_only() -> None:
    changing = "{% for m in messages %}[{{ m.content }}{{ loop.length }}]{% endfor %}"
    messages = talk(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))["messages"]
    (found,) = ChatTemplate(changing, {}, "2024-07-26").render([chat_templates.row(messages)])
    assert isinstance(found, RenderedConversation) and found.rule == "last"
    assert [found.text[first:last] for first, last in found.spans] == ["d4]"]


class TestBadInput:
    """One line each."""

    def refused(self, tmp_path: Path, rows: list[Any], **settings: Any) -> str:
        with pytest.raises(UserError) as error:
            prepared(tmp_path, rows, **settings)
        assert "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(
        "bad",
        [
            talk(("user", "a")),
            talk(("user", "a"), ("bot", "b")),
            {"messages": [{"role": "user", "content": ["a"]}]},
            {"messages": []},
            talk(("user", "a<|im_end|>"), ("assistant", "b")),
        ],
    )
    def test_a_row(self, bad: dict[str, Any], tmp_path: Path) -> None:
        good = [talk(("user", "a"), ("assistant", f"{n}")) for n in range(60)]
        found = self.refused(tmp_path, [*good[:30], bad, *good[30:]])
        assert "line 31" in found and "data.quarantine_limit" in found
        same_wording(found)

    def test_no_answer_in_a_completion(self, tmp_path: Path) -> None:
        rows = [question(number) for number in range(40)]
        same_wording(self.refused(tmp_path, [*rows, {"prompt": "a", "completion": ""}]))
        with refuses(CannotRender):
            row_conversation({"prompt": None, "completion": "b"})

    def test_templates(self, tmp_path: Path) -> None:
        rows = [question(number) for number in range(40)]
        silent = "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}{% endif %}{% endfor %}"
        where = own_tokenizer(tmp_path / "silent", silent)
        same_wording(self.refused(tmp_path, rows, tokenizer=where))
        where = own_tokenizer(tmp_path / "none", None)
        same_wording(self.refused(tmp_path, rows, tokenizer=where))
        where = own_tokenizer(tmp_path / "broken", "{% for %}")
        same_wording(self.refused(tmp_path, rows, tokenizer=where))
        where = own_tokenizer(
            tmp_path / "strict", PLAIN + "{% if messages|length > 1 %}{{ raise_exception('no more') }}{% endif %}"
        )
        same_wording(self.refused(tmp_path, rows, tokenizer=where))

    def test_a_template_may_lie_in_the_settings(self) -> None:
        settings = {"eos_token": {"content": "</s>"}, "chat_template": [{"name": "default", "template": PLAIN}]}
        (found,) = load_chat_template({"tokenizer_config.json": json.dumps(settings)}, "2024-07-26").render(
            [chat_templates.row(talk(("user", "a"), ("assistant", "b"))["messages"])]
        )
        assert (
            isinstance(found, RenderedConversation)
            and found.text == "user: a</s>assistant: b</s>"
            and found.spans == [(22, 27)]
        )
