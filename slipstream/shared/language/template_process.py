"""Process that compiles and renders chat templates under limits, since untrusted code may hang or exhaust memory."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from slipstream.shared.distributed.limited_process import SpawnedChild
from slipstream.shared.distributed.pool import FOR_LIBRARIES
from slipstream.shared.errors import UserError
from slipstream.shared.language.template_worker import (
    FAILED,
    MEMORY,
    MOST_TEXT,
    STOPPED,
    Message,
    RenderedText,
    TemplateInput,
    serve_templates,
)

#: Limit in seconds for a batch of conversations and, if the batch exceeds it, for every single conversation.
SECONDS = 10.0
#: Limit in seconds for starting the interpreter and importing libraries, possibly from a slow disk.
SECONDS_TO_START = 300.0
#: Largest reply in bytes; JSON writes some characters in six bytes.
LONGEST_REPLY = 8 * MOST_TEXT
EXPECTED = (
    f"expected at most {SECONDS:.0f} s, {MEMORY >> 20} MiB of memory and {MOST_TEXT >> 20} MiB of text for one "
    "conversation, and the same text in every run"
)


class TemplateFailed(Exception):
    """Error raised by a template's own code for some input."""


class TemplateStopped(UserError):
    """Error for a template that exceeded a limit or used a forbidden feature.

    ``file`` and ``line`` locate the row, if any. Limits may depend on the machine, so this error ends the work instead
    of skipping the row.
    """

    def __init__(self, reason: str, tokenizer: str = "", file: str = "", line: int = 0) -> None:
        self.reason, self.tokenizer, self.file, self.line = reason, tokenizer, file, line
        where = f"{file}, line {line}: the chat template of data.tokenizer {tokenizer!r}"
        what = f"{where if file else 'data.tokenizer: its chat template'} {reason}; {EXPECTED}"
        super().__init__(f"{what}; correct the template or remove the row" if file else f"{what}; choose another one")

    def __reduce__(self) -> tuple[type[UserError], tuple[Any, ...]]:
        return (type(self), (self.reason, self.tokenizer, self.file, self.line))


class TemplateProcess:
    """Process for the templates of one thread; started on first use, and again after it was killed."""

    def __init__(self) -> None:
        self._child: SpawnedChild | None = None
        self._template: dict[str, object] | None = None

    def compile(self, template: Mapping[str, object]) -> None:
        """Compile a template, unless it is the last template that the process compiled.

        ``template`` holds the arguments of the worker's ``SandboxedTemplate``. Raises :class:`TemplateFailed` and
        :class:`TemplateStopped`.
        """
        if self._child and self._child.process.is_alive() and self._template == template:
            return
        self._template = None
        self._ask({"template": template})
        self._template = dict(template)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt for a model that is to answer ``messages``; raises as :meth:`compile`."""
        return str(self._ask({"prompt": messages}))

    def render(self, conversations: Sequence[TemplateInput]) -> Iterator[RenderedText | str]:
        """Yield every conversation rendered by the last compiled template, or the reason why it cannot be rendered.

        Conversations are sent as one batch. If the batch exceeds a limit, they are rendered one by one, and
        :class:`TemplateStopped` is raised at the conversation that exceeds it.
        """
        template = self._template
        assert template is not None
        try:
            found = self._ask({"conversations": conversations})
        except TemplateStopped:
            for conversation in conversations:
                self.compile(template)
                yield from map(rendered_of, self._ask({"conversations": [conversation]}))
        else:
            yield from map(rendered_of, found)

    def stop(self) -> None:
        child, self._child, self._template = self._child, None, None
        if child:
            child.kill()

    def _ask(self, request: Mapping[str, object]) -> Any:
        child = self._child if self._child and self._child.process.is_alive() else self._start()
        with suppress(ConnectionError):  # An ended process is detected by its missing reply.
            child.connection.send_bytes(json.dumps(request).encode())
        return self._receive(child, SECONDS)

    def _start(self) -> SpawnedChild:
        self.stop()
        self._child = child = SpawnedChild(serve_templates, os.getpid(), variables=FOR_LIBRARIES)
        try:
            self._receive(child, SECONDS_TO_START)
        except TemplateFailed as error:
            self.stop()
            raise UserError(
                f"data.tokenizer: a chat template needs the library transformers, whose import {error}; expected its "
                "version of constraints.txt; pip install -e '.[text]'"
            ) from None
        return child

    def _receive(self, child: SpawnedChild, seconds: float) -> Any:
        """Return the result of the next reply; kill the process if the reply is unusable."""
        try:
            state, found = next_reply(child, seconds)
            if state == STOPPED:
                raise TemplateStopped(found)
        except BaseException:  # After an interrupt, too, a later request must not get this reply.
            self.stop()
            raise
        if state == FAILED:
            raise TemplateFailed(found)
        return found


def next_reply(child: SpawnedChild, seconds: float) -> tuple[str, Any]:
    try:
        if not child.connection.poll(seconds):
            raise TemplateStopped(f"needed more than {seconds:.0f} s")
        state, found = json.loads(child.connection.recv_bytes(LONGEST_REPLY))
    except (EOFError, OSError):
        child.process.join(1)
        raise TemplateStopped(f"ended its process (exit code {child.process.exitcode})") from None
    return state, found


def rendered_of(found: list[Any] | str) -> RenderedText | str:
    return found if isinstance(found, str) else RenderedText(*found)


class ThreadTemplates(threading.local):
    """Holder of one template process per thread.

    Linux kills a child when the thread that started it ends, and threads must not receive each other's replies.
    """

    def __init__(self) -> None:
        self.process = TemplateProcess()


_of_thread = ThreadTemplates()


def template_process() -> TemplateProcess:
    return _of_thread.process
