"""The progress of training, for whoever looks on: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from slipstream.artifacts.results.training import ValidationPoint
from slipstream.telemetry.records import DeviceReading, Sample
from slipstream.telemetry.ring import SILENT_S, latest
from slipstream.telemetry.series import cpu_use, share

SECONDS_BETWEEN_LINES = 5.0
#: Seconds after which the figures of the bar are renewed.
REFRESH_S = 1.0
#: Without a GPU the processors' use is that between so many samples.
SAMPLES = 6


class ProgressDisplay:
    """Shows the progress of training; it measures nothing that training uses."""

    def __init__(
        self, total: int, done: int, consumed: Callable[[int], int], *, shown: bool, sampled: Path | None = None
    ) -> None:
        """``consumed`` are the rows that all ranks have trained on after a step; ``sampled`` is where a sampler keeps
        what this pod does, None without one."""
        self._total, self._consumed, self._sampled = total, consumed, sampled
        self._lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", disable=not shown or self._lines, leave=False
        )
        self._validation = ""
        #: When figures were shown last, and the rows by then.
        self._shown_at, self._rows = time.monotonic(), consumed(done)

    def step(self, done: int) -> None:
        self._bar.update(done - self._bar.n)
        if not self._bar.disable and time.monotonic() - self._shown_at >= REFRESH_S:
            self._bar.set_postfix_str("  ".join(filter(None, (self._validation, *self._live(done)))))

    def evaluated(self, done: int, evaluation: ValidationPoint) -> None:
        figures = f"loss {evaluation.loss:.4f}"
        for name, value in (("accuracy", evaluation.accuracy), ("rmse", evaluation.rmse)):
            if value is not None:
                figures += f"  {name} {value:.4f}"
        self._validation = figures
        if not self._bar.disable:
            self._bar.set_postfix_str(figures)
        if self._lines and (time.monotonic() - self._shown_at > SECONDS_BETWEEN_LINES or done == self._total):
            where = f"step {done}/{self._total}  epoch {evaluation.epoch:.1f}"
            print("  ".join([f"train        {where}  validation {figures}", *self._live(done)]), flush=True)

    def _live(self, done: int) -> list[str]:
        """Rows a second since the last time, evaluations and saves included, and what the devices do."""
        now, rows = time.monotonic(), self._consumed(done)
        passed, more = now - self._shown_at, rows - self._rows
        self._shown_at, self._rows = now, rows
        pace = [f"{more / passed:,.0f} rows/s"] if passed > 0 else []
        return pace + (devices_of(self._sampled) if self._sampled else [])

    def close(self) -> None:
        self._bar.close()


def devices_of(sampled: Path) -> list[str]:
    """Utilisation and memory of this pod's devices, of its processors without any; nothing where the sampler has
    ended."""
    try:
        samples = latest(sampled, SAMPLES)
        if not samples or time.time() - samples[-1].at > SILENT_S:
            return []
        devices = [device for device in samples[-1].devices if device.up]
        return of_gpus(devices) if samples[-1].devices else of_host(samples)
    except Exception:  # whatever was read, it is for looking at: no training ends of it
        return []


def of_gpus(devices: Sequence[DeviceReading]) -> list[str]:
    busy = [device.busy for device in devices]
    memory = [share(device.memory_used_bytes, device.memory_limit_bytes) for device in devices]
    return described(busy, memory)


def of_host(samples: Sequence[Sample]) -> list[str]:
    host = samples[-1].host
    return described([cpu_use(samples[0], samples[-1])], [share(host.memory_used_bytes, host.memory_limit_bytes)])


def described(busy: Sequence[float | None], memory: Sequence[float | None]) -> list[str]:
    """Of several devices the least and the most; nothing of what none of them tells."""
    figures = []
    for name, values in (("utilisation", busy), ("memory", memory)):
        known = sorted(round(100 * value) for value in values if value is not None)
        if known:
            least = "" if known[0] == known[-1] else f"{known[0]}-"
            figures.append(f"{name} {least}{known[-1]} %")
    return figures
