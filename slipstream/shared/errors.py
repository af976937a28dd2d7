"""Errors with a meaning for users: correct an input, or try again."""

from __future__ import annotations

import click

from slipstream.shared.one_line import one_line


class Agreed(Exception):
    """Error that all ranks of the process group raise at the same place, so none waits for another."""


class Interrupted(RuntimeError):
    """Loss of a machine or a peer, without a user error. Another attempt can resume the run."""


class Preempted(Interrupted):
    """Preemption of a machine, after the run stopped cleanly; another attempt can resume it."""


class OutOfMemory(Interrupted):
    """Exhausted memory of a rank in a step; another attempt resumes with more, smaller micro-batches."""

    def __init__(self, message: str, micro_batches: int = 0) -> None:
        super().__init__(message)
        #: Number of micro-batches when memory ran out; 0 if unknown.
        self.micro_batches = micro_batches


class AgreedPreempted(Agreed, Preempted):
    """Preemption that all ranks raise at the same place."""


class UserError(click.ClickException, ValueError):
    """Error in the data, the settings or the environment; one line says what, where and how to fix it.

    It is a ``click.ClickException`` so that ``pyflyte run`` prints it as one box and exits with 1, and a ``ValueError``
    so that Python callers of an engine can catch it without click.
    """

    def __init__(self, message: str) -> None:
        # Flyte shows the message in a box, and pods log it: line breaks would tear it apart.
        super().__init__(one_line(message))

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        # click's constructor signature breaks default pickling between worker and agent.
        return (type(self), (self.message,))


def first_line(error: Exception) -> str:
    """Return the first line of a library's error."""
    return one_line((str(error).strip() or type(error).__name__).partition("\n")[0])
