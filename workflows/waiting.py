"""Patch of ``pyflyte run --remote --wait``: one line about a failed execution instead of a traceback."""

from __future__ import annotations

import re
from typing import Any

from flytekit.clis.sdk_in_container import run
from flytekit.models.core.execution import WorkflowExecutionPhase
from flytekit.remote import FlyteRemote, FlyteWorkflowExecution

from slipstream.errors import UserError

#: Prefix that propeller adds to the error message of a task's last attempt.
LAST_ATTEMPT = re.compile(r"^\[\d+/\d+\] currentAttempt done\. Last Error: \w+::")
#: Separator after the first line of messages by ``slipstream/flyte/last_line.py``.
TRACE = "\n\nTrace:\n"

flytekits_run = run.run_remote


def run_remote(remote: FlyteRemote, *what: Any, **how: Any) -> None:
    """Run flytekit's ``run_remote``, but raise ``UserError`` if the awaited execution failed.

    With ``-v`` flytekit prints the traceback instead.
    """
    wait, (*_, options) = remote.wait, what

    def wait_for(execution: FlyteWorkflowExecution, *arguments: Any, **named: Any) -> FlyteWorkflowExecution:
        ended = wait(execution, *arguments, **named)
        why = cause_of(ended)
        if why and not options.verbose:
            raise UserError(f"execution {ended.id.name} failed: {why}")
        return ended

    remote.wait = wait_for
    flytekits_run(remote, *what, **how)


def cause_of(execution: FlyteWorkflowExecution) -> str:
    """Return why the execution failed; "" if it did not fail, or if no task of this project gave a reason."""
    error = execution.closure.error
    if execution.closure.phase != WorkflowExecutionPhase.FAILED or error is None:
        return ""
    line, trace, _ = error.message.partition(TRACE)
    return LAST_ATTEMPT.sub("", line) if trace else ""


def one_line_of_a_failure() -> None:
    run.run_remote = run_remote
