"""Child processes that start fast and end with their parent.

Otherwise workers survive a killed parent, and write during the next attempt: workers of torch elastic do not detect the
parent's death, and workers of a process pool keep each other's pipes open.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

#: Option of prctl (<linux/prctl.h>) that sets the signal sent to this process when its parent dies.
PR_SET_PDEATHSIG = 1


def end_with_torch_elastic() -> None:
    """Call :func:`end_with_parent` in a worker of torch elastic; do nothing elsewhere."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies; does nothing except on Linux.

    ``parent`` is the expected parent's process id (default: the current parent). If it is already dead, this process
    ends at once.
    """
    if not sys.platform.startswith("linux"):
        return
    expected = os.getppid() if parent is None else parent
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected:
        os.kill(os.getpid(), signal.SIGKILL)


@contextmanager
def no_main_module() -> Iterator[None]:
    """Let child processes start without importing this process's main module.

    They do not need it, and importing a command such as ``pyflyte`` takes seconds.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
