"""Worker process that compiles and renders chat templates as transformers does.

A template is untrusted code. It runs in Jinja2's sandbox, in a process of its own with a memory limit, which may be
killed. Unlike in transformers, results never depend on the day or on chance: ``strftime_now`` formats a given date;
``random``, ``lipsum`` and texts with an object's address are refused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise, takewhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypedDict

from slipstream.shared.distributed.child_processes import end_with_parent
from slipstream.shared.one_line import one_line

#: State of a reply: a result, an error of the template, or an exceeded limit or forbidden feature.
DONE, FAILED, STOPPED = "done", "failed", "stopped"
#: Largest number of bytes of text of a conversation or batch.
MOST_TEXT = 16 << 20
#: Bytes of address space that may be allocated after the libraries are imported.
MEMORY = 512 << 20
#: Largest number of characters of a reason.
LONGEST_REASON = 200
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")

#: Message of a conversation: its role, and any values that JSON can store.
Message: TypeAlias = dict[str, Any]
#: Rule by which answers are learned: those that the template marks, all, or the last one.
Rule = Literal["marked", "all", "last"]
MARKED: Rule = "marked"
ALL: Rule = "all"
LAST: Rule = "last"
#: Tag with which a template marks answers, as transformers finds it.
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
#: Texts that occur in no template and have no common start, to test where a template shows a value.
PROBES = ("probe-7f3a9c", "7f3a9c-probe")
#: A text of at least this many characters that occurs in the output was put there by its message.
LONG_TEXT = 20
#: End of the reasoning that a message's content may contain, which some templates cut off.
THOUGHT = "</think>"


class TemplateInput(TypedDict):
    """Conversation to render; it ends with the last of the ``answers``, the indices of the messages to learn.

    Values that do not change the text are found for the first conversation of every ``shape``, except -1.
    """

    messages: list[Message]
    tools: list[Any] | None
    answers: list[int]
    shape: int


class RenderedText(NamedTuple):
    """Rendered conversation.

    ``spans`` is a flat list of start and end characters of learned text, ``learned`` the indices of the learned
    messages. ``unused`` names role and key of values that do not change the text (None if not looked for); a whole
    message and ``tools`` have "" in place of the missing part.
    """

    text: str
    spans: list[int]
    learned: list[int]
    rule: Rule
    asked_for_date: bool
    unused: list[list[str]] | None


class Refused(Exception):
    """Error for a template that exceeded a limit or used a forbidden feature."""


class NotShown(Exception):
    """Error for a template that leaves out a message, or learned text; its message is the reason."""


def serve_templates(connection: Connection, parent: int) -> None:
    """Reply to requests of the process ``parent`` until it closes the connection.

    A request is a JSON object with one key: "template" (the arguments of :class:`SandboxedTemplate`), "prompt"
    (messages) or "conversations" (a list of :class:`TemplateInput`). A reply is a JSON list of a state and a result or
    reason. A first reply is sent once the libraries are imported.
    """
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C also reaches the parent, which ends this process.
    # Python's compiler warns about the code of templates.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.environ["TZ"] = "UTC"  # For strftime("%s").
    time.tzset()
    template: SandboxedTemplate | None = None
    try:
        reply(connection, load_compiler)
        while True:
            request = json.loads(connection.recv_bytes())
            if "template" in request:
                template = SandboxedTemplate(**request["template"])
                reply(connection, template.compile)
                continue
            assert template is not None
            if "prompt" in request:
                reply(connection, partial(template.prompt, request["prompt"]))
            else:
                reply(connection, partial(template.render, request["conversations"]))
    except (EOFError, ConnectionError):
        return


def load_compiler() -> None:
    """Import the template compiler, without torch, then limit the memory."""
    from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template  # noqa: F401

    limit_memory(MEMORY)


def limit_memory(most: int) -> None:
    """Limit the address space to ``most`` bytes more than now.

    Does nothing except on Linux, since other systems do not enforce it.
    """
    if not sys.platform.startswith("linux"):
        return
    import resource

    limit = most + resource.getpagesize() * int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    highest = resource.getrlimit(resource.RLIMIT_AS)[1]
    if highest != resource.RLIM_INFINITY:
        limit = min(limit, highest)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def reply(connection: Connection, work: Callable[[], object]) -> None:
    """Send the result of ``work``, or the reason why it failed."""
    try:
        content = json.dumps([DONE, work()], ensure_ascii=False).encode()
    except Refused as error:
        content = json.dumps([STOPPED, str(error)]).encode()
    except MemoryError:
        content = json.dumps([STOPPED, f"needed more than {MEMORY >> 20} MiB of memory"]).encode()
    except Exception as error:  # Raised by the template's own code.
        content = json.dumps([FAILED, reason_of(error)]).encode()
    connection.send_bytes(content)


def reason_of(error: Exception) -> str:
    from jinja2 import TemplateError

    text = one_line(str(error))[:LONGEST_REASON]
    if isinstance(error, NotShown):
        return text
    # Templates raise exactly this class by raise_exception.
    return f"says: {text}" if type(error) is TemplateError else f"fails: {type(error).__name__}: {text}"


class SandboxedTemplate:
    """Template with the special ``tokens`` that it may use, such as ``bos_token``.

    ``date`` (ISO 8601) replaces the current date. ``answers`` is the role of messages that are answers.
    """

    def __init__(self, source: str, tokens: dict[str, str], date: str, answers: str) -> None:
        self.source, self.answers = source, answers
        self.date = datetime.fromisoformat(date)
        self.asked_for_date = False
        self.tokens = tokens

    def compile(self) -> None:
        """Compile the template as transformers does, but with a fixed date and without random functions."""
        from transformers.utils import chat_template_utils as library

        self.compiled = library._compile_jinja_template(self.source)
        self.with_aliases: Callable[[Any], Sequence[Message]] = library._alias_reasoning_fields
        self.with_marks: Callable[..., Any] = library._render_with_assistant_indices
        environment = self.compiled.environment
        environment.globals["strftime_now"] = self.strftime_now
        # Both are looked up while a template is rendered, also by name, as in map("random").
        environment.globals["lipsum"] = partial(refuse_chance, "lipsum")
        environment.filters["random"] = partial(refuse_chance, "random")

    def strftime_now(self, format: str) -> str:
        self.asked_for_date = True
        return self.date.strftime(format)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt for a model that is to answer ``messages``."""
        text = self.text(messages, prompt=True)
        check_size(len(text.encode()))
        refuse_addresses(text, messages)
        return text

    def render(self, conversations: Sequence[TemplateInput]) -> list[RenderedText | str]:
        """Return every rendered conversation, or the reason why it cannot be rendered; raises :class:`Refused`."""
        found: list[RenderedText | str] = []
        size, known = 0, {-1}
        for given in conversations:
            try:
                rendered = self.conversation(given)
                if given["shape"] not in known:
                    rendered = rendered._replace(unused=[list(each) for each in self.unused(given, rendered.text)])
                    known.add(given["shape"])
                size += len(rendered.text.encode())
            except (Refused, MemoryError):
                raise
            except Exception as error:  # Raised by the template's own code.
                found.append(reason_of(error))
                continue
            check_size(size)
            found.append(rendered)
        return found

    def conversation(self, given: TemplateInput) -> RenderedText:
        self.asked_for_date = False
        messages, tools, answers = given["messages"], given["tools"], given["answers"]
        text, marks = self.marked_text(messages, tools)
        refuse_addresses(text, [messages, tools])
        rule: Rule
        if GENERATION.search(self.source):
            rule, spans = MARKED, self.marked_spans(messages, tools, answers, marks)
        else:
            ends = [len(self.text_until(place, given, text)) for place in answers]
            rule = ALL if all(ends) else LAST
            answers, ends = (answers, ends) if rule == ALL else (answers[-1:], ends[-1:])
            found = zip(answers, ends, strict=True)
            spans = [(self.answer_start(place, given, text[:end]), end) for place, end in found]
        if not all(first < last for first, last in spans) or not spans:
            raise NotShown(f"leaves out {named(messages, answers[-1])}")
        for place, message in enumerate(messages):
            if (message["role"] == "user" or place in answers) and not self.shows(place, given, text):
                raise NotShown(f"leaves out {named(messages, place)}")
        flat = [character for span in spans for character in span]
        return RenderedText(text, flat, answers, rule, self.asked_for_date, None)

    def marked_spans(
        self, messages: list[Message], tools: Any, answers: list[int], marks: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the marks of the messages ``answers``.

        A message has the marks that a rendering up to it adds, or one mark per answer. Raises :class:`NotShown` if
        neither holds.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == self.answers]
        if answers != places:
            until = [[], *(self.marked_text(messages[: place + 1], tools)[1] for place in places)]
            ends = [len(found) for found in until]
            if any(found != marks[:end] for found, end in zip(until, ends, strict=True)):
                ends = list(range(len(places) + 1))
            if ends[-1] != len(marks):
                raise NotShown("marks an answer differently once others follow, so its marks are not known")
            ranges = zip(places, pairwise(ends), strict=True)
            marks = [mark for place, (first, last) in ranges if place in answers for mark in marks[first:last]]
        return [(first, last) for first, last in marks if first < last]

    def text_until(self, place: int, given: TemplateInput, text: str) -> str:
        """Return the part of ``text`` up to a message, or "" if the text differs when the conversation ends there."""
        if place + 1 == len(given["messages"]):
            return text
        until = self.text_if_any(given["messages"][: place + 1], given["tools"])
        return until if until is not None and text.startswith(until) else ""

    def answer_start(self, place: int, given: TemplateInput, until: str) -> int:
        """Return the number of characters before the answer with which ``until`` ends."""
        before = given["messages"][:place]
        prompt = self.text_if_any(before, given["tools"], prompt=True) if before else ""
        if prompt is not None and until.startswith(prompt):
            return len(prompt)
        message = given["messages"][place]
        probed = [self.text([*before, replaced(message, probe)], given["tools"]) for probe in PROBES]
        return min(same_characters(until, other) for other in probed)

    def shows(self, place: int, given: TemplateInput, text: str) -> bool:
        message = given["messages"][place]
        values = [value for key, value in message.items() if key != "role"]
        if any(len(found) >= LONG_TEXT and found in text for found in map(str.strip, texts_in(values))):
            return True
        others = (replaced(message, PROBES[0]), {"role": message["role"], "content": ""})
        return all(self.changes(given, place, other, text) for other in others if other != message)

    def unused(self, given: TemplateInput, text: str) -> Iterator[tuple[str, str]]:
        for place, message in enumerate(given["messages"]):
            keys = [key for key in message if key != "role"]
            unused = [
                key for key in keys if not self.changes(given, place, {**message, key: probe_for(message[key])}, text)
            ]
            yield from ((message["role"], key) for key in (unused if unused != keys else [""]))
            content = message.get("content")
            if isinstance(content, str) and THOUGHT in content:
                shown = {**message, "content": PROBES[0] + THOUGHT + content.rpartition(THOUGHT)[2]}
                if not self.changes(given, place, shown, text):
                    yield message["role"], f"content before {THOUGHT}"
        if given["tools"] and self.text_if_any(given["messages"], probe_for(given["tools"])) == text:
            yield "", "tools"

    def changes(self, given: TemplateInput, place: int, message: Message, text: str) -> bool:
        messages = list(given["messages"])
        messages[place] = message
        return self.text_if_any(messages, given["tools"]) != text

    def text(self, messages: Sequence[Message], tools: Any = None, *, prompt: bool = False) -> str:
        return str(
            self.compiled.render(
                messages=self.with_aliases(messages),
                tools=tools,
                documents=None,
                add_generation_prompt=prompt,
                **self.tokens,
            )
        )

    def text_if_any(self, messages: Sequence[Message], tools: Any, *, prompt: bool = False) -> str | None:
        try:
            return self.text(messages, tools, prompt=prompt)
        except (Refused, MemoryError):
            raise
        except Exception:  # Raised by the template's own code.
            return None

    def marked_text(self, messages: Sequence[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the start and end characters that the template marks with ``{% generation %}``."""
        marked: tuple[str, list[tuple[int, int]]] = self.with_marks(
            self.compiled,
            messages=self.with_aliases(messages),
            tools=tools,
            documents=None,
            add_generation_prompt=False,
            **self.tokens,
        )
        return marked


def same_characters(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def named(messages: Sequence[Message], place: int) -> str:
    return f"message {place + 1} (role {messages[place]['role']!r})"


def replaced(message: Message, probe: str) -> Message:
    return {key: value if key == "role" else probe_for(value, probe) for key, value in message.items()}


def probe_for(value: Any, probe: str = PROBES[0]) -> Any:
    if isinstance(value, dict):
        return {key: probe_for(item, probe) for key, item in value.items()}
    if isinstance(value, list):
        return [probe_for(item, probe) for item in value]
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else probe


def texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from (key, *texts_in(item))
    elif isinstance(value, list):
        for item in value:
            yield from texts_in(item)


def check_size(text: int) -> None:
    if text > MOST_TEXT:
        raise Refused(f"made more than {MOST_TEXT >> 20} MiB of text")


def refuse_chance(name: str, *_: object, **__: object) -> NoReturn:
    raise Refused(f"uses {name}, which gives a different result in every run")


def refuse_addresses(text: str, given: Any) -> None:
    """Raise :class:`Refused` for text such as "<generator object at 0x7f…>" that is not part of the input."""
    if printed := ADDRESS.findall(text):
        known = {found for value in texts_in(given) for found in ADDRESS.findall(value)}
        if not known.issuperset(printed):
            raise Refused("prints the address of an object, which differs in every run")
