"""Plugin of flytekit: the type of settings for clients, and the end of open HTTP sessions in pods.

flytekit, when imported, imports this module, as declared in ``pyproject.toml``. So clients know the type of settings
without a workflow: ``pyflyte run remote-launchplan``, or ``FlyteRemote``.

flytekit opens sessions of s3fs, gcsfs and adlfs in its own event loop, where nothing closes them. As a pod ends,
aiohttp then prints "Unclosed client session", in two lines that Flyte shows as the reason of a failure. This includes
the process that unpacks registered code and starts the task's, and that loads nothing else of this project.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import sys
import threading
from typing import Any

#: Seconds to wait for a busy event loop.
PATIENCE_S = 1.0


def close_sessions() -> None:
    """Close aiohttp's open sessions in this process, whose event loops run in other threads or have ended."""
    aiohttp = sys.modules.get("aiohttp")
    if aiohttp is None:
        return
    for session in [each for each in gc.get_objects() if type(each) is aiohttp.ClientSession]:
        if not session.closed:
            close(session)


def close(session: Any) -> None:
    """Close one session without its own coroutine.

    flytekit's loop is stopping by now, and only runs callbacks that are already scheduled.
    """
    closed = threading.Event()

    def close_connections() -> None:
        session.connector._close()
        closed.set()

    try:
        session._loop.call_soon_threadsafe(close_connections)
    except RuntimeError:  # the loop is closed
        close_connections()
    if not closed.wait(PATIENCE_S):  # the loop is not running
        close_connections()


if "SLIPSTREAM_STAGE" in os.environ:  # set for the pods of this project's tasks
    atexit.register(close_sessions)
else:
    importlib.import_module("slipstream.flyte")
