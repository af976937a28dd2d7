"""Watching a pod while it works: starts the sampler beside the agent, ends it, and pushes the attempt's totals."""

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
from slipstream.logs import logger
from slipstream.telemetry.metrics import Labels
from slipstream.telemetry.push import VARIABLE, push

#: The directory of all samples, each stage's in one of its own.
SAMPLES = "telemetry"
#: Seconds that the agent waits for the sampler after SIGTERM, and for all that ends an attempt.
SAMPLER_S, END_S = 1.0, 2.0
NO_PRICES: Mapping[str, float] = {}
log = logger("telemetry")


@contextmanager
def watching(
    directory: Path, labels: Labels, prices: Mapping[str, float] = NO_PRICES, after_s: float = 0.0
) -> Iterator[None]:
    """Keep samples of this pod in ``directory`` while the body works, from ``after_s`` seconds on: what is over by then
    starts no process. ``prices`` are dollars per hour of this node, by name. Nothing here fails the body, and it adds
    at most two seconds to it."""
    samplers, ended, turn = list[subprocess.Popen[bytes] | None](), threading.Event(), threading.Lock()

    def begin() -> None:
        ended.wait(after_s)
        with turn:
            if not ended.is_set():
                samplers.append(start(directory, labels, prices))

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
            stop(sampler)
        if os.environ.get(VARIABLE):
            push(os.environ[VARIABLE], directory, labels, until - time.monotonic())


def start(directory: Path, labels: Labels, prices: Mapping[str, float]) -> subprocess.Popen[bytes] | None:
    """The sampler; None, and a warning, if it cannot be started. It shares no open file with this process: while a
    driver holds it in the kernel, whoever reads this process's output to its end would wait for it."""
    named = [f"--{name}={value}" for name, value in asdict(labels).items()]
    priced = [f"--price={name}={dollars!r}" for name, dollars in prices.items()]
    command = [sys.executable, "-P", "-m", "slipstream.telemetry.sampler", f"--parent={os.getpid()}"]
    try:
        sampler = subprocess.Popen(
            [*command, *named, *priced, "--", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": search_path()},
        )
    except (OSError, ValueError) as error:
        log.warning("the sampler cannot be started, and the work goes on without: %s", error)
        return None
    threading.Thread(target=relay, args=(sampler.stderr,), name="sampler", daemon=True).start()
    return sampler


def relay(lines: IO[bytes]) -> None:
    """Say what the sampler says."""
    for line in lines:
        sys.stderr.write(line.decode(errors="replace"))


def search_path() -> str:
    """Where the sampler finds this package, however this process did."""
    root = str(Path(slipstream.__file__).parents[1])
    return os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))


def stop(sampler: subprocess.Popen[bytes]) -> None:
    """End the sampler, at once if it does not end by itself in time. One that a driver holds in the kernel ends when
    that lets it go; nobody waits for it."""
    sampler.terminate()
    try:
        code = sampler.wait(SAMPLER_S)
    except subprocess.TimeoutExpired:
        sampler.kill()
        return
    if code not in (0, -signal.SIGTERM):  # the latter before it was ready for it
        log.warning("the sampler ended early, with %s: later samples are missing", code)
