"""Logger ``slipstream``: one line per message on stderr.

``SLIPSTREAM_LOG`` sets the level (debug, info, warning or error; info by default). Progress and results are not log
messages; they go to stdout.
"""

from __future__ import annotations

import logging
import os
import sys

from slipstream.shared.one_line import one_line

VARIABLE = "SLIPSTREAM_LOG"
LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
ROOT = logging.getLogger("slipstream")


def logger(stage: str) -> logging.Logger:
    """Return the logger of a stage or component, such as "checkpoint", whose name starts each line."""
    if not ROOT.handlers:
        configure_logging(os.environ.get(VARIABLE, "info"))
    return ROOT.getChild(stage)


def configure_logging(level: str) -> None:
    """Send messages from ``level`` on to stderr. An unknown level causes a warning, and info is used."""
    handler = StderrHandler()
    handler.setFormatter(LineFormatter())
    ROOT.handlers = [handler]
    # Flyte attaches a handler to the root logger, which would write every line a second time.
    ROOT.propagate = False
    ROOT.setLevel(LEVELS.get(level.lower(), logging.INFO))
    if level.lower() not in LEVELS:
        ROOT.getChild("logs").warning("%s=%s: expected %s; using info", VARIABLE, level, ", ".join(LEVELS))


class StderrHandler(logging.Handler):
    """Handler that looks up ``sys.stderr`` for every message, since pods and tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        print(self.format(record), file=sys.stderr, flush=True)


class LineFormatter(logging.Formatter):
    """Formatter of lines such as ``train resumes …``; from warnings on, the level precedes the message."""

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{record.name.rpartition('.')[2]:<12} {level}{super().format(record)}"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return one_line(super().formatMessage(record))
