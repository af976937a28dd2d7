"""Worker process that compiles and renders chat templates as transformers does.

A template is untrusted code. It runs in Jinja2's sandbox, in a process with a memory limit, which does nothing else and
may be killed. Unlike in transformers, results never depend on the day or on chance: ``strftime_now`` formats a given
date; ``random``, ``lipsum`` and texts with an object's address are refused.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

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

Message = Mapping[str, str]


class RenderedText(NamedTuple):
    """Rendered conversation.

    ``spans`` is a flat list of start and end characters; a span covers an answer and the end of its turn.
    """

    text: str
    spans: list[int]
    asked_for_date: bool


class Refused(Exception):
    """Error for a template that exceeded a limit or used a forbidden feature."""


class AnswerChanges(Exception):
    """Error for an answer whose text is empty or depends on later messages."""


def serve_templates(connection: Connection, parent: int) -> None:
    """Reply to requests of the process ``parent`` until it closes the connection.

    A request is a JSON object with one key: "template" (the arguments of :class:`SandboxedTemplate`), "prompt"
    (messages) or "conversations" (a list of lists of messages). A reply is a JSON list of a state and a result or
    reason. A first reply is sent before any request, once the libraries are imported.
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
    if isinstance(error, AnswerChanges):
        return "renders an answer differently when further messages follow, or omits it"
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
        #: Variables of the template; transformers always passes tools and documents, None if there are none.
        self.variables: dict[str, Any] = {"tools": None, "documents": None, **tokens}

    def compile(self) -> None:
        """Compile the template as transformers does, but with a fixed date and without random functions."""
        from transformers.utils.chat_template_utils import _alias_reasoning_fields, _compile_jinja_template

        self.compiled = _compile_jinja_template(self.source)
        self.with_aliases: Callable[[Any], Sequence[Message]] = _alias_reasoning_fields
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

    def render(self, conversations: Sequence[Sequence[Message]]) -> list[RenderedText | str]:
        """Return every rendered conversation, or the reason why it cannot be rendered; raises :class:`Refused`."""
        found: list[RenderedText | str] = []
        size = 0
        for messages in conversations:
            try:
                rendered = self.conversation(messages)
                size += len(rendered.text.encode())
            except (Refused, MemoryError):
                raise
            except Exception as error:  # Raised by the template's own code.
                found.append(reason_of(error))
                continue
            check_size(size)
            found.append(rendered)
        return found

    def conversation(self, messages: Sequence[Message]) -> RenderedText:
        """Render a conversation that ends with an answer."""
        self.asked_for_date = False
        messages = self.with_aliases(messages)
        text = self.text(messages, prompt=False)
        spans = list[int]()
        for place, message in enumerate(messages):
            if message["role"] != self.answers:
                continue
            before = self.text(messages[:place], prompt=True) if place else ""
            after = text if place + 1 == len(messages) else self.text(messages[: place + 1], prompt=False)
            if not (text.startswith(after) and after.startswith(before)) or len(after) == len(before):
                raise AnswerChanges
            spans += [len(before), len(after)]
        refuse_addresses(text, messages)
        return RenderedText(text, spans, self.asked_for_date)

    def text(self, messages: Sequence[Message], *, prompt: bool) -> str:
        return str(self.compiled.render(messages=messages, add_generation_prompt=prompt, **self.variables))


def check_size(text: int) -> None:
    if text > MOST_TEXT:
        raise Refused(f"made more than {MOST_TEXT >> 20} MiB of text")


def refuse_chance(name: str, *_: object, **__: object) -> NoReturn:
    raise Refused(f"uses {name}, which gives a different result in every run")


def refuse_addresses(text: str, messages: Sequence[Message]) -> None:
    """Raise :class:`Refused` for text such as "<generator object at 0x7f…>" that no message contains."""
    if printed := ADDRESS.findall(text):
        given = {found for message in messages for value in message.values() for found in ADDRESS.findall(value)}
        if not given.issuperset(printed):
            raise Refused("prints the address of an object, which differs in every run")
