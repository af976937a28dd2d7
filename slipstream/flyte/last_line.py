"""Error messages with the cause in the first line of ``error.pb`` and in the last line of the pod's log.

Flyte's console shows the start of ``error.pb`` and the end of the log. flytekit puts stack frames first, and its log
continues after them.
"""

from __future__ import annotations

import atexit

from flytekit.bin import entrypoint
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteUserRuntimeException

from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.one_line import one_line

FRAMES = "Traceback (most recent call last)"

flytekits_message = entrypoint.get_traceback_str


def message_of(error: Exception) -> str:
    """Return the text for ``error.pb``, the cause followed by flytekit's traceback; log the cause at exit.

    flytekit calls this when a task has failed.
    """
    line = error_line(error.value if isinstance(error, FlyteUserRuntimeException) else error)
    atexit.unregister(print_last_line)
    atexit.register(print_last_line, line)
    return f"{line}\n\n{flytekits_message(error)}"


def error_line(error: BaseException) -> str:
    """Return the error as one line; if it quotes a worker's traceback, return the worker's error."""
    text = str(error.args[0] if isinstance(error, FlyteException) and error.args else error)
    if FRAMES in text:
        return one_line(raised_last(text))
    line = one_line(text.strip().partition("\n")[0])
    if isinstance(error, (UserError, FlyteException)):  # their messages need no class name
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def raised_last(text: str) -> str:
    """Return the exception line of the last traceback in a text, which torch may have indented."""
    below = [line for line in text.rpartition(FRAMES)[2].splitlines()[1:] if line.strip()]
    indents = [len(line) - len(line.lstrip()) for line in below]
    return next((line for line, indent in zip(below, indents, strict=True) if indent < indents[0]), text)


def print_last_line(line: str) -> None:
    logger("flyte").error("%s", line)


def cause_first() -> None:
    """Patch flytekit to use :func:`message_of` in pods."""
    entrypoint.get_traceback_str = message_of
