"""Sampler process, one per pod: samples devices and host every second and serves metrics.

    python -m slipstream.shared.telemetry.sampler DIRECTORY --execution … --task … --attempt … --node … --parent PID

The agent starts it (:mod:`slipstream.shared.telemetry.watch`). It ends on SIGTERM, or when its parent is gone. It loads
neither torch nor NumPy, to use only 5 ms of CPU a second and 40 MB.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from slipstream.shared.logs import logger
from slipstream.shared.telemetry.metrics import MetricLabels, metrics_exposition
from slipstream.shared.telemetry.sampler.sampling import Sampler
from slipstream.shared.telemetry.sampler.server import VARIABLE, serve_metrics
from slipstream.shared.telemetry.totals import read_totals

INTERVAL_S = 1.0
log = logger("telemetry")


def main(arguments: Sequence[str] | None = None) -> None:
    given = parsed(arguments)
    ended = end_of_process()
    labels = MetricLabels(given.execution, given.task, given.attempt, given.node)
    try:
        sampler = Sampler(given.directory, given.parent, dict(given.price), given.began_at)
    except OSError as error:
        log.warning("the sampler failed and takes no samples: %s: %s", given.directory, error.strerror)
        return

    def text() -> str:
        state = sampler.state
        return metrics_exposition(state.sample, state.node, read_totals(given.directory), labels)

    if os.environ.get(VARIABLE):
        serve_metrics(os.environ[VARIABLE], text)
    at = time.monotonic()
    while os.getppid() == given.parent:
        sampler.sample()
        at = max(at + INTERVAL_S, time.monotonic())
        if select.select([ended], [], [], max(0.0, at - time.monotonic()))[0]:
            sampler.sample()  # include usage up to the end
            break


def end_of_process() -> int:
    """Return a file descriptor that becomes readable on SIGTERM.

    SIGINT is ignored, because on Ctrl-C the agent ends this process.
    """
    ended, end = os.pipe()
    os.set_blocking(end, False)
    signal.set_wakeup_fd(end)
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return ended


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m slipstream.shared.telemetry.sampler")
    parser.add_argument("directory", type=Path)
    for name in ("execution", "task", "node"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True, help="process id with whose end the sampler ends")
    parser.add_argument("--began-at", type=float, default=time.time(), help="start of the paid time, since 1970")
    parser.add_argument("--price", type=price, action="append", default=[], metavar="NAME=DOLLARS_PER_HOUR")
    return parser.parse_args(arguments)


def price(text: str) -> tuple[str, float]:
    name, _, dollars = text.rpartition("=")
    return name, float(dollars)


if __name__ == "__main__":
    main(sys.argv[1:])
