"""The errors that mean something to whoever started the run: mend it, or try again."""

from __future__ import annotations

import click

from slipstream.one_line import one_line


class Agreed(Exception):
    """Also raised by all other ranks of the process group, at the same place: none waits for another one."""


class Interrupted(RuntimeError):
    """Nobody's mistake: the machine went, or a peer did. Another attempt can resume where this one stopped."""


class Preempted(Interrupted):
    """A machine is about to be taken away and the run has stopped cleanly; another attempt can resume it."""


class OutOfMemory(Interrupted):
    """A rank ran out of memory in a step; another attempt resumes with more, and smaller, micro-batches."""

    def __init__(self, message: str, micro_batches: int = 0) -> None:
        super().__init__(message)
        #: With how many it ran out; 0 if that is not known.
        self.micro_batches = micro_batches


class AgreedPreempted(Agreed, Preempted):
    """A preemption of which the ranks told each other."""


class UserError(click.ClickException, ValueError):
    """A mistake in the data, the settings or the environment: one line that says what, where and how to mend it.

    It is a ``click.ClickException`` so that ``pyflyte run`` prints it as one box and exits with 1, and a
    ``ValueError`` so that plain Python callers of an engine may catch it without knowing click.
    """

    def __init__(self, message: str) -> None:
        # Flyte shows the message in a box, and pods log it: line breaks would tear it apart.
        super().__init__(one_line(message))

    def __reduce__(self) -> tuple[type[UserError], tuple[str]]:
        # click's own constructor signature makes the default pickling fail between worker and agent.
        return (type(self), (self.message,))
