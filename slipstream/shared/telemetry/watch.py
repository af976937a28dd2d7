"""Start and end of a pod's sampler process, and the push of the attempt's totals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO

import slipstream
from slipstream.shared.logs import logger
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.push import VARIABLE, push_totals

#: Name of the directory of samples, which has a subdirectory per stage.
SAMPLES = "telemetry"
#: Maximum seconds for the sampler to end after SIGTERM, and for everything at the end of an attempt.
SAMPLER_S, END_S = 1.0, 2.0
NO_PRICES: Mapping[str, float] = {}
log = logger("telemetry")


@contextmanager
def telemetry_sampled(
    directory: Path,
    labels: MetricLabels,
    prices: Mapping[str, float] = NO_PRICES,
    after_s: float = 0.0,
    began_at: float | None = None,
) -> Iterator[None]:
    """Sample this pod into ``directory`` while the body runs.

    Sampling starts after ``after_s`` seconds, so that shorter work starts no process. ``prices`` are the node's dollars
    per hour, by price name; they count from ``began_at``, in seconds since 1970 (default: the first sample). Errors
    never reach the body, and at most two seconds are added to it.
    """
    samplers, ended, turn = list[subprocess.Popen[bytes] | None](), threading.Event(), threading.Lock()

    def begin() -> None:
        ended.wait(after_s)
        with turn:
            if not ended.is_set():
                samplers.append(start_sampler(directory, labels, prices, began_at))

    if after_s:
        threading.Thread(target=begin, name="sampler", daemon=True).start()
    else:
        begin()
    try:
        yield
    finally:
        until = time.monotonic() + END_S
        with turn:
            ended.set()
        for sampler in filter(None, samplers):
            stop_sampler(sampler)
        if os.environ.get(VARIABLE):
            push_totals(os.environ[VARIABLE], directory, labels, until - time.monotonic())


def start_sampler(
    directory: Path, labels: MetricLabels, prices: Mapping[str, float], began_at: float | None = None
) -> subprocess.Popen[bytes] | None:
    """Start the sampler; log a warning and return None on failure.

    It inherits no open file: a sampler blocked in the kernel would keep this process's output open after its end.
    """
    named = [f"--{name}={value}" for name, value in asdict(labels).items()]
    priced = [f"--price={name}={dollars!r}" for name, dollars in prices.items()]
    command = [sys.executable, "-P", "-m", "slipstream.shared.telemetry.sampler", f"--parent={os.getpid()}"]
    began = [f"--began-at={began_at!r}"] if began_at is not None else []
    try:
        sampler = subprocess.Popen(
            [*command, *named, *priced, *began, "--", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search_path()},
        )
    except (OSError, ValueError) as error:
        log.warning("the sampler cannot be started, and the work continues without samples: %s", error)
        return None
    threading.Thread(target=relay_messages, args=(sampler.stderr,), name="sampler", daemon=True).start()
    return sampler


def relay_messages(lines: IO[bytes]) -> None:
    """Copy the sampler's messages to stderr."""
    for line in lines:
        sys.stderr.write(line.decode(errors="replace"))


def search_path() -> str:
    """Return a PYTHONPATH that contains this package, however it was imported here."""
    root = str(Path(slipstream.__file__).parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def stop_sampler(sampler: subprocess.Popen[bytes]) -> None:
    """Stop the sampler; kill it after a timeout.

    A sampler blocked in the kernel is not waited for; it ends when the driver call returns.
    """
    sampler.terminate()
    try:
        code = sampler.wait(SAMPLER_S)
    except subprocess.TimeoutExpired:
        sampler.kill()
        return
    if code not in (0, -signal.SIGTERM):  # -SIGTERM: ended before its handler was installed
        log.warning("the sampler ended early, with %s: later samples are missing", code)
