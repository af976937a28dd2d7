"""Figures of made-up trainings, in the place where a plan looks for them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.artifacts.results.devices import AttemptSpan, TrainingDevices
from slipstream.shared.artifacts.results.ledger import (
    ACTIVITIES,
    DATA_WAIT,
    EVALUATION,
    RESTORE,
    STALL,
    START,
    STEPS,
    TrainingFigures,
)
from slipstream.shared.artifacts.results.training import (
    KIND,
    Attempt,
    Goodput,
    History,
    ProcessGroupFigures,
    Throughput,
    ValidationPoint,
    record_files,
)
from slipstream.shared.telemetry.records import DeviceReading, HostReading, Sample
from slipstream.shared.telemetry.series import condense_samples

A100 = "NVIDIA A100-SXM4-80GB"
STEPS_DONE, BATCH = 36_000, 512
#: 5 h of steps, 6 min of evaluations, 3 min of waiting for rows; 40 saves.
SECONDS = {START: 100.0, RESTORE: 20.0, STEPS: 18_000.0, EVALUATION: 360.0, DATA_WAIT: 180.0, STALL: 80.0}
LEDGER = Goodput(1, STEPS_DONE, STEPS_DONE, SECONDS, 0.0, 18_740.0, ("finished",), 1.0, 0.96, saves=40)
SPEED = Throughput(
    rows_per_s=1000.0,
    flops_per_row=1e11,
    peak_flops=312e12,
    peak_from=f"the data sheet of {A100}",
    utilisation=0.32,
    memory_bytes=30_000_000_000,
)
FIGURES = TrainingFigures(
    world=ProcessGroupFigures(1, "nccl", "cuda", "bf16", 8),
    gpu=A100,
    pods=1,
    parameters=100_000_000,
    batch_size=BATCH,
    ledger=LEDGER,
    throughput=SPEED,
    save_seconds=6.0,
    attempts=[AttemptSpan(1, 1.7e9, 18_740.0, "finished", spot=False, lost=0.0)],
)


def figures(*, slower: float = 1.0, speed: dict[str, Any] | None = None, **changes: Any) -> TrainingFigures:
    """Those above, with steps that take ``slower`` times as long, and what else is changed."""
    seconds = {**SECONDS, STEPS: SECONDS[STEPS] * slower}
    assert set(seconds) == set(ACTIVITIES)
    its = {"ledger": replace(LEDGER, seconds=seconds), "throughput": replace(SPEED, **(speed or {})), **changes}
    return replace(FIGURES, **its)


def write_run(directory: Path, its: TrainingFigures = FIGURES) -> str:
    """The directory of a run, as far as a plan reads it."""
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text(json.dumps({"training": to_tree(its)}))
    return str(directory)


def write_model(directory: Path, device: str = A100) -> str:
    """The artifact of a trained model, without the model; older versions recorded no device ("")."""
    point = ValidationPoint(1, 1.0, 0.5)
    history = History([], [point], point, STEPS_DONE, False, FIGURES.parameters, FIGURES.world)
    attempt = Attempt(
        steps=STEPS_DONE, resumed_from="", save_seconds=6.0, ledger=LEDGER, throughput=SPEED, device=device
    )
    span = replace(FIGURES.attempts[0], events={"checkpoint": [float(at) for at in range(40)]})
    gpu = DeviceReading("GPU-a", 0, A100, busy=0.9, memory_used_bytes=40 << 30, memory_limit_bytes=80 << 30)
    samples = [Sample(1.7e9 + at, HostReading(1.0 * at, 8.0), (gpu,)) for at in range(2)]
    pod = condense_samples(samples, 1, "node", {gpu.uuid: 0})
    assert pod is not None
    devices = TrainingDevices([span], [pod])
    writer = ArtifactWriter(directory)
    for name, content in record_files(history, attempt, devices).items():
        writer.write_bytes(name, content)
    writer.finish(KIND, {"training": {"batch_size": BATCH}})
    return str(directory)
