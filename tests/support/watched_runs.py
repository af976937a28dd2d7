"""Artifact of a training on two pods of two GPUs that lost one of its two attempts."""

import math
from dataclasses import replace
from typing import Any

from slipstream.shared.artifacts.results.devices import (
    AttemptSpan,
    Bottleneck,
    DeviceSeries,
    PodSeries,
    TrainingDevices,
)
from tests.support.report_runs import ATTEMPT

BEGAN = 1_767_322_800.0
BOTTLENECK = Bottleneck(
    verdict="data",
    sentence="data: 43 % of the training's time (rank 1 waited 15.2 of 35.2 ms a step for its batch, the loader spent "
    "most time on store); without it training would be 1.75 times as fast; try room for the data on the node's disk "
    "(the profile's data_cache_gib)",
    shares={"data": 0.43, "communication": 0.12, "evaluation": 0.03},
    useful=0.41,
    gain=1.75,
    also=["communication"],
    seconds=9_000.0,
    steps=120,
    exchanged_bytes=4 << 20,
    least_exchange_s=0.0042,
    phases={"data": 3_870.0, "compute": 3_690.0, "exchange": 900.0, "optimizer": 200.0, "rest": 70.0},
)


def pod(attempt: int, number: int, began: float, seconds: float) -> PodSeries:
    at = [began + 60.0 * minute for minute in range(1, int(seconds // 60) + 1)]
    devices = [
        DeviceSeries(
            name=f"GPU {gpu}",
            kind="gpu",
            busy=[0.55 + 0.1 * math.sin(minute / 5 + gpu + number) for minute in range(len(at))],
            memory=[min(0.9, 0.3 + 0.02 * minute) for minute in range(len(at))],
        )
        for gpu in range(2)
    ]
    return PodSeries(attempt, f"node-{number}", at, devices, seconds, energy_joules=400.0 * seconds, largest_memory=0.9)


DEVICES = TrainingDevices(
    [
        AttemptSpan(1, BEGAN, 3_600.0, "killed, or its machine was lost", True, 600.0, {"checkpoint": [900.0, 1800.0]}),
        AttemptSpan(
            2, BEGAN + 3_900.0, 5_400.0, "finished", True, 0.0, {"evaluation": [2400.0], "checkpoint": [2700.0]}
        ),
    ],
    [pod(1, number, BEGAN, 3_600.0) for number in range(2)]
    + [pod(2, number, BEGAN + 3_900.0, 5_400.0) for number in range(2)],
)


def watched_files() -> dict[str, Any]:
    """Return the trained model's files in addition to those of ``report_runs``."""
    return {"attempt.json": replace(ATTEMPT, bottleneck=BOTTLENECK), "devices.json": DEVICES}
