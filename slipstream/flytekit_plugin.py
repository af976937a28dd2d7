"""Plugin of flytekit: the type of settings for clients, and a quiet end of pods.

flytekit, when imported, imports this module, as declared in ``pyproject.toml``. So clients know the type of settings
without a workflow: ``pyflyte run remote-launchplan``, or ``FlyteRemote``.

flytekit opens sessions of s3fs, gcsfs and adlfs, which nothing closes. As a pod ends, aiohttp complains of each in two
lines that Flyte shows as the reason of a failure. This includes the process that unpacks registered code, which loads
nothing else of this project.
"""

from __future__ import annotations

import atexit
import importlib
import logging
import os

#: Loggers to which the event loops of flytekit, and those of fsspec, pass aiohttp's complaints.
LOGGERS = ("flytekit", "asyncio")


def ignore_open_sessions() -> None:
    """Ignore aiohttp's complaints from now on: the process ends, and the kernel closes its connections."""
    for name in LOGGERS:
        logging.getLogger(name).addFilter(lambda record: "Unclosed c" not in record.getMessage())


if "SLIPSTREAM_STAGE" in os.environ:  # set for the pods of this project's tasks
    atexit.register(ignore_open_sessions)
else:
    importlib.import_module("slipstream.flyte")
