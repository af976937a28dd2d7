"""Learned answers of a conversation, by the template's marks or by its text, against transformers' own labels."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from slipstream.shared.artifacts.prepared.token_rows import NOT_LEARNED, read_tokens
from slipstream.shared.language.chat_template import (
    CannotRender,
    ChatTemplate,
    Conversation,
    RenderedConversation,
    row_conversation,
)
from slipstream.shared.language.tokenizer import LearnedSpans, Tokenizer, TokenizerFiles, train_tokenizer
from tests.support.chat_templates import FAMILIES, MARKED, row
from tests.support.corpora import story
from tests.support.wording import refuses, same_wording

TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
Talk = list[dict[str, Any]]


@pytest.fixture(scope="module")
def files() -> TokenizerFiles:
    return train_tokenizer(map(story, range(20)), 330, turns=True)


@pytest.fixture(scope="module")
def reference(files: TokenizerFiles, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """transformers' own tokenizer of the files."""
    directory = tmp_path_factory.mktemp("tokenizer")
    for name, content in files.items():
        (directory / name).write_text(content)
    return transformers.AutoTokenizer.from_pretrained(directory)


def talk(*turns: str, **last: Any) -> Talk:
    """Turns of user and assistant; ``last`` are more keys of the last message."""
    found: Talk = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(turns)]
    found[-1] |= last
    return found


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def with_tool(**first: Any) -> Talk:
    """A question, a call of a tool, its result and the answer."""
    called = {"role": "assistant", "content": "", "tool_calls": [CALL], **first}
    result = {"role": "tool", "content": "3", "name": "add"}
    return [*talk("alpha beta?"), called, result, {"role": "assistant", "content": "It is 3."}]


def rendered(template: str, given: Conversation) -> RenderedConversation:
    (found,) = ChatTemplate(template, TOKENS, "2024-07-26").render([given])
    assert isinstance(found, RenderedConversation), found
    return found


def shown(found: RenderedConversation) -> list[str]:
    return [found.text[first:last] for first, last in found.spans]


@pytest.mark.parametrize(
    "messages",
    [
        talk("alpha", "beta"),
        talk("a", " beta gamma", "c", "épsilon 🦜 zeta"),
        [{"role": "system", "content": "be brief"}, *talk("a", "b", "c", "d")],
        with_tool(),
    ],
)
@pytest.mark.parametrize("template", [MARKED, MARKED.replace("assistant' %}{% gen", "assistant' %}: {% gen")])
def test_marked_answers_have_the_labels_of_transformers(
    template: str, messages: Talk, files: TokenizerFiles, reference: Any
) -> None:
    """Also where one token holds the start of an answer and the text before it."""
    found = rendered(template, row(messages, TOOLS))
    assert found.rule == "marked" and len(found.learned) == sum(each["role"] == "assistant" for each in messages)
    (stored,) = Tokenizer(files).conversations([found.text], [LearnedSpans(found.spans, marked=True)])
    ids, labels = read_tokens(stored)
    theirs = reference.apply_chat_template(
        messages, TOOLS, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == theirs["input_ids"] and any(theirs["assistant_masks"])
    assert (labels != NOT_LEARNED).tolist() == [bool(each) for each in theirs["assistant_masks"]]


@pytest.mark.parametrize(
    ("family", "messages", "rule", "learned"),
    [
        ("qwen3", talk("a", "b"), "all", [1]),
        ("qwen3", talk("a", "b", "c", "d"), "last", [3]),
        ("qwen3", talk("a", "b", "c", "d", reasoning_content="why"), "last", [3]),
        ("qwen3", with_tool(), "last", [3]),
        ("qwen3", with_tool(reasoning_content="I add."), "all", [1, 3]),
        ("qwen2", talk("a", "b", "c", "d"), "all", [1, 3]),
        ("llama", talk("a", "b", "c", "d"), "all", [1, 3]),
    ],
)
def test_an_answer_is_the_text_behind_the_prompt_that_asks_for_it(
    family: str, messages: Talk, rule: str, learned: list[int], reference: Any
) -> None:
    template = FAMILIES[family].replace('strftime_now("%d %b %Y")', '"26 Jul 2024"')
    tools = TOOLS if family == "qwen3" else None

    def text(until: int, *, prompt: bool = False) -> str:
        return str(
            reference.apply_chat_template(
                messages[:until], tools, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )
        )

    found = rendered(template, row(messages, tools))
    assert (found.text, found.rule, found.learned) == (text(len(messages)), rule, learned)
    assert shown(found) == [text(place + 1).removeprefix(text(place, prompt=True)) for place in learned]
    stands = [found.text.startswith(text(place + 1)) for place in learned]
    assert all(stands)


def test_a_prompt_that_opens_reasoning_is_no_part_of_an_answer() -> None:
    """Templates of models distilled from R1 ask for reasoning that they do not show in a conversation."""
    one = rendered(FAMILIES["r1"], row(talk("a", "<think>\nwhy\n</think>beta")))
    assert (one.rule, shown(one), one.texts) == ("all", ["beta<|endoftext|>"], ["beta<|endoftext|>"])
    assert one.unused == [("assistant", "content before </think>")]
    both = rendered(FAMILIES["r1"], row(talk("a", "probe", "c", "7f3a")))
    assert (both.rule, shown(both)) == ("all", ["probe<|endoftext|>", "7f3a<|endoftext|>"])


def test_an_answer_without_weight_is_not_learned() -> None:
    for choice in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": True}):
        messages = talk("a", "b", "c", "d")
        messages[1] |= choice
        for template in (FAMILIES["qwen2"], FAMILIES["qwen3"], MARKED):
            found = rendered(template, row(messages))
            assert found.learned == [3] and "b<|im_end|>" in found.text and "d<|im_end|>" in shown(found)[0]
            assert len(shown(found)) == 1
    chosen = rendered(MARKED, row(talk("a", "b", "c", "d", weight=0)))
    assert chosen.text.endswith("b<|im_end|>\n") and shown(chosen) == ["b<|im_end|>"]


def test_the_rows_of_every_answer() -> None:
    messages = [*talk("a", "b", "c", "d"), *talk("e", "f", weight=1)]
    rows = row_conversation({"messages": messages}).rows(each=True)
    found = [rendered(FAMILIES["qwen3"], each) for each in rows]
    assert [each.rule for each in found] == ["all"] * 3
    assert [shown(each) for each in found] == [[f"<think>\n\n</think>\n\n{text}<|im_end|>\n"] for text in "bdf"]
    marked = [rendered(MARKED, each) for each in rows]
    assert [shown(each) for each in marked] == [[f"{text}<|im_end|>"] for text in "bdf"]


@pytest.mark.parametrize(
    ("family", "messages", "tools", "unused"),
    [
        ("qwen3", [{"role": "developer", "content": "be brief"}, *talk("a", "b")], None, [("developer", "")]),
        ("qwen3", with_tool(), TOOLS, [("tool", "name")]),
        ("qwen2", talk("a", "b", reasoning_content="why"), None, [("assistant", "reasoning_content")]),
        (
            "qwen2",
            talk("a", "b", name="Ann", tool_calls=[CALL]),
            None,
            [("assistant", "name"), ("assistant", "tool_calls")],
        ),
        ("mistral", talk("a", "b"), TOOLS, [("", "tools")]),
        ("qwen3", talk("a", "b", "c", "d", reasoning_content="why"), TOOLS, []),
    ],
)
def test_values_that_the_template_leaves_out(family: str, messages: Talk, tools: Any, unused: Any) -> None:
    assert rendered(FAMILIES[family], row(messages, tools)).unused == unused


ONLY_THE_LAST = (
    "{% for m in messages %}{% if loop.last %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}"
    "{{ m.content }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        ("qwen2", talk("a", "", tool_calls=[CALL])),
        ("r1", talk("a", "<think>why</think>")),
        (MARKED.replace("m.content ~ '<|im_end|>'", "m.content if m.content != 'c'"), talk("a", "b", "c", "d")),
        (ONLY_THE_LAST, [*talk("a", "b", weight=0), *talk("c", "d")]),
    ],
)
def test_what_leaves_no_trace_is_named(template: str, messages: Talk) -> None:
    source = FAMILIES.get(template, template)
    (found,) = ChatTemplate(source, TOKENS, "2024-07-26").render([row(messages)])
    assert isinstance(found, CannotRender)
    same_wording(str(found))


@pytest.mark.parametrize(
    "values",
    [
        {"messages": talk("a", "b", weight=0.5)},
        {"messages": talk("a", "b", train="no")},
        {"messages": talk("a", "b", weight=0)},
        {"messages": talk("a", "")},
        {"messages": [{"role": "user", "name": None}]},
        {"messages": talk("a", "b", score=float("nan"))},
        {"messages": talk("a", "b"), "tools": "no JSON"},
        {"messages": talk("a", "b"), "tools": [1]},
    ],
)
def test_rows_that_cannot_be(values: dict[str, Any]) -> None:
    with refuses(CannotRender):
        row_conversation(values)


def test_a_row_of_columns_is_that_of_lines() -> None:
    """Columns add nulls to messages, and often hold tools as JSON."""
    plain = row(talk("a", "b"), TOOLS)
    nulls = [{**each, "tool_calls": None, "name": None} for each in talk("a", "b")]
    stored = row_conversation({"messages": nulls, "tools": json.dumps(TOOLS)})
    assert stored == plain and stored.content == plain.content
    assert row_conversation({"messages": talk("a", "b"), "tools": None}).content == row(talk("a", "b")).content
