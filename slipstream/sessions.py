"""HTTP sessions that a library leaves open are closed when the process ends.

flytekit opens those of s3fs, gcsfs and adlfs in an event loop of its own, where nothing closes them. At the end of a
pod aiohttp then says "Unclosed client session", in two lines that Flyte shows as the reason of a failure. flytekit
imports this module wherever it is itself imported, as ``pyproject.toml`` announces it as a plugin: also in the process
that unpacks registered code and then starts the task's, in which nothing else of this project is loaded.
"""

from __future__ import annotations

import atexit
import gc
import sys
import threading
from typing import Any

#: For how long one event loop may be busy.
PATIENCE_S = 1.0


def close_sessions() -> None:
    """Close the open sessions of aiohttp in this process, whose event loops run in other threads or have ended."""
    aiohttp = sys.modules.get("aiohttp")
    if aiohttp is None:
        return
    for session in [each for each in gc.get_objects() if type(each) is aiohttp.ClientSession]:
        if not session.closed:
            close(session)


def close(session: Any) -> None:
    """Not by its own coroutine: flytekit's loop has been told to end by now, and does no more than what is waiting in
    it already."""
    closed = threading.Event()

    def close_connections() -> None:
        session.connector._close()
        closed.set()

    try:
        session._loop.call_soon_threadsafe(close_connections)
    except RuntimeError:  # the loop is closed
        close_connections()
    if not closed.wait(PATIENCE_S):  # it is not running
        close_connections()


atexit.register(close_sessions)
