"""Pruned and distilled models, compared with models of the same size that are trained on labels only.

    python benchmarks/compression.py [OPTIONS]

The teacher is a plain MLP 200-512-256-64, trained by our own trainer on a seeded table of 200 features and 40,000 rows.
Speeds are ONNX Runtime's with one thread, measured in turns in random order; accuracies are of the test rows.

pruned: half of the units of every layer are removed, and the rest is trained for 4 epochs with the teacher. The
baseline is a network *built* with the pruned widths and trained for equally many steps in total. Acceptance limits
(bars): at least 0.95 times the built network's speed, at least 1.8 times the teacher's at batch 32, and a mean accuracy
over the seeds at most 0.3 points below the built network's.

student: an MLP 96-48 is trained for 16 epochs, with the teacher and on labels only, from the same weights and with the
same order of rows. Bars: the teacher increases the mean accuracy over the seeds (95 % interval above 0), and the
student is at least 4 times as fast as the teacher at batch 32.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy.stats import t as student_t

from harness.command import benchmark, part_option
from harness.models import PLAIN_MLP, train, write_table
from harness.table import Column, Table
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun, propose_model
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, to_onnx
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import Estimate
from slipstream.shared.comparison.latencies import Workload, measure_latencies
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.predict import model_function, predict_records, record_inputs, record_targets
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig

BATCH = 32
#: Bars of ``pruned``: fraction of the built model's speed, speedup over the teacher, points of accuracy lost at most.
SPEED_BAR, PRUNED_BAR, ACCURACY_BAR = 0.95, 1.8, 0.3
STUDENT_BAR = 4.0
COLUMNS = (
    Column("parameters", "parameters", "{:.0f}"),
    Column("accuracy %", "accuracy", "{:.2f}"),
    Column("lowest", "lowest", "{:.2f}"),
    Column("highest", "highest", "{:.2f}"),
    Column("speed", "speed", "{:.2f}"),
    Column("low", "speed_low", "{:.2f}"),
)


@dataclass(frozen=True)
class Sizes:
    rows: int = 40_000
    features: int = 200
    hidden: tuple[int, ...] = (512, 256, 64)
    student: tuple[int, ...] = (96, 48)
    epochs: int = 8
    pruned_epochs: int = 4
    student_epochs: int = 16
    pruned_seeds: int = 3
    student_seeds: int = 5
    seconds: float = 20.0


QUICK = Sizes(2000, 20, (32, 16, 8), (8, 4), 1, 1, 1, 1, 1, 0.3)


@dataclass(frozen=True)
class Bench:
    """Prepared data and a directory for the trained models, with methods that train and measure them."""

    data: PreparedData
    directory: Path
    sizes: Sizes

    def train(self, name: str, hidden: Sequence[int], seed: int, epochs: int, **more: Path) -> TrainedModel:
        model = ModelConfig(PLAIN_MLP, {"hidden": list(hidden)})
        training = TrainingConfig(epochs=epochs, seed=seed)
        return train(
            self.data.artifact.directory, self.directory / f"{name}-{seed}", model, training, factory=PLAIN_MLP, **more
        )

    def teacher(self, seed: int) -> TrainedModel:
        """Return the unpruned network of ``seed``, which is trained on the first call."""
        if (made := self.directory / f"teacher-{seed}").exists():
            return TrainedModel.open(made, PLAIN_MLP)
        return self.train("teacher", self.sizes.hidden, seed, self.sizes.epochs)

    def start(self, name: str, trained: TrainedModel, seed: int, config: CompressionConfig) -> Path:
        """Write the model that training starts from, as the stage ``compress`` does; return its directory."""
        directory = self.directory / f"{name}-start-{seed}"
        propose_model(directory, CompressionRun(trained, self.data, config, seed), [], {})
        return directory

    def accuracy(self, model: TrainedModel) -> float:
        rows = self.data.split("test")
        outputs = predict_records(model_function(model.load()), self.data.signature, rows)
        return 100 * float(np.mean(outputs.argmax(axis=1) == record_targets(rows)))

    def speeds(self, models: Mapping[str, TrainedModel], reference: str) -> dict[str, Estimate]:
        """Return the models' speedups over ``reference`` at batch 32."""
        test, loads = self.data.split("test"), {}
        for name, model in models.items():
            path = self.directory / f"{name}.onnx"
            to_onnx(
                model.load(), self.data.signature, record_inputs(self.data.signature, test[:EXAMPLE_ROWS]), 20, path
            )
            loads[name] = partial(onnx_predictor, path, 1)
        workload = Workload(self.data.signature, test, 1)
        timed = measure_latencies(loads, reference, workload, self.sizes.seconds, [BATCH])
        return {name: speedup for name in models if (speedup := timed[name][str(BATCH)].speedup)}


def pruned(bench: Bench) -> Table:
    sizes, models = bench.sizes, dict[str, TrainedModel]()
    names = ("teacher", "built", "pruned", "pruned, labels alone")
    accuracies: dict[str, list[float]] = {name: [] for name in names}
    half = [width // 2 for width in sizes.hidden]
    altogether = sizes.epochs + sizes.pruned_epochs
    for seed in range(sizes.pruned_seeds):
        teacher = bench.teacher(seed)
        start = bench.start("pruned", teacher, seed, CompressionConfig(method="prune", share=0.5))
        place = teacher.artifact.directory
        models = {
            "teacher": teacher,
            "built": bench.train("built", half, seed, altogether),
            "pruned": bench.train("pruned", half, seed, sizes.pruned_epochs, start=start, teacher=place),
            "pruned, labels alone": bench.train("alone", half, seed, sizes.pruned_epochs, start=start),
        }
        for name, model in models.items():
            accuracies[name].append(bench.accuracy(model))
    timed = {name: models[name] for name in ("teacher", "built", "pruned")}
    speeds = bench.speeds(timed, "teacher")
    below = statistics.mean(accuracies["built"]) - statistics.mean(accuracies["pruned"])
    against = bench.speeds({name: models[name] for name in ("built", "pruned")}, "built")["pruned"]
    remarks = (
        f"speed of the built model: {against.value:.2f} ({against.low:.2f} to {against.high:.2f}), "
        f"asked {SPEED_BAR}: {held(against.value >= SPEED_BAR)}",
        f"speed of the teacher at batch {BATCH}: {speeds['pruned'].value:.2f}, asked {PRUNED_BAR}: "
        f"{held(speeds['pruned'].value >= PRUNED_BAR)}",
        f"accuracy: {below:+.2f} points below the built model ({sizes.pruned_seeds} seeds), asked at most "
        f"{ACCURACY_BAR}: {held(below <= ACCURACY_BAR)}",
    )
    return Table("pruned by half", COLUMNS, rows_of(models, accuracies, speeds), remarks)


def student(bench: Bench) -> Table:
    sizes = bench.sizes
    accuracies: dict[str, list[float]] = {"teacher": [], "labels alone": [], "with its teacher": []}
    teacher = bench.teacher(0)
    accuracies["teacher"].append(bench.accuracy(teacher))
    config = CompressionConfig(method="distil", students=[{"hidden": list(sizes.student)}])
    models = {"teacher": teacher}
    for seed in range(sizes.student_seeds):
        start = bench.start("student", teacher, seed, config)
        place, epochs = teacher.artifact.directory, sizes.student_epochs
        models["labels alone"] = bench.train("labels", sizes.student, seed, epochs, start=start)
        models["with its teacher"] = bench.train("taught", sizes.student, seed, epochs, start=start, teacher=place)
        for name in ("labels alone", "with its teacher"):
            accuracies[name].append(bench.accuracy(models[name]))
    speeds = bench.speeds({name: models[name] for name in ("teacher", "with its teacher")}, "teacher")
    speed = speeds["with its teacher"]
    gains = [a - b for a, b in zip(accuracies["with its teacher"], accuracies["labels alone"], strict=True)]
    remarks = (
        gained(gains),
        f"speed of the teacher at batch {BATCH}: {speed.value:.2f} ({speed.low:.2f} to {speed.high:.2f}), "
        f"asked {STUDENT_BAR}: {held(speed.value >= STUDENT_BAR)}",
    )
    return Table("student", COLUMNS, rows_of(models, accuracies, speeds), remarks)


def gained(gains: Sequence[float]) -> str:
    """Describe the mean gain in accuracy over the seeds, with Student's 95 % interval."""
    mean = statistics.mean(gains)
    if len(gains) < 2:
        return f"with its teacher {mean:+.2f} points: one seed has no interval"
    width = float(student_t.ppf(0.975, len(gains) - 1)) * statistics.stdev(gains) / len(gains) ** 0.5
    return (
        f"with its teacher {mean:+.2f} points ({mean - width:+.2f} to {mean + width:+.2f}, {len(gains)} seeds), asked "
        f"above 0: {held(mean - width > 0)}"
    )


def rows_of(
    models: Mapping[str, TrainedModel],
    accuracies: Mapping[str, Sequence[float]],
    speeds: Mapping[str, Estimate],
) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    for name, found in accuracies.items():
        size = sum(p.numel() for p in models[name].load().parameters())
        rows[name] = {"parameters": size, "accuracy": statistics.mean(found)}
        rows[name] |= {"lowest": min(found), "highest": max(found)}
        if name in speeds:
            rows[name] |= {"speed": speeds[name].value, "speed_low": speeds[name].low}
    return rows


def held(met: bool) -> str:
    return "held" if met else "NOT HELD"


PARTS = {"pruned": pruned, "student": student}


@part_option(PARTS)
@benchmark
def main(quick: bool, parts: Sequence[str]) -> Iterator[Table]:
    """Compare pruned and distilled models with models of the same size trained on labels only."""
    sizes = QUICK if quick else Sizes()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_table(directory / "table.parquet", sizes.rows, sizes.features)
        source = str(directory / "table.parquet")
        prepare(directory / "prepared", source, "label", DataConfig(), {"command": "benchmarks/compression.py"}, 1)
        data = PreparedData.open(directory / "prepared")
        for part in parts:
            yield PARTS[part](Bench(data, directory, sizes))


if __name__ == "__main__":
    main()
