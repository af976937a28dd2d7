"""Chat templates render as with transformers, within limits, and alike in every run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
import transformers
from transformers.utils import chat_template_utils

from slipstream.shared.distributed.limited_process import SpawnedChild
from slipstream.shared.errors import UserError
from slipstream.shared.language import template_process as processes
from slipstream.shared.language.chat_template import (
    OWN_TEMPLATE,
    REASONING,
    CannotRender,
    ChatTemplate,
    RenderedConversation,
    row_conversation,
    special_tokens,
    stop_token_ids,
)
from slipstream.shared.language.template_process import TemplateProcess, TemplateStopped, template_process
from slipstream.shared.language.tokenizer import SETTINGS, TEMPLATE, bytes_tokenizer
from tests.support.chat_templates import FAMILIES, FEATURES, row
from tests.support.wording import refuses, same_wording

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "mask_token": "<mask>"}
DATE = "2031-02-03"


class Clock(datetime):
    """The clock of transformers."""

    @classmethod
    def now(cls, tz: Any = None) -> Clock:
        return cls.fromisoformat(DATE)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> transformers.PreTrainedTokenizerBase:
    """transformers' own tokenizer of the files."""
    directory = tmp_path_factory.mktemp("tokenizer")
    files = bytes_tokenizer(turns=True)
    files[SETTINGS] = json.dumps(json.loads(files[SETTINGS]) | TOKENS)
    for name, content in files.items():
        (directory / name).write_text(content)
    tokenizer: transformers.PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(directory)
    assert special_tokens(files) == tokenizer.special_tokens_map
    return tokenizer


TALKS = [
    [("user", " one & two "), ("assistant", "<three>")],
    [("system", "be brief"), ("user", "a\n"), ("assistant", "b"), ("user", "ünïcode 🦜"), ("assistant", " d ")],
    [("assistant", "I begin"), ("user", "yes"), ("assistant", "good")],
]


def child_of(process: TemplateProcess) -> SpawnedChild:
    assert process._child is not None
    return process._child


def messages(turns: list[tuple[str, str]], **fields: str) -> list[dict[str, str]]:
    last = len(turns) - 1
    return [
        {"role": role, "content": content, **(fields if place == last else {})}
        for place, (role, content) in enumerate(turns)
    ]


def theirs(reference: Any, template: str, talk: list[dict[str, str]]) -> str | None:
    """The text by transformers; None if the template refuses the conversation."""
    try:
        text: str = reference.apply_chat_template(talk, chat_template=template, tokenize=False)
    except Exception as error:
        assert "alternate" in str(error)
        return None
    return text


@pytest.mark.parametrize("name", [*FEATURES, *FAMILIES])
def test_the_text_is_that_of_apply_chat_template(name: str, reference: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    source = {**FEATURES, **FAMILIES}[name]
    template = ChatTemplate(source, reference.special_tokens_map, DATE)
    talks = [messages(turns, **fields) for turns in TALKS for fields in ({}, {"thinking": "hm\n"})]
    expected = [theirs(reference, source, talk) for talk in talks]
    assert any(expected)
    found = list(template.render([row(talk) for talk in talks]))
    for ours, text, talk in zip(found, expected, talks, strict=True):
        if isinstance(ours, RenderedConversation):
            assert ours.text == text
            for first, last in ours.spans:
                assert 0 <= first < last <= len(ours.text)
        else:
            assert text is None, (talk, ours)  # Refused by the template itself.
        if talk[0]["role"] == "user":
            asked = reference.apply_chat_template(
                talk[:1], chat_template=source, tokenize=False, add_generation_prompt=True
            )
            assert template_process().prompt(talk[:1]) == asked
    assert any(isinstance(one, RenderedConversation) for one in found)


def test_there_are_twenty_features_and_four_families() -> None:
    assert len(FEATURES) >= 20 and set(FAMILIES) == {"llama", "mistral", "qwen2", "qwen3", "r1"}


def test_reasoning_reaches_the_template_by_the_names_of_transformers() -> None:
    assert set(REASONING) == set(chat_template_utils._REASONING_FIELDS)
    given = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "why"}]}
    given["messages"][0]["reasoning"] = None  # type: ignore[assignment]
    talk = row_conversation(given).messages
    assert talk == messages([("user", "a"), ("assistant", "b")], thinking="why")
    (found,) = ChatTemplate(FAMILIES["qwen3"], TOKENS, DATE).render([row(talk)])
    assert (
        isinstance(found, RenderedConversation) and "<think>\nwhy\n</think>" in found.text and found.texts == ["whyb"]
    )
    (found,) = ChatTemplate(OWN_TEMPLATE, TOKENS, DATE).render([row(talk)])
    assert isinstance(found, RenderedConversation) and "why" not in found.text and found.texts == ["b"]


def test_the_clock_shows_the_given_date_in_every_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate(ASKS_FOR_THE_DATE, {}, "2024-07-26")
    (found,) = template.render([row(messages(TALKS[0]))])
    assert isinstance(found, RenderedConversation) and found.asked_for_date
    assert found.text.startswith("26 Jul 2024 00:00 1721952000 ")
    template_process().stop()
    monkeypatch.setenv("TZ", "Pacific/Auckland")
    assert list(template.render([row(messages(TALKS[0]))])) == [found]
    (found,) = ChatTemplate(OWN_TEMPLATE, {}, DATE).render([row(messages(TALKS[0]))])
    assert isinstance(found, RenderedConversation) and not found.asked_for_date


SHOWN = "{% for m in messages %}{{ m.content }}|{% endfor %}"
ASKS_FOR_THE_DATE = "{{ strftime_now('%d %b %Y %H:%M %s') }} " + SHOWN


class TestLimits:
    """Every hang ends, in one line."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(processes, "SECONDS", 2.0)

    def refused(self, source: str) -> str:
        started = time.monotonic()
        with pytest.raises(UserError) as error:
            ChatTemplate(source, {}, DATE)
        assert time.monotonic() - started < 60 and "\n" not in str(error.value)
        return str(error.value)

    @pytest.mark.parametrize(
        "source",
        [
            "{{ 10**(10**8) }}",
            pytest.param(
                "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
                marks=pytest.mark.prove,
            ),
            pytest.param("{{ '%1000000000d' % 1 }}", marks=pytest.mark.prove),
            pytest.param("{{ (messages|string * 1000) * 1000000 }}", marks=pytest.mark.prove),
            "{{ 'x' * 20000000 }}" + SHOWN,
            pytest.param("{{ lipsum(n=1000000) }}", marks=pytest.mark.prove),
            pytest.param("{{ range(1000)|random }}", marks=pytest.mark.prove),
            pytest.param("{{ [[1, 2]]|map('random')|list }}", marks=pytest.mark.prove),
        ],
    )
    def test_a_template_that_exceeds_a_limit_or_is_left_to_chance(self, source: str) -> None:
        found = self.refused(source)
        assert found.startswith("data.tokenizer:")
        same_wording(found)

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
            ("{% if messages %}" * 500 + "{% endif %}" * 500, "RecursionError"),
            ("{% if messages %}" * 120 + "{% endif %}" * 120, "IndentationError"),
            ("{% for %}", "TemplateSyntaxError"),
            ("{{ '\ud800' }}" + SHOWN, "UnicodeEncodeError"),
        ],
    )
    def test_a_template_that_is_none(self, source: str, reason: str) -> None:
        assert f"fails: {reason}" in self.refused(source)

    def test_a_printed_address_is_refused_unless_it_is_the_users(self) -> None:
        template = ChatTemplate(
            "{% for m in messages %}{{ m.content|map('upper') if loop.index == 2 else m.content }}{% endfor %}",
            {},
            DATE,
        )
        with refuses(TemplateStopped):
            list(template.render([row(messages(TALKS[0]))]))
        talk = messages([("user", "what is <object object at 0x7f00>"), ("assistant", "an object")])
        (found,) = ChatTemplate(SHOWN, {}, DATE).render([row(talk)])
        assert isinstance(found, RenderedConversation) and "0x7f00" in found.text

    @pytest.mark.prove
    def test_the_conversation_is_found_in_its_batch(self) -> None:
        hangs = "{% if 'hang' in messages[0].content %}{% for a in range(99999) %}{% for b in range(99999) %}"
        template = ChatTemplate(hangs + "{% endfor %}{% endfor %}{% endif %}" + SHOWN, {}, DATE)
        talks = [messages([("user", word), ("assistant", "b")]) for word in ("a", "b", "hang", "c")]
        found = template.render([row(talk) for talk in talks])
        assert [next(found).text for _ in range(2)] == ["a|b|", "b|b|"]  # type: ignore[union-attr]
        with refuses(TemplateStopped):
            next(found)
        assert template_process()._child is None
        assert [one.text for one in template.render([row(talk) for talk in talks[:2]])] == ["a|b|", "b|b|"]  # type: ignore[union-attr]

    def test_an_error_of_the_template_is_of_one_conversation(self) -> None:
        template = ChatTemplate("{{ raise_exception('no b') if messages[0].content == 'b' }}" + SHOWN, {}, DATE)
        half = ChatTemplate(SHOWN.replace("|", "{{ '\\ud800' if loop.index == 2 }}"), {}, DATE)
        talks = [messages([("user", word), ("assistant", "c")]) for word in "ab"]
        first, second = template.render([row(talk) for talk in talks])
        assert isinstance(first, RenderedConversation)
        same_wording(str(second))
        (broken,) = half.render([row(talks[0])])
        assert "UnicodeEncodeError" in str(broken)

    def test_text_up_to_the_limit_is_rendered(self) -> None:
        (found,) = ChatTemplate(SHOWN, {}, DATE).render(
            [row(messages([("user", "🦜" + "a" * 15_000_000), ("assistant", "b")]))]
        )
        assert isinstance(found, RenderedConversation) and len(found.text) == 15_000_004
        with refuses(CannotRender):
            row(messages([("user", "a" * 17_000_000), ("assistant", "b")]))

    def test_a_model_does_not_stop_elsewhere_on_a_slow_machine(self) -> None:
        files = {**bytes_tokenizer(turns=True), TEMPLATE: "{{ '%1000000000d' % 1 }}"}
        with refuses(TemplateStopped):
            stop_token_ids(files, answers=True)


class TestTheProcess:
    @pytest.mark.prove
    def test_it_is_started_again_after_it_was_killed(self) -> None:
        template = ChatTemplate(OWN_TEMPLATE, {}, DATE)
        before = list(template.render([row(messages(TALKS[0]))]))
        process = child_of(template_process()).process
        process.kill()
        process.join()
        assert list(template.render([row(messages(TALKS[0]))])) == before
        assert child_of(template_process()).process.pid != process.pid

    def test_one_that_ends_in_the_middle_is_said(self) -> None:
        ChatTemplate(OWN_TEMPLATE, {}, DATE)
        process = template_process()
        psutil.Process(child_of(process).process.pid).suspend()
        child_of(process).process.kill()
        with refuses(TemplateStopped):
            process._receive(child_of(process), 10)
        assert process._child is None

    def test_an_interrupted_request_leaves_no_reply_behind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        template = ChatTemplate(OWN_TEMPLATE, {}, DATE)

        def interrupt(_: float) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as interrupted, pytest.raises(KeyboardInterrupt):
            interrupted.setattr(child_of(template_process()).connection, "poll", interrupt)
            list(template.render([row(messages(TALKS[0]))]))
        (found,) = template.render([row(messages(TALKS[2]))])
        assert isinstance(found, RenderedConversation) and "I begin" in found.text

    @pytest.mark.prove
    def test_every_thread_has_its_own(self) -> None:
        def rendered(mark: str) -> list[str]:
            template = ChatTemplate(mark + SHOWN, {}, DATE)
            found = [one for _ in range(20) for one in template.render([row(messages(TALKS[0]))] * 5)]
            return [one.text if isinstance(one, RenderedConversation) else str(one) for one in found]

        with ThreadPoolExecutor(2) as threads:
            assert list(threads.map(rendered, "<>")) == [[f"{mark} one & two |<three>|"] * 100 for mark in "<>"]

    def test_without_transformers_there_is_one_line(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "transformers.py").write_text("raise ImportError('nothing here')")
        monkeypatch.syspath_prepend(tmp_path)
        process = TemplateProcess()
        with refuses(UserError):
            process.compile({"source": "", "tokens": {}, "date": DATE, "answers": "assistant"})
        assert process._child is None

    def test_it_ends_with_the_connection(self) -> None:
        process = TemplateProcess()
        process.compile({"source": "", "tokens": {}, "date": DATE, "answers": "assistant"})
        worker = psutil.Process(child_of(process).process.pid)
        child_of(process).connection.close()
        worker.wait(20)

    def test_it_ends_with_its_parent_and_loads_no_torch(self) -> None:
        code = (
            "import sys, time\n"
            "from slipstream.shared.language.chat_template import ChatTemplate, OWN_TEMPLATE\n"
            "from slipstream.shared.language.template_process import template_process\n"
            "assert not {'transformers', 'torch', 'jinja2'} & set(sys.modules)\n"
            "ChatTemplate(OWN_TEMPLATE, {}, '2024-07-26')\n"
            "assert not {'transformers', 'torch', 'jinja2'} & set(sys.modules)\n"
            "print(template_process()._child.process.pid, flush=True)\n"
            "time.sleep(600)\n"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
            assert parent.stdout is not None
            worker = psutil.Process(int(parent.stdout.readline()))
            maps = {Path(each.path).name for each in worker.memory_maps()}
            assert not [name for name in maps if "torch" in name]
            parent.kill()
            worker.wait(20)
