"""Process that compiles and renders chat templates under limits, as untrusted code may hang or exhaust memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from slipstream.distributed.child_processes import no_main_module
from slipstream.distributed.pool import FOR_LIBRARIES, variables_for_children
from slipstream.errors import UserError
from slipstream.language.template_worker import FAILED, MEMORY, MOST_TEXT, STOPPED, Message, Rendered, serve

#: Limit for one conversation, and for a batch before its conversations are tried one by one.
SECONDS = 10.0
#: Limit for starting the interpreter and its libraries, which may be on a slow disk.
SECONDS_TO_START = 300.0
#: JSON writes some characters in six bytes.
LONGEST_REPLY = 8 * MOST_TEXT
EXPECTED = (
    f"expected at most {SECONDS:.0f} s, {MEMORY >> 20} MiB of memory and {MOST_TEXT >> 20} MiB of text for one "
    "conversation, and the same text in every run"
)


class TemplateFailed(Exception):
    """Error of the template itself on this input."""


class TemplateStopped(UserError):
    """Template exceeded a limit or used forbidden features, at a row (``file`` and ``line``) or before any.

    Exceeding a limit may depend on the machine, so this ends the work and never skips the row.
    """

    def __init__(self, reason: str, tokenizer: str = "", file: str = "", line: int = 0) -> None:
        self.reason, self.tokenizer, self.file, self.line = reason, tokenizer, file, line
        where = f"{file}, line {line}: the chat template of data.tokenizer {tokenizer!r}"
        what = f"{where if file else 'data.tokenizer: its chat template'} {reason}; {EXPECTED}"
        super().__init__(f"{what}; correct the template or remove the row" if file else f"{what}; choose another one")

    def __reduce__(self) -> tuple[type[UserError], tuple[Any, ...]]:
        return (type(self), (self.reason, self.tokenizer, self.file, self.line))


class TemplateProcess:
    """Process for one thread's templates, started on first use and after it was killed."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Connection | None = None
        self._template: dict[str, object] | None = None

    def compile(self, template: Mapping[str, object]) -> None:
        """Compile a template, given as arguments of the worker's ``Template``, unless it was the last one.

        Raises :class:`TemplateFailed` and :class:`TemplateStopped`.
        """
        if self._process is not None and self._process.is_alive() and self._template == template:
            return
        self._template = None
        self._ask({"template": template})
        self._template = dict(template)

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the prompt text for messages that a model is to answer; raises as :meth:`compile`."""
        return str(self._ask({"prompt": messages}))

    def render(self, conversations: Sequence[Sequence[Message]]) -> Iterator[Rendered | str]:
        """Yield every conversation rendered, or the reason why it cannot be, with the last compiled template.

        They are sent as one batch. If that exceeds a limit, they are tried one by one, and :class:`TemplateStopped` is
        raised at the conversation that exceeds it.
        """
        template = self._template
        assert template is not None
        try:
            found = self._ask({"conversations": conversations})
        except TemplateStopped:
            for messages in conversations:
                self.compile(template)
                yield from map(rendered_of, self._ask({"conversations": [messages]}))
        else:
            yield from map(rendered_of, found)

    def stop(self) -> None:
        """Kill the process."""
        process, connection = self._process, self._connection
        self._process = self._connection = self._template = None
        if process is not None and connection is not None:
            process.kill()
            process.join()
            connection.close()

    def _ask(self, request: Mapping[str, object]) -> Any:
        if self._process is None or not self._process.is_alive():
            self._start()
        assert self._connection is not None
        with suppress(ConnectionError):  # An ended process is detected by its missing reply.
            self._connection.send_bytes(json.dumps(request).encode())
        return self._receive(SECONDS)

    def _start(self) -> None:
        self.stop()
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, os.getpid()), daemon=True, name="chat template")
        with no_main_module(), variables_for_children(FOR_LIBRARIES):
            self._process.start()
        theirs.close()
        try:
            self._receive(SECONDS_TO_START)
        except TemplateFailed as error:
            self.stop()
            raise UserError(
                f"data.tokenizer: a chat template needs the library transformers, whose import {error}; expected its "
                "version of constraints.txt; pip install 'slipstream[text]'"
            ) from None

    def _receive(self, seconds: float) -> Any:
        """Return the next reply's result; kill the process unless it can continue."""
        try:
            state, found = self._reply(seconds)
            if state == STOPPED:
                raise TemplateStopped(found)
        except BaseException:  # After an interrupt, too, a later request must not get this reply.
            self.stop()
            raise
        if state == FAILED:
            raise TemplateFailed(found)
        return found

    def _reply(self, seconds: float) -> tuple[str, Any]:
        connection, process = self._connection, self._process
        assert connection is not None
        try:
            if not connection.poll(seconds):
                raise TemplateStopped(f"needed more than {seconds:.0f} s")
            state, found = json.loads(connection.recv_bytes(LONGEST_REPLY))
        except (EOFError, OSError):
            process.join(1)
            raise TemplateStopped(f"ended its process (exit code {process.exitcode})") from None
        return state, found


def rendered_of(found: list[Any] | str) -> Rendered | str:
    return found if isinstance(found, str) else Rendered(*found)


class _OfThread(threading.local):
    """Template process per thread.

    Linux ends a child with the thread that started it, and threads must not take each other's replies.
    """

    def __init__(self) -> None:
        self.process = TemplateProcess()


_of_thread = _OfThread()


def template_process() -> TemplateProcess:
    """Return the process of this thread."""
    return _of_thread.process
