"""Totals as files, written by the sampler for the node and by every rank.

A directory holds ``node.json``, ``ranks/<rank>.json`` and ``ranks/<rank>.steps``, the number of steps, which a rank
changes in place after each step. Other files are replaced atomically; invalid files and those of other versions are
skipped.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from slipstream.shared.artifacts.records import decode_plain, to_plain_json
from slipstream.shared.telemetry.records import STEP_BOUNDS, RankTotals, Sample, counted_since

NODE = "node.json"
RANKS = "ranks"
HOUR_S = 3600
#: Content of a file of steps.
STEPS = struct.Struct("<q")


@dataclass(frozen=True)
class NodeTotals:
    """Counters of an attempt's usage of this node since the start of its stage, or of its pod."""

    seconds: float = 0.0
    #: Seconds summed over all devices, up or not, since all are paid for.
    gpu_seconds: float = 0.0
    #: Joules by UUID, for devices that count them.
    energy_joules: dict[str, float] = field(default_factory=dict)
    #: Seconds of lower clocks, by UUID and reason.
    throttled_seconds: dict[str, dict[str, float]] = field(default_factory=dict)
    #: Dollars by price name, such as "spot".
    cost_dollars: dict[str, float] = field(default_factory=dict)


class NodeCounter:
    """Counter of node totals; ``prices`` are the node's dollars per hour, by price name."""

    def __init__(self, prices: Mapping[str, float]) -> None:
        self._prices = prices
        self._seconds = self._gpu_seconds = 0.0
        #: Last value of the driver's energy counter, and joules since the first, by UUID.
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}
        self._throttled: dict[str, dict[str, float]] = {}

    def add(self, sample: Sample, seconds: float) -> NodeTotals:
        """Add a sample taken ``seconds`` after the previous one, and return the totals."""
        self._seconds += seconds
        self._gpu_seconds += seconds * len(sample.devices)
        for device in sample.devices:
            if device.energy_joules is not None:
                last = self._last.get(device.uuid, device.energy_joules)
                used = counted_since(last, device.energy_joules)
                self._joules[device.uuid] = self._joules.get(device.uuid, 0.0) + used
                self._last[device.uuid] = device.energy_joules
            for reason in device.throttled:
                reasons = self._throttled.setdefault(device.uuid, {})
                reasons[reason] = reasons.get(reason, 0.0) + seconds
        dollars = {name: self._seconds / HOUR_S * price for name, price in self._prices.items()}
        throttled = {uuid: dict(reasons) for uuid, reasons in self._throttled.items()}
        return NodeTotals(self._seconds, self._gpu_seconds, dict(self._joules), throttled, dollars)


# Files


def write_node(directory: Path, totals: NodeTotals) -> None:
    """Write the node's totals.

    Raises ``OSError`` on failure.
    """
    put_in_place(directory / NODE, to_plain_json(totals))


def read_node(directory: Path) -> NodeTotals:
    """Return the node's totals; zeros if there are no valid ones."""
    with suppress(OSError):
        return decode_plain((directory / NODE).read_bytes(), NodeTotals) or NodeTotals()
    return NodeTotals()


def write_totals(directory: Path, totals: RankTotals) -> None:
    """Write a rank's totals.

    Raises ``OSError`` on failure.
    """
    ranks = directory / RANKS
    ranks.mkdir(parents=True, exist_ok=True)
    put_in_place(ranks / f"{totals.rank}.json", to_plain_json(totals))


def read_totals(directory: Path) -> list[RankTotals]:
    found = list[RankTotals]()
    for path in (directory / RANKS).glob("*.json"):
        with suppress(OSError):
            totals = decode_plain(path.read_bytes(), RankTotals)
            if totals and len(totals.steps_within) == len(STEP_BOUNDS):
                done = read_steps(directory, totals.rank)
                found.append(replace(totals, steps_now=max(totals.steps, done)) if done else totals)
    return sorted(found, key=lambda totals: totals.rank)


def steps_file(directory: Path, rank: int) -> Path:
    return directory / RANKS / f"{rank}.steps"


def read_steps(directory: Path, rank: int) -> int:
    """Return the steps that a rank has done until now; 0 if unknown."""
    with suppress(OSError, struct.error):
        return int(STEPS.unpack(steps_file(directory, rank).read_bytes())[0])
    return 0


def put_in_place(path: Path, content: bytes) -> None:
    scratch = path.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(content)
    scratch.replace(path)
