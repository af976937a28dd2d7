"""Workers end with the process that started them.

Else they outlive it when it is killed and go on working, and writing, beside the next attempt: those of torch elastic
because they know nothing of it, those of a process pool because each holds an end of the pipe that they wait at.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

#: From <linux/prctl.h>: the signal that the kernel sends when the parent dies.
PR_SET_PDEATHSIG = 1


def end_with_agent() -> None:
    """:func:`end_with_parent` for a worker of torch elastic; a process that was started otherwise is left alone."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent goes. Linux only; elsewhere nothing is done.

    ``parent`` is the process that is expected to be the parent (default: the one that is). If it is gone already, this
    process ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)
