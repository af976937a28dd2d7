"""Rendering of conversations by a tokenizer's chat template, with the spans of their answers.

A template is untrusted code, run by :mod:`slipstream.shared.language.template_process`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from slipstream.shared.errors import UserError
from slipstream.shared.language.template_process import TemplateFailed, TemplateStopped, template_process
from slipstream.shared.language.template_worker import (
    MARKED,
    MOST_TEXT,
    PROBES,
    THOUGHT,
    Message,
    Rule,
    TemplateInput,
    texts_in,
)
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
#: Keys of an answer that say whether it is learned: 0 or false for no. They are not given to the template.
CHOICES = ("weight", "train")
#: Fields of a message with the reasoning before an answer; transformers accepts all of these names.
REASONING = ("reasoning_content", "thinking", "reasoning")
#: Names of special tokens in transformers.
SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
PROBE = PROBES[0]
#: Roles and keys of a conversation's messages, and whether it has tools.
Shape: TypeAlias = tuple[tuple[tuple[Any, ...], ...], bool]


class CannotRender(Exception):
    """Error for a row that the template cannot render; its message is a short reason."""


@dataclass(frozen=True)
class Conversation:
    """Messages and ``tools`` for a template; ``answers`` are the indices of the answers to learn."""

    messages: list[Message]
    tools: list[Any] | None
    answers: list[int]

    @property
    def shape(self) -> Shape:
        turns = ((each["role"], *sorted(each), THOUGHT in str(each.get("content"))) for each in self.messages)
        return tuple(turns), bool(self.tools)

    @property
    def content(self) -> str:
        messages = [{"role": each["role"], **sorted_values(each)} for each in self.messages]
        parts = [messages, sorted_values(self.tools)] if self.tools else messages
        return json.dumps(parts, ensure_ascii=False)

    @property
    def texts(self) -> Iterator[str]:
        """Texts of all values of messages and tools, without roles and keys."""
        yield from texts_in([value for each in self.messages for key, value in each.items() if key != "role"])
        yield from texts_in(self.tools)

    @property
    def number_of_answers(self) -> int:
        return sum(message["role"] == ANSWERS for message in self.messages)

    def rows(self, *, each: bool) -> list[Conversation]:
        """Return the messages up to the last answer to learn; with ``each``, up to every answer, to learn only that."""
        learned = [[place] for place in self.answers] if each else [self.answers]
        return [Conversation(self.messages[: answers[-1] + 1], self.tools, answers) for answers in learned]


def sorted_values(value: Any) -> Any:
    """Return a value that JSON can store, with sorted keys; the content of a message comes first."""
    if isinstance(value, dict):
        names = sorted(value, key=lambda name: (name != "content", name))
        return {name: sorted_values(value[name]) for name in names}
    return [sorted_values(item) for item in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class RenderedConversation:
    """Rendered conversation; a span (characters) covers learned text, whose ``texts`` lack special tokens.

    ``learned`` are the messages that the template ``rule`` chose; ``unused`` is that of ``RenderedText``.
    """

    text: str
    spans: list[tuple[int, int]]
    texts: list[str]
    learned: list[int]
    rule: Rule
    asked_for_date: bool
    unused: list[tuple[str, str]]


class ChatTemplate:
    """Compiled chat template.

    ``tokens`` are the special tokens that it may use, such as ``bos_token``. ``date`` (ISO 8601) replaces the current
    date.
    """

    def __init__(self, source: str, tokens: Mapping[str, str], date: str) -> None:
        """Raise ``UserError`` for a template that cannot be compiled, exceeds a limit or omits user turns."""
        self._template = {"source": source, "tokens": dict(tokens), "date": date, "answers": ANSWERS}
        #: Values that the template leaves out, by the conversation's shape.
        self._unused: dict[Shape, list[tuple[str, str]]] = {}
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

    def render(self, conversations: Sequence[Conversation]) -> Iterator[RenderedConversation | CannotRender]:
        """Yield every rendered conversation, or why it cannot be rendered.

        The first conversation of a shape is rendered again with every value replaced. Raises ``TemplateStopped`` at a
        conversation that exceeds a limit.
        """
        process = template_process()
        process.compile(self._template)  # The process may have had another template since, or have been killed.
        new: dict[Shape, int] = {}
        for each in conversations:
            if each.shape not in self._unused:
                new.setdefault(each.shape, len(new))
        inputs = [
            TemplateInput(messages=each.messages, tools=each.tools, answers=each.answers, shape=new.get(each.shape, -1))
            for each in conversations
        ]
        for given, found in zip(conversations, process.render(inputs), strict=True):
            if isinstance(found, str):
                yield CannotRender(f"the chat template {found}")
                continue
            if found.unused is not None:
                self._unused.setdefault(given.shape, [(role, key) for role, key in found.unused])
            spans = list(zip(found.spans[::2], found.spans[1::2], strict=True))
            shown = [found.text[first:last] for first, last in spans]
            if found.rule != MARKED:
                answers = [given.messages[place] for place in found.learned]
                shown = [learned_text(*each) for each in zip(answers, shown, strict=True)]
            yield RenderedConversation(
                found.text, spans, shown, found.learned, found.rule, found.asked_for_date, self._unused[given.shape]
            )


def learned_text(answer: Message, shown: str) -> str:
    """Return the text learned of an answer whose span is ``shown``: content and reasoning, or else the span."""
    content = answer.get("content", "")
    if not isinstance(content, str) or content.strip() not in shown or answer.keys() - {"role", "content", *REASONING}:
        return shown
    reasoning = next((str(answer[name]).strip() for name in REASONING if name in answer), "")
    return reasoning + content if reasoning and reasoning in shown else content


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


def row_conversation(values: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a row: its ``messages``, or its ``prompt`` and ``completion``, and its ``tools``.

    Messages have the keys that are not null, as in transformers. Raises :class:`CannotRender` for an invalid row.
    """
    if "messages" not in values:
        asked = {"user": values.get("prompt"), ANSWERS: values.get("completion")}
        for name, text in zip(("prompt", "completion"), asked.values(), strict=True):
            if not isinstance(text, str):
                raise CannotRender(f"{name} is not text")
        if not values["completion"]:
            raise CannotRender("no answer: the completion is empty")
        messages: Any = [{"role": role, "content": str(text)} for role, text in asked.items()]
    else:
        messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise CannotRender("messages is not a list of messages")
    found, tools = as_json([message_of(message) for message in messages], tools_of(values.get("tools")))
    answers = [place for place, message in enumerate(found) if message["role"] == ANSWERS]
    # A weight is removed from an answer.
    chosen = {place: [is_chosen(found[place].pop(name, 1), name) for name in CHOICES] for place in answers}
    learned = [place for place in answers if all(chosen[place])]
    if not learned:
        why = "every answer has weight 0 or train false" if answers else f"no message has the role {ANSWERS!r}"
        raise CannotRender(f"no answer: {why}")
    for place in learned:
        if not any(text.strip() for name, value in found[place].items() if name != "role" for text in texts_in(value)):
            raise CannotRender(f"message {place + 1} is an empty answer")
    conversation = Conversation(found, tools, learned)
    characters = sum(map(len, conversation.texts))
    if characters > MOST_TEXT:
        raise CannotRender(f"a conversation of {characters:,} characters, more than {MOST_TEXT:,}")
    return conversation


def message_of(message: object) -> Message:
    found = {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else {}
    if not found.keys() - {"role", *CHOICES}:
        raise CannotRender("a message has no 'content'")
    if found.get("role") not in ROLES:
        raise CannotRender(f"unknown role {found.get('role')!r}; expected one of {', '.join(ROLES)}")
    return found


def is_chosen(value: object, name: str) -> bool:
    """Return whether an answer with this weight is learned; raises :class:`CannotRender` unless it is 0 or 1."""
    if not isinstance(value, int | float) or value not in (0, 1):
        raise CannotRender(f"{name!r} of a message is {value!r:.40}; expected 0 or 1, false or true")
    return bool(value)


def tools_of(value: object) -> list[Any] | None:
    """Return the tools of a row: a list, maybe as JSON text. Raises :class:`CannotRender`."""
    with suppress(ValueError, RecursionError):
        value = json.loads(value) if isinstance(value, str) else value
    if not (value is None or (isinstance(value, list) and all(isinstance(tool, dict) for tool in value))):
        raise CannotRender("tools is not a list of objects")
    return value


def as_json(*values: Any) -> Any:
    try:
        return json.loads(json.dumps(values, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        raise CannotRender("a message has a value that JSON cannot store") from None


#: Arbitrary date, since no template ends an answer differently on another day.
ANY_DAY = "2000-01-01"
CONVERSATION = Conversation([{"role": "user", "content": "?"}, {"role": ANSWERS, "content": PROBE}], None, [1])


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
