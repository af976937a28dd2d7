"""Conversations as text, by a tokenizer's chat template, and which parts of it are answers.

A template is code that comes with a tokenizer from anywhere. It runs in Jinja2's sandbox, as in transformers, and
without a clock: no number may depend on the day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slipstream.errors import UserError
from slipstream.language.tokenizer import SETTINGS, SPECIAL, TEMPLATE, TURN, TURN_ENDS, entry

#: Of tokenizers that are made here: each turn between two special tokens.
OWN_TEMPLATE = (
    "{% for message in messages %}"
    f"{TURN}{{{{ message.role }}}}\n{{{{ message.content }}}}{TURN_ENDS}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant\n{{% endif %}}"
)
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
#: No template can have it in its own text.
PROBE = "probe-7f3a9c"


class CannotRender(Exception):
    """Why a conversation is none that a template renders, in half a line."""


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and of each answer where in it (characters) it is, with the end of its turn."""

    text: str
    spans: list[tuple[int, int]]
    answers: list[str]


class ChatTemplate:
    """``tokens`` are the special tokens that a template may name, such as ``bos_token``."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """Raises ``UserError`` for a template that is none, or has no user turns."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UserError(f"data.tokenizer: its chat template is none of Jinja2's: {error}") from None
        self._tokens = dict(tokens)
        self._check_turns()

    def _check_turns(self) -> None:
        asked = [{"role": "user", "content": PROBE}]
        try:
            text = self._render(asked, prompt=True)
        except CannotRender as error:
            raise UserError(f"data.tokenizer: its chat template cannot render a user's turn: {error}") from None
        if PROBE not in text:
            raise UserError(
                "data.tokenizer: its chat template has no user turns: what a user says is not in its text; expected "
                "the template of a model that is asked and answers"
            )

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._tokens)
        except CannotRender:
            raise
        except Exception as error:  # a template's own code
            raise CannotRender(f"the chat template fails: {type(error).__name__}: {one_line(error)}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> Rendered:
        """Raises :class:`CannotRender` for a conversation without an answer, or of which an answer cannot be found: one
        that the template shows otherwise once others follow."""
        last = max((place for place, one in enumerate(messages) if one["role"] == ANSWERS), default=-1)
        if last < 0:
            raise CannotRender("no answer: no message of the role 'assistant'")
        messages = messages[: last + 1]
        text = self._render(messages, prompt=False)
        spans, answers = [], []
        for place, message in enumerate(messages):
            if message["role"] != ANSWERS:
                continue
            before = self._render(messages[:place], prompt=True) if place else ""
            after = text if place == last else self._render(messages[: place + 1], prompt=False)
            if not (text.startswith(after) and after.startswith(before)) or len(after) == len(before):
                raise CannotRender("the chat template shows an answer otherwise once others follow, or not at all")
            spans.append((len(before), len(after)))
            answers.append(str(message["content"]))
        return Rendered(text, spans, answers)


def template_of(files: Mapping[str, str]) -> ChatTemplate:
    """The chat template of a tokenizer. Raises ``UserError`` if it has none."""
    source: object = files.get(TEMPLATE) or entry(files, SETTINGS, "chat_template")
    if isinstance(source, list):  # several by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        raise UserError(
            f"data.tokenizer: has no chat template for conversations; expected {TEMPLATE}, or chat_template in "
            f"{SETTINGS}, or a column 'text'"
        )
    return ChatTemplate(source, special_tokens(files))


def special_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """The texts of the special tokens that the settings of a tokenizer name, by name."""
    found = {}
    for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
        for file in (SETTINGS, SPECIAL):
            token = entry(files, file, name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and name not in found:
                found[name] = token
    return found


def messages_of(values: Mapping[str, Any]) -> list[dict[str, str]]:
    """The messages of a row: its ``messages``, or its ``prompt`` and ``completion``. Raises :class:`CannotRender`."""
    if "messages" not in values:
        asked = {"user": values.get("prompt"), ANSWERS: values.get("completion")}
        for name, text in zip(("prompt", "completion"), asked.values(), strict=True):
            if not isinstance(text, str):
                raise CannotRender(f"{name} is no text")
        if not values["completion"]:
            raise CannotRender("no answer: the completion is empty")
        return [{"role": role, "content": str(text)} for role, text in asked.items()]
    messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise CannotRender("messages is no list of messages")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("content"), str):
            raise CannotRender("a message has no text 'content'")
        if message.get("role") not in ROLES:
            raise CannotRender(f"unknown role {message.get('role')!r}; expected one of {', '.join(ROLES)}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def refuse(message: str) -> NoReturn:
    raise CannotRender(f"the chat template says: {one_line(message)}")


def one_line(message: object) -> str:
    return " ".join(str(message).split())[:200]
