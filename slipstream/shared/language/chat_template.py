"""Rendering of conversations by a tokenizer's chat template, with the spans of their answers.

A template is untrusted code, run by :mod:`slipstream.shared.language.template_process`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.shared.errors import UserError
from slipstream.shared.language.template_process import TemplateFailed, TemplateStopped, template_process
from slipstream.shared.language.template_worker import MOST_TEXT
from slipstream.shared.language.tokenizer import (
    SETTINGS,
    SPECIAL,
    TEMPLATE,
    TURN,
    TURN_ENDS,
    Tokenizer,
    tokenizer_json_entry,
)

#: Template for tokenizers that this project builds: every turn between two special tokens.
OWN_TEMPLATE = (
    "{% for message in messages %}"
    f"{TURN}{{{{ message.role }}}}\n{{{{ message.content }}}}{TURN_ENDS}\n"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{TURN}assistant\n{{% endif %}}"
)
ROLES = ("system", "developer", "user", "assistant", "tool")
ANSWERS = "assistant"
#: Fields of a message with the reasoning before an answer; transformers accepts all of these names.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Names of special tokens in transformers.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
Messages = list[dict[str, str]]
#: Text that occurs in no template, to test whether a template shows a message.
PROBE = "probe-7f3a9c"


class CannotRender(Exception):
    """Error for a row that the template cannot render; its message is a short reason."""


@dataclass(frozen=True)
class RenderedConversation:
    """Rendered conversation; a span (characters) covers an answer and the end of its turn."""

    text: str
    spans: list[tuple[int, int]]
    answers: list[str]
    asked_for_date: bool


class ChatTemplate:
    """Compiled chat template.

    ``tokens`` are the special tokens that it may use, such as ``bos_token``. ``date`` (ISO 8601) replaces the current
    date.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], date: str) -> None:
        """Raise ``UserError`` for a template that cannot be compiled, exceeds a limit or omits user turns."""
        self._template = {"source": source, "tokens": dict(tokens), "date": date, "answers": ANSWERS}
        try:
            template_process().compile(self._template)
        except TemplateFailed as error:
            raise UserError(f"data.tokenizer: its chat template cannot be compiled: it {error}") from None
        self._check_turns()

    def _check_turns(self) -> None:
        try:
            text = template_process().prompt([{"role": "user", "content": PROBE}])
        except TemplateFailed as error:
            raise UserError(
                f"data.tokenizer: its chat template cannot render a user's turn: the chat template {error}"
            ) from None
        if PROBE not in text:
            raise UserError(
                "data.tokenizer: its chat template has no user turns: its output lacks the user's message; expected "
                "the template of a chat model"
            )

    def render(self, conversations: Sequence[Messages]) -> Iterator[RenderedConversation | CannotRender]:
        """Yield every rendered conversation, or the reason why it cannot be rendered.

        Reasons are that the template fails, or changes an answer when later messages follow. Every conversation must
        end with an answer (:func:`until_last_answer`). Raises ``TemplateStopped`` at a conversation that exceeds a
        limit.
        """
        process = template_process()
        process.compile(self._template)  # The process may have had another template since, or have been killed.
        for messages, found in zip(conversations, process.render(conversations), strict=True):
            if isinstance(found, str):
                yield CannotRender(f"the chat template {found}")
                continue
            spans = list(zip(found.spans[::2], found.spans[1::2], strict=True))
            answers = [message for message in messages if message["role"] == ANSWERS]
            said = [learned_text(*each) for each in zip(answers, (found.text[a:b] for a, b in spans), strict=True)]
            yield RenderedConversation(found.text, spans, said, found.asked_for_date)


def learned_text(answer: Mapping[str, str], shown: str) -> str:
    """Return the learned text of an answer: its content, preceded by its reasoning if ``shown`` contains that."""
    reasoning = next((answer[name].strip() for name in REASONING if name in answer), "")
    return reasoning + answer["content"] if reasoning and reasoning in shown else answer["content"]


def until_last_answer(messages: Messages) -> Messages:
    """Return the messages up to the last answer.

    Raises :class:`CannotRender` without an answer, and for more than ``MOST_TEXT`` characters.
    """
    last = max((place for place, message in enumerate(messages) if message["role"] == ANSWERS), default=-1)
    if last < 0:
        raise CannotRender("no answer: no message has the role 'assistant'")
    characters = sum(len(text) for message in messages for text in message.values())
    if characters > MOST_TEXT:
        raise CannotRender(f"a conversation of {characters:,} characters, more than {MOST_TEXT:,}")
    return messages[: last + 1]


def load_chat_template(files: Mapping[str, str], date: str) -> ChatTemplate:
    """Return a tokenizer's chat template; raises ``UserError`` if it is missing or unusable."""
    source: object = files.get(TEMPLATE) or tokenizer_json_entry(files, SETTINGS, "chat_template")
    if isinstance(source, list):  # Several by name.
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if not isinstance(source, str) or not source:
        raise UserError(
            f"data.tokenizer: has no chat template for conversations; expected {TEMPLATE}, or chat_template in "
            f"{SETTINGS}, or a column 'text'"
        )
    return ChatTemplate(source, special_tokens(files), date)


def special_tokens(files: Mapping[str, str]) -> dict[str, str]:
    """Return the special tokens in a tokenizer's settings, by their names in transformers."""
    found = {}
    for name in SPECIAL_TOKENS:
        for file in (SETTINGS, SPECIAL):
            token = tokenizer_json_entry(files, file, name)
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str) and name not in found:
                found[name] = token
    return found


def row_messages(values: Mapping[str, Any]) -> Messages:
    """Return the messages of a row: its ``messages``, or its ``prompt`` and ``completion``.

    Messages have the fields role, content and :data:`REASONING`. Raises :class:`CannotRender` for an invalid row.
    """
    if "messages" not in values:
        asked = {"user": values.get("prompt"), ANSWERS: values.get("completion")}
        for name, text in zip(("prompt", "completion"), asked.values(), strict=True):
            if not isinstance(text, str):
                raise CannotRender(f"{name} is not text")
        if not values["completion"]:
            raise CannotRender("no answer: the completion is empty")
        return [{"role": role, "content": str(text)} for role, text in asked.items()]
    messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise CannotRender("messages is not a list of messages")
    return [message_of(message) for message in messages]


def message_of(message: object) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        raise CannotRender("a message has no text 'content'")
    if message.get("role") not in ROLES:
        raise CannotRender(f"unknown role {message.get('role')!r}; expected one of {', '.join(ROLES)}")
    reasoning = {name: message[name] for name in REASONING if message.get(name) is not None}
    if name := next((name for name, text in reasoning.items() if not isinstance(text, str)), None):
        raise CannotRender(f"{name!r} of a message is not text")
    return {"role": message["role"], "content": message["content"], **reasoning}


#: Arbitrary date, since no template ends an answer differently on another day.
ANY_DAY = "2000-01-01"
CONVERSATION = [{"role": "user", "content": "?"}, {"role": ANSWERS, "content": PROBE}]


def stop_token_ids(files: Mapping[str, str], *, answers: bool) -> list[int]:
    """Return the stop token ids of a model that was trained with the tokenizer in ``files``.

    They are the end token and, with ``answers``, the special token that its chat template puts after an answer. Empty
    if the tokenizer cannot be loaded or has no end token.
    """
    try:
        tokenizer = Tokenizer(files)
    except (UserError, KeyError):
        return []
    after = text_after_an_answer(files) if answers else ""
    turn = next((token for token in tokenizer.specials if token and after.startswith(token)), None)
    return list(dict.fromkeys([*([tokenizer.id_of(turn)] if turn else []), tokenizer.end]))


def text_after_an_answer(files: Mapping[str, str]) -> str:
    """Return the text that the chat template puts after the last answer; "" if it is unknown.

    Raises ``TemplateStopped`` if the template exceeds a limit.
    """
    try:
        (found,) = load_chat_template(files, ANY_DAY).render([CONVERSATION])
    except TemplateStopped:
        raise
    except UserError:
        return ""
    return (
        found.text.rpartition(PROBE)[2].lstrip()
        if isinstance(found, RenderedConversation) and PROBE in found.text
        else ""
    )
