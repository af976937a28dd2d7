"""Display of training progress: a bar on a terminal, otherwise a line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tqdm import tqdm

from slipstream.shared.artifacts.results.training import ValidationPoint
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.ring import SILENT_S, latest_samples
from slipstream.shared.telemetry.series import cpu_use, share

SECONDS_BETWEEN_LINES = 5.0
#: Seconds between updates of the bar's figures.
REFRESH_S = 1.0
#: Number of telemetry samples over which CPU utilisation is averaged; it is shown if there is no GPU.
SAMPLES = 6


class ProgressDisplay:
    """Progress bar or progress lines with validation metrics, rows per second and device utilisation."""

    def __init__(
        self, total: int, done: int, consumed: Callable[[int], int], *, shown: bool, sampled: Path | None = None
    ) -> None:
        """Start the display at step ``done`` of ``total``.

        ``consumed`` returns the rows that all ranks have trained on after a step. ``sampled`` is the file of this pod's
        telemetry sampler, None without a sampler.
        """
        self._total, self._consumed, self._sampled = total, consumed, sampled
        self._lines = shown and not sys.stderr.isatty()
        self._bar = tqdm(total=total, initial=done, desc="train", unit="step", disable=not shown or self._lines)
        self._validation = ""
        #: Time of the last update, and the number of rows consumed by then.
        self._shown_at, self._rows = time.monotonic(), consumed(done)

    def step(self, done: int) -> None:
        self._bar.update(done - self._bar.n)
        if not self._bar.disable and time.monotonic() - self._shown_at >= REFRESH_S:
            self._bar.set_postfix_str("  ".join(filter(None, (self._validation, *self._live(done)))))

    def evaluated(self, done: int, evaluation: ValidationPoint) -> None:
        figures = f"validation loss {evaluation.loss:.4f}"
        for name, value in (("accuracy", evaluation.accuracy), ("rmse", evaluation.rmse)):
            if value is not None:
                figures += f"  {name} {value:.4f}"
        self._validation = figures
        if not self._bar.disable:
            self._bar.set_postfix_str(figures)
        if self._lines and (time.monotonic() - self._shown_at > SECONDS_BETWEEN_LINES or done == self._total):
            where = f"step {done}/{self._total}  epoch {evaluation.epoch:.1f}"
            print("  ".join([f"train        {where}  {figures}", *self._live(done)]), flush=True)

    def _live(self, done: int) -> list[str]:
        """Return rows per second since the last call, including evaluations and saves, and the devices' utilisation."""
        now, rows = time.monotonic(), self._consumed(done)
        passed, more = now - self._shown_at, rows - self._rows
        self._shown_at, self._rows = now, rows
        pace = [f"{more / passed:,.0f} rows/s"] if passed > 0 else []
        return pace + (device_texts(self._sampled) if self._sampled else [])

    def close(self) -> None:
        self._bar.close()


def device_texts(sampled: Path) -> list[str]:
    """Return utilisation and memory of this pod's GPUs, or of its CPUs if it has no GPU.

    Returns an empty list if the sampler has ended.
    """
    try:
        samples = latest_samples(sampled, SAMPLES)
        if not samples or time.time() - samples[-1].at > SILENT_S:
            return []
        devices = [device for device in samples[-1].devices if device.up]
        return of_gpus(devices) if samples[-1].devices else of_host(samples)
    except Exception:  # for display only: training must not end because of it
        return []


def of_gpus(devices: Sequence[DeviceReading]) -> list[str]:
    busy = [device.busy for device in devices]
    memory = [share(device.memory_used_bytes, device.memory_limit_bytes) for device in devices]
    return utilisation_texts(busy, memory)


def of_host(samples: Sequence[Sample]) -> list[str]:
    host = samples[-1].host
    return utilisation_texts(
        [cpu_use(samples[0], samples[-1])], [share(host.memory_used_bytes, host.memory_limit_bytes)]
    )


def utilisation_texts(busy: Sequence[float | None], memory: Sequence[float | None]) -> list[str]:
    """Format utilisation and memory, from smallest to largest over all devices; skip unknown values."""
    figures = []
    for name, values in (("utilisation", busy), ("memory", memory)):
        known = sorted(round(100 * value) for value in values if value is not None)
        if known:
            least = "" if known[0] == known[-1] else f"{known[0]}-"
            figures.append(f"{name} {least}{known[-1]} %")
    return figures
