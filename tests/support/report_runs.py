"""The artifacts of a run, small and made in memory: what the report is tried on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.artifacts.format import ArtifactWriter
from slipstream.artifacts.prepared.data import Signature, TensorSpec
from slipstream.artifacts.results.compression import Compression, CompressionTrial, NetworkSize, Speedup
from slipstream.collectives.model.predictions import model_curve
from slipstream.evaluate.engine import plot_data
from slipstream.interconnect.profile import COURSE, MODEL, TrendPoint, write_profile
from slipstream.models import metrics
from slipstream.prepare import quarantine
from slipstream.prepare.quarantine import BadRow
from slipstream.report.figures import StageFigures
from slipstream.report.stage_results import Results
from tests.support.network_profiles import network_profile

ROWS = 600
STAGES = [
    StageFigures("prepare", 0.0, reused=True),
    StageFigures("train", 31.24, reused=False),
    StageFigures("evaluate", 1.9, reused=False),
    StageFigures("export", 9.71, reused=False),
    StageFigures("collectives", 7.05, reused=False),
]
INT8 = b"int8 weights"


def signature_of(classes: list[str], target: str = "income") -> Signature:
    spec = TensorSpec("numeric", "float32", (4,))
    task = "classification" if classes else "regression"
    return Signature((spec,), task, target, tuple(classes), target_mean=200.0, target_std=50.0)


def predictions(classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Raw outputs ``[rows, outputs]`` that are mostly right, and the truth ``[rows]``."""
    rng = np.random.default_rng(0)
    if not classes:
        values = rng.normal(200, 50, ROWS)
        return (values + rng.normal(0, 20, ROWS))[:, None], values
    truth = rng.integers(0, classes, ROWS)
    logits = rng.normal(0, 1.2, (ROWS, classes))
    logits[np.arange(ROWS), truth] += 3
    return logits, truth


def write(directory: Path, kind: str, files: dict[str, Any]) -> Path:
    writer = ArtifactWriter(directory)
    for name, value in files.items():
        if isinstance(value, bytes):
            writer.write_bytes(name, value)
        else:
            writer.write_json(name, value)
    writer.finish(kind, {})
    return directory


def prepared(directory: Path, signature: Signature, bad: list[BadRow], warnings: list[str]) -> Path:
    writer = ArtifactWriter(directory)
    rows = {
        "read": 4000 + len(bad),
        "kept": 4000,
        "quarantined": len(bad),
        "train": 2800,
        "validation": 600,
        "test": ROWS,
    }
    classes = {
        label: {"train": 2800 - 5 * i, "validation": 600 - i, "test": 60} for i, label in enumerate(signature.classes)
    }
    columns = [
        {"name": "age", "role": "numeric", "type": "integer", "missing": 12, "distinct": 73}
        | {"min": 17, "max": 90, "mean": 38.6, "std": 13.6},
        {"name": "job", "role": "categorical", "type": "text", "missing": 0, "distinct": 15}
        | {"top": [["Prof-specialty", 412], ["Craft-repair", 401], ["Sales", 365], ["Other", 300]]},
        {"name": "ssn", "role": "identifier", "type": "text", "missing": 0, "why": "every value occurs once"},
        {"name": signature.target, "role": "target", "type": "text", "missing": 0, "distinct": len(signature.classes)},
    ]
    card: dict[str, Any] = {
        "source": "adult-train.csv",
        "task": signature.task,
        "target": signature.target,
        "rows": rows,
    }
    card |= {"columns": columns, "classes": classes, "warnings": warnings}
    writer.write_json("card.json", card)
    writer.write_json("signature.json", signature.to_json())
    quarantine.write(writer, bad)
    writer.finish("prepare", {})
    return directory


LEDGER = {"attempts": 2, "executed": 130, "kept": 120, "wall": 12.6, "goodput": 0.755}
SPEED = {
    "rows_per_s": 12_345.6,
    "flops_per_row": 400_000.0,
    "peak_flops": 98.7e9,
    "peak_from": "measured",
    "utilisation": 0.05003,
    "memory_bytes": 345_678_901,
}
ATTEMPT = {"ledger": LEDGER, "throughput": SPEED}


def history(metric: str) -> dict[str, Any]:
    steps = [
        {"step": step, "epoch": step / 110, "loss": 0.15 + 1.6 * float(np.exp(-step / 300)), "learning_rate": 1e-3}
        for step in range(11, 2201, 11)
    ]
    evaluations = [
        {
            "step": epoch * 110,
            "epoch": float(epoch),
            "loss": 0.25 + 1.5 * float(np.exp(-epoch / 3)) + 0.004 * epoch,
            metric: 0.9 - 0.4 * float(np.exp(-epoch / 3)),
        }
        for epoch in range(1, 21)
    ]
    world = {"size": 2, "backend": "gloo", "device": "cpu", "precision": "fp32", "threads": 1}
    course = {"steps": steps, "evaluations": evaluations, "best": evaluations[10], "stopped_early": False}
    return {**course, "steps_total": 2200, "parameters": 76_310, "world": world}


def evaluation(signature: Signature) -> dict[str, Any]:
    outputs, truth = predictions(len(signature.classes))
    name = metrics.HEADLINE[signature.task][0]
    model: Mapping[str, Any] = metrics.scores(signature.task, outputs, truth)
    baseline = {key: value * 0.97 if value is not None else None for key, value in model.items()}
    return {
        "task": signature.task,
        "rows": ROWS,
        "metric": {"name": name, "value": model[name]},
        "model": model,
        "baseline": {"name": "HistGradientBoosting", "rows_trained": 2800, **baseline},
        "classes": list(signature.classes),
        **plot_data(signature.task, outputs, truth),
    }


#: Batch size, times as long as one row takes, calls measured.
BATCHES = (("1", 1, 1200), ("32", 12, 400), ("256", 90, 90))


def around(value: float) -> dict[str, float]:
    return {"value": value, "low": 0.97 * value, "high": 1.03 * value}


def latency_of(p50: float, calls: int, speed: float) -> dict[str, Any]:
    """As the export gives it: a percentile if ten calls lie beyond it."""
    quoted = {"p50": 20, "p90": 100, "p99": 1000}
    scales = {"p50": 1.0, "p90": 1.4, "p99": 2.0}
    found = {name: around(scales[name] * p50) if calls >= least else None for name, least in quoted.items()}
    return {**found, "calls": calls, "speedup": around(speed)}


def variant(
    name: str, file: str | None, size: int, p50: float, metric: str, value: float, speed: float = 1.0, **more: Any
) -> dict[str, Any]:
    latency = {batch: latency_of(scale * p50, calls, speed) for batch, scale, calls in BATCHES}
    rates = {batch: 1000 * int(batch) / at["p50"]["value"] for batch, at in latency.items()}
    metric_values = {metric: value}
    return {
        "name": name,
        "file": file,
        "bytes": size,
        "latency_ms": latency,
        "rows_per_second": rates,
        "metrics": metric_values,
        "mean_difference": 0.02,
        "chosen": False,
        **more,
    }


def export(metric: str) -> dict[str, Any]:
    reason = (
        "1.93 times as fast as FP32 at batch 1 (1.87 to 1.99), and it lost 0.17 points of accuracy on 600 test rows, "
        "at most 0.71 (95 % limit), less than the 1 allowed"
    )
    quality = {"loss": 0.17, "low": -0.3, "high": 0.71, "level": 0.95, "rows": 600, "evidence": "test"}
    quality |= {"answer": "passed", "rows_enough": None}
    fp32, int8 = ("onnx-fp32", "model.fp32.onnx"), ("onnx-int8", "model.int8.onnx")
    exact: dict[str, Any] = {"largest_difference": 4e-6, "verdict": "exact", "reason": "gives what torch gives"}
    torch: dict[str, Any] = {"largest_difference": 0.0, "verdict": "reference", "reason": "torch itself"}
    chosen: dict[str, Any] = {"largest_difference": 0.31, "verdict": "chosen", "reason": reason}
    chosen |= {"quality": quality, "chosen": True}
    return {
        "task": "classification" if metric == "accuracy" else "regression",
        "variants": [
            variant("torch-fp32", None, 305_120, 0.41, metric, 0.8791, **torch),
            variant(*fp32, 309_822, 0.12, metric, 0.8791, **exact),
            variant(*int8, 84_310, 0.062, metric, 0.8774, 1.93, **chosen),
            {"name": "int4", "file": None, "bytes": None, "chosen": False}
            | {"verdict": "did not shrink", "reason": "its file has 101 % of FP32's size"},
        ],
        "chosen": "onnx-int8",
        "why": f"onnx-int8 is {reason}",
        "decided_at_batch": 1,
        "best": {"1": "onnx-int8", "32": "onnx-int8", "256": "onnx-fp32"},
        "max_loss": 1.0,
        "weight_bits": 7,
        "profile": [
            {"batch": batch, "operators": {"FusedGemm": 0.7, "Sin": 0.3}, "products": 0.7, "at_most": 1 / 0.3}
            for batch in (1, 32, 256)
        ],
        "machine": {
            "cpu": "Example CPU 8000 @ 2.10GHz",
            "gpu": "",
            "flags": ["avx512f", "avx512_vnni"],
            "cores": 2,
            "threads": 1,
            "torch": "2.13.0",
            "onnx": "1.23.2",
            "onnxruntime": "1.31.1",
        },
    }


def measured_network(directory: Path, world: int) -> Path:
    """The benchmark's artifact of a network that was measured a week before, too."""
    profile = network_profile(world)
    week = 7 * 86_400.0
    course = [
        TrendPoint(measured_at=profile.measured_at - ago, bytes=1 << 24, busbw=1.15, low=1.1, high=1.2)
        for ago in (week, 0)
    ]
    texts = {COURSE: json.dumps(course), MODEL: json.dumps(model_curve(profile))}
    write_profile(directory, profile, {}, texts)
    return directory


def results(
    directory: Path,
    classes: list[str],
    *,
    target: str = "income",
    bad: list[BadRow] | None = None,
    warnings: list[str] | None = None,
    world: int = 2,
    trained: dict[str, Any] | None = None,
) -> Results:
    """A whole run, for as many classes as named (none: a regression), opened from the artifacts it wrote."""
    signature = signature_of(classes, target)
    metric = metrics.HEADLINE[signature.task][0]
    models = {"model.fp32.onnx": b"fp32 weights", "model.int8.onnx": INT8, "model.onnx": INT8}
    exported = {"export.json": export(metric), **models}
    return Results.open(
        prepared(directory / "prepare", signature, bad or [], warnings or []),
        write(
            directory / "train",
            "train",
            {"history.json": history(metric), "attempt.json": ATTEMPT, **(trained or {})},
        ),
        write(directory / "evaluate", "evaluate", {"evaluation.json": evaluation(signature)}),
        write(directory / "export", "export", exported),
        measured_network(directory / "collectives", world),
    )


def compression() -> Compression:
    """What is told of a search in which the second of two smaller networks was taken."""
    whole, half, fewer = (
        NetworkSize(250_818, [512, 256, 64]),
        NetworkSize(88_546, [256, 128, 32]),
        NetworkSize(41_010, [128, 128, 128, 64]),
    )
    tried = [
        CompressionTrial(7, "50 % fewer units", half, 0.8791, 0.17, -0.3, 0.71, 600, "passed", 61.0),
        CompressionTrial(11, "75 % fewer units", fewer, 0.861, 1.9, 1.1, 2.7, 600, "failed", 55.2),
    ]
    speeds = {"50 % fewer units": Speedup(1.93, 1.87, 1.99), "75 % fewer units": Speedup(2.71, 2.6, 2.8)}
    why = "it lost 0.11 points of accuracy on 600 test rows, at most 0.62 (95 % limit), less than the 1 allowed"
    return Compression("prune", "accuracy", whole, 0.8808, tried, speeds, 32, tried[0].name, why, "", 116.2)
