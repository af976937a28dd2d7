"""Artifacts of a run, small and made in memory, for tests of the report."""

from pathlib import Path
from typing import Any

import numpy as np

from slipstream.pipeline.evaluate.engine import plot_data
from slipstream.pipeline.report.stage_results import StageResults
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.records import to_json, write_record
from slipstream.shared.artifacts.results.compression import Compression, CompressionTrial, ModelSize
from slipstream.shared.artifacts.results.evaluation import (
    BaselineScores,
    ColumnImportance,
    Evaluation,
    Gain,
    Headline,
    Scores,
    WorstError,
)
from slipstream.shared.artifacts.results.export import (
    Estimate,
    ExportReport,
    LatencyFigures,
    MachineFigures,
    ProfileFigures,
    QualityFigures,
    VariantFigures,
)
from slipstream.shared.artifacts.results.sweep import AgainstGiven, Sweep, SweepTrial
from slipstream.shared.artifacts.results.training import (
    Attempt,
    Goodput,
    History,
    LossPoint,
    ProcessGroupFigures,
    Throughput,
    ValidationPoint,
)
from slipstream.shared.interconnect.model.predictions import model_curve
from slipstream.shared.interconnect.profile import COURSE, MODEL, ModelPoint, TrendPoint, write_profile
from slipstream.shared.models import metrics
from slipstream.shared.source import quarantine
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.stages import StageRun
from tests.support.network_profiles import network_profile

ROWS = 600
STAGES = [
    StageRun("prepare", 0.0, reused=True),
    StageRun("train", 31.24, reused=False),
    StageRun("evaluate", 1.9, reused=False),
    StageRun("export", 9.71, reused=False),
    StageRun("collectives", 7.05, reused=False),
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
    """An artifact of ``files``: bytes, or records."""
    writer = ArtifactWriter(directory)
    for name, value in files.items():
        writer.write_bytes(name, value if isinstance(value, bytes) else to_json(value))
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
    write_record(writer, "signature.json", signature)
    quarantine.write_quarantine(writer, bad)
    writer.finish("prepare", {})
    return directory


LEDGER = Goodput(
    attempts=2,
    executed=130,
    kept=120,
    seconds={"steps": 9.7},
    lost=0.2,
    wall=12.6,
    ends=("killed", "finished"),
    useful_steps=120 / 130,
    goodput=0.755,
)
SPEED = Throughput(
    rows_per_s=12_345.6,
    flops_per_row=400_000.0,
    peak_flops=98.7e9,
    peak_from="measured",
    utilisation=0.05003,
    memory_bytes=345_678_901,
)
ATTEMPT = Attempt(steps=120, resumed_from="", ledger=LEDGER, throughput=SPEED)


def history(metric: str) -> History:
    steps = [LossPoint(step, step / 110, 0.15 + 1.6 * float(np.exp(-step / 300)), 1e-3) for step in range(11, 2201, 11)]
    evaluations = [
        ValidationPoint(
            step=epoch * 110,
            epoch=float(epoch),
            loss=0.25 + 1.5 * float(np.exp(-epoch / 3)) + 0.004 * epoch,
            **{metric: 0.9 - 0.4 * float(np.exp(-epoch / 3))},
        )
        for epoch in range(1, 21)
    ]
    world = ProcessGroupFigures(2, "gloo", "cpu", "fp32", 1)
    return History(steps, evaluations, evaluations[10], 2200, False, 76_310, world)


def evaluation(signature: Signature) -> Evaluation:
    outputs, truth = predictions(len(signature.classes))
    name = metrics.HEADLINE[signature.task][0]
    model = metrics.compute_scores(signature.task, outputs, truth)
    headline = model.of(name)
    assert headline
    baseline = {key: value and value * 0.97 for key, value in vars(model).items()}
    truths = [*signature.classes, "40.5", "12.3"]
    better = 100 * 0.03 * headline if signature.task == "classification" else 100 * (1 - 1 / 0.97)
    return Evaluation(
        task=signature.task,
        rows=ROWS,
        metric=Headline(name, headline),
        model=model,
        baseline=BaselineScores(name="HistGradientBoosting", rows_trained=2800, **baseline),
        gain=Gain(better, better - 1, better + 1),
        classes=list(signature.classes),
        importance=[ColumnImportance("age", 0.123, 0.004), ColumnImportance("a-rather-long-name" * 3, -0.001, 0.002)],
        worst=[WorstError(17, truths[0], truths[1], 0.987, {"age": "39", "city": "Rome"})],
        **vars(plot_data(signature.task, outputs, truth, None, signature.classes)),
    )


#: Batch size, times as long as one row takes, calls measured.
BATCHES = (("1", 1, 1200), ("32", 12, 400), ("256", 90, 90))


def around(value: float) -> Estimate:
    return Estimate(value, 0.97 * value, 1.03 * value)


def latency_of(p50: float, calls: int, speed: float) -> LatencyFigures:
    """As the export gives it: a percentile if ten calls lie beyond it."""
    quoted = {"p50": 20, "p90": 100, "p99": 1000}
    scales = {"p50": 1.0, "p90": 1.4, "p99": 2.0}
    found = {name: around(scales[name] * p50) if calls >= least else None for name, least in quoted.items()}
    return LatencyFigures(found["p50"], found["p90"], found["p99"], calls, around(speed))


def variant(
    name: str, file: str | None, size: int, p50: float, metric: str, value: float, speed: float = 1.0, **more: Any
) -> VariantFigures:
    return VariantFigures(
        name=name,
        file=file,
        bytes=size,
        **{"chosen": False, **more},
        latency_ms={batch: latency_of(scale * p50, calls, speed) for batch, scale, calls in BATCHES},
        rows_per_second={batch: 1000 * int(batch) / (scale * p50) for batch, scale, _ in BATCHES},
        metrics=Scores(**{metric: value}),
        mean_difference=0.02,
    )


def export(metric: str) -> ExportReport:
    reason = (
        "1.93 times as fast as FP32 at batch 1 (1.87 to 1.99), and it lost 0.17 points of accuracy on 600 test rows, "
        "at most 0.71 (95 % limit), less than the 1 allowed"
    )
    quality = QualityFigures(0.17, -0.3, 0.71, 0.95, 600, "test", "passed", None)
    fp32, int8 = ("onnx-fp32", "model.fp32.onnx"), ("onnx-int8", "model.int8.onnx")
    exact: dict[str, Any] = {"largest_difference": 4e-6, "verdict": "exact", "reason": "gives what torch gives"}
    torch: dict[str, Any] = {"largest_difference": 0.0, "verdict": "reference", "reason": "torch itself"}
    chosen: dict[str, Any] = {"largest_difference": 0.31, "verdict": "chosen", "reason": reason}
    chosen |= {"quality": quality, "chosen": True}
    return ExportReport(
        task="classification" if metric == "accuracy" else "regression",
        variants=[
            variant("torch-fp32", None, 305_120, 0.41, metric, 0.8791, **torch),
            variant(*fp32, 309_822, 0.12, metric, 0.8791, **exact),
            variant(*int8, 84_310, 0.062, metric, 0.8774, 1.93, **chosen),
            VariantFigures("int4", None, None, False, "did not shrink", "its file has 101 % of FP32's size"),
        ],
        chosen="onnx-int8",
        why=f"onnx-int8 is {reason}",
        decided_at_batch=1,
        best={"1": "onnx-int8", "32": "onnx-int8", "256": "onnx-fp32"},
        max_loss=1.0,
        weight_bits=7,
        profile=[ProfileFigures(n, {"FusedGemm": 0.7, "Sin": 0.3}, 0.7, (0.68, 0.72)) for n in (1, 32, 256)],
        machine=MachineFigures(
            cpu="Example CPU 8000 @ 2.10GHz",
            gpu="",
            architecture="x86_64",
            flags=["avx512f", "avx512_vnni"],
            cores=2,
            threads=1,
            torch="2.13.0",
            onnx="1.23.2",
            onnxruntime="1.31.1",
        ),
        licence="",
    )


def measured_network(directory: Path, world: int) -> Path:
    """The benchmark's artifact of a network that was measured a week before, too."""
    profile = network_profile(world)
    week = 7 * 86_400.0
    course = [
        TrendPoint(measured_at=profile.measured_at - ago, bytes=1 << 24, busbw=1.15, low=1.1, high=1.2)
        for ago in (2 * week, week, 0)
    ]
    curve = to_json(model_curve(profile), list[ModelPoint])
    write_profile(directory, profile, {}, {COURSE: to_json(course, list[TrendPoint]), MODEL: curve})
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
) -> StageResults:
    """A whole run, for as many classes as named (none: a regression), opened from the artifacts it wrote."""
    signature = signature_of(classes, target)
    metric = metrics.HEADLINE[signature.task][0]
    models = {"model.fp32.onnx": b"fp32 weights", "model.int8.onnx": INT8, "model.onnx": INT8}
    exported = {"export.json": export(metric), **models}
    return StageResults.open(
        prepared(directory / "prepare", signature, bad or [], warnings or []),
        write(
            directory / "train", "train", {"history.json": history(metric), "attempt.json": ATTEMPT, **(trained or {})}
        ),
        write(directory / "evaluate", "evaluate", {"evaluation.json": evaluation(signature)}),
        write(directory / "export", "export", exported),
        measured_network(directory / "collectives", world),
    )


def compression() -> Compression:
    """Return the record of a search that chose the second of two smaller models."""
    whole, half, fewer = (
        ModelSize(250_818, [512, 256, 64]),
        ModelSize(88_546, [256, 128, 32]),
        ModelSize(41_010, [128, 128, 128, 64]),
    )
    tried = [
        CompressionTrial(7, "50 % fewer units", half, 0.8791, 0.17, -0.3, 0.71, 600, "passed", 61.0),
        CompressionTrial(11, "75 % fewer units", fewer, 0.861, 1.9, 1.1, 2.7, 600, "failed", 55.2),
    ]
    speeds = {"50 % fewer units": Estimate(1.93, 1.87, 1.99), "75 % fewer units": Estimate(2.71, 2.6, 2.8)}
    why = "it lost 0.11 points of accuracy on 600 test rows, at most 0.62 (95 % limit), less than the 1 allowed"
    return Compression("prune", "accuracy", whole, 0.8808, tried, speeds, 32, tried[0].name, why, "", 116.2)


def swept() -> Sweep:
    """Return the record of a sweep with a trial of every kind; the third is the best."""
    curve = [[1.0, 0.9], [2.0, 0.6], [3.0, 0.5]]
    trials = [
        SweepTrial(0, "complete", "as given", 0.5, curve, 9.0),
        SweepTrial(1, "pruned", "learning_rate 0.2", 0.8, curve[:1], 3.0),
        SweepTrial(2, "complete", "learning_rate 0.01", 0.4, [*curve[:2], [3.0, 0.4]], 9.5),
        SweepTrial(3, "failed", "learning_rate 10", None, [], 1.0, "training.learning_rate: the loss is not finite"),
        SweepTrial(4, "unfinished", "learning_rate 0.3"),
    ]
    against = AgainstGiven(1.25, 0.4, 2.1, "points of accuracy", 600)
    importance = {"learning_rate": 0.75, "hidden": 0.25}
    return Sweep("/data/swept", trials, 2, [1.0], importance, against, 61.0)
