"""Error messages with the cause in the first line of ``error.pb`` and in the last line of the pod's log.

Flyte's console shows the start of ``error.pb`` and the end of the log. flytekit puts stack frames first, and its log
continues after them.
"""

from __future__ import annotations

import atexit
import re
from typing import TYPE_CHECKING

from flytekit.core.type_engine import TypeTransformerFailedError
from flytekit.exceptions.base import FlyteException
from flytekit.exceptions.user import FlyteUserRuntimeException
from flytekit.models.core.execution import WorkflowExecutionPhase

from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.one_line import one_line

if TYPE_CHECKING:
    from flytekit.remote import FlyteWorkflowExecution

FRAMES = "Traceback (most recent call last)"
#: Start of flytekit's text, after the line of the cause.
TRACE = "\n\nTrace:\n"
#: Prefix that propeller adds to the error message of a task's last attempt.
LAST_ATTEMPT = re.compile(r"^\[\d+/\d+\] currentAttempt done\. Last Error: \w+::")


def message_of(error: Exception, text: str) -> str:
    """Return the text for ``error.pb``: the cause, then flytekit's ``text`` about it; log the cause at exit."""
    line = error_line(error.value if isinstance(error, FlyteUserRuntimeException) else error)
    atexit.unregister(print_last_line)
    atexit.register(print_last_line, line)
    return f"{line}\n\n{text}"


def error_line(error: BaseException) -> str:
    """Return the error as one line; if it quotes a worker's traceback, return the worker's error.

    For an input that settings refuse, flytekit's text starts with the literal; the refusal is returned.
    """
    if isinstance(error, TypeTransformerFailedError) and isinstance(error.__context__, UserError):
        error = error.__context__
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


def cause_of(execution: FlyteWorkflowExecution) -> str:
    """Return why the execution failed; "" if it did not fail, or if no task of this project gave a reason."""
    error = execution.closure.error
    if execution.closure.phase != WorkflowExecutionPhase.FAILED or error is None:
        return ""
    line, trace, _ = error.message.partition(TRACE)
    return LAST_ATTEMPT.sub("", line) if trace else ""
