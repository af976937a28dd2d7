"""Training recipes: SGD against plain PyTorch, rows of any division, and what augmentation gains on a small set.

    python benchmarks/recipes.py [OPTIONS]

``sgd``: largest difference of any weight after 50 steps in float64 from a loop with ``torch.optim.SGD``, relative to
the largest weight of its tensor. ``rows``: augmented rows of two epochs that differ from those of one process, with
other numbers of processes and micro-batches, and after a start in the middle of an epoch. ``accuracy``: the model of
``examples/resnet.yaml`` on 300 of scikit-learn's digits, with augmentations and without, in pairs of the same rows and
seed; 1,200 test images; mean difference with its 95 % interval (Student's t over the pairs). The loader's speed is in
``loader.py``.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from scipy.stats import t as student
from sklearn.datasets import load_digits
from torch import nn

from harness.command import benchmark, part_option
from harness.table import Column, Table
from slipstream.config import RunConfig
from slipstream.operations.proofs.gpu.trainings import train, write_prepared
from slipstream.pipeline.train.config import AugmentConfig, TrainingConfig
from slipstream.pipeline.train.data_loader import Batch, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.loop.optimizer import learning_rate, make_optimizer
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.step import padded_rows, train_step
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.predict import model_function, predict_records, record_targets
from slipstream.shared.models.trained import TrainedModel

CPU = torch.device("cpu")
NUMBERS = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
DIGITS = Signature(
    (TensorSpec("image", "uint8", (1, 8, 8)),),
    "classification",
    "digit",
    tuple("0123456789"),
    image_mean=(73.0,),
    image_std=(90.0,),
)
EXAMPLE = Path(__file__).parents[1] / "examples/resnet.yaml"
STEPS, BATCH = 50, 48
TRAIN, VALIDATION, TEST, SEEDS = 300, 200, 1200, 4
CROP = {"transform": "crop", "padding": 1}
AUGMENTED: dict[str, list[dict[str, Any]]] = {
    "crops": [CROP],
    "flips and crops": [{"transform": "horizontal_flip"}, CROP],
    "crops by area": [{"transform": "crop", "area": [0.6, 1]}],
}


def sgd_part(directory: Path, quick: bool) -> Table:
    found = {}
    for momentum, decay, clip in itertools.product(("0", "0.9", "0.9, Nesterov"), (0.0, 0.1), (0.0, 0.3)):
        config = TrainingConfig(
            optimizer="sgd",
            learning_rate=0.05,
            momentum=float(momentum.partition(",")[0]),
            nesterov="Nesterov" in momentum,
            weight_decay=decay,
            clip_norm=clip,
        )
        found[f"momentum {momentum}, decay {decay:g}, clip {clip:g}"] = {"difference": difference_from_torch(config)}
    worst = max(figures["difference"] for figures in found.values())
    columns = (Column("difference", "difference", "{:.1e}"),)
    return Table(f"SGD, {STEPS} steps", columns, found, (f"largest {worst:.1e}; bar: at most 1e-12",))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def difference_from_torch(config: TrainingConfig) -> float:
    ours, theirs = Predictor(NUMBERS, network()), network()
    traits = probe_model(Predictor(NUMBERS, network().float()), CPU)
    optimizer, scaler = make_optimizer(ours, config), LossScaler(CPU, enabled=False)
    state = TrainingState(ReplicatedModel(ours, traits), optimizer, scaler, copy_weights(ours), Progress(), traits)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in theirs.parameters() if p.ndim < 2]},
    ]
    plain = torch.optim.SGD(groups, 1.0, config.momentum, nesterov=config.nesterov, foreach=False)
    draw = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        inputs = torch.randn(12, 5, generator=draw, dtype=torch.float64)
        target = torch.randint(3, (12,), generator=draw).int()
        batch = Batch((inputs,), target, 12, 12, 12, 0.0)
        train_step(state, config, RankContext(0, 1, CPU, "gloo"), "fp32", batch, STEPS)
        state.progress.step += 1
        for group in plain.param_groups:
            group["lr"] = learning_rate(step, STEPS, config.learning_rate, config.warmup)
        plain.zero_grad()
        nn.functional.cross_entropy(theirs(inputs), target.long()).backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(theirs.parameters(), config.clip_norm)
        plain.step()
    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
    return max(float((a - b).detach().abs().max() / b.detach().abs().max()) for a, b in pairs)


def digits(directory: Path, seed: int, rows: tuple[int, int, int]) -> PreparedData:
    """Write digits in a random order, divided as ``rows`` says into training, validation and test rows."""
    images, labels = load_digits(return_X_y=True)
    records = np.zeros(len(labels), DIGITS.record)
    records["image"], records[TARGET] = images.reshape(-1, 1, 8, 8) * 15, labels
    chosen = records[np.random.default_rng(seed).permutation(len(records))]
    train, validation, test, _ = np.split(chosen, np.cumsum(rows))
    return write_prepared(directory, DIGITS, {"train": train, "validation": validation, "test": test})


def rows_part(directory: Path, quick: bool) -> Table:
    data = digits(directory / "rows", 0, (TRAIN, VALIDATION, TEST))
    augment = [AugmentConfig.from_dict(each) for each in itertools.chain(*AUGMENTED.values())]

    def epochs(world: int, micro_batches: int = 1, start: int = 0) -> np.ndarray:
        padded = padded_rows(-(-BATCH // world), micro_batches)
        order = GlobalOrder(stored_blocks(data, "train"), BATCH, seed=0)
        ranks = [
            training_batches(
                data, order, RankContext(rank, world, CPU, "gloo"), start, 2 * TRAIN, padded=padded, augment=augment
            )
            for rank in range(world)
        ]
        batches = itertools.chain(*zip(*ranks, strict=True))
        return np.concatenate([batch.inputs[0][: batch.rows].numpy().copy() for batch in batches])

    whole, start = epochs(1), 2 * BATCH
    compared = {
        f"{world} processes, {count} micro-batches": epochs(world, count) for world in (1, 2, 3) for count in (1, 4)
    }
    found = {name: {"differ": float((rows != whole).any(axis=(1, 2, 3)).sum())} for name, rows in compared.items()}
    found[f"from row {start}"] = {"differ": float((epochs(1, start=start) != whole[start:]).any(axis=(1, 2, 3)).sum())}
    return Table("Augmented rows of two epochs", (Column("that differ", "differ", "{:.0f}"),), found)


def accuracy_part(directory: Path, quick: bool) -> Table:
    example = RunConfig.from_dict(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8")))
    torch.set_num_threads(1)

    def accuracy(data: PreparedData, name: str, seed: int, augment: list[dict[str, Any]]) -> float:
        training = example.training
        place = train(
            directory / f"{name}-{seed}",
            data.artifact.directory,
            ModelConfig(example.model.name, example.model.arguments),
            optimizer=training.optimizer,
            nesterov=training.nesterov,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            batch_size=training.rows_per_step,
            epochs=1 if quick else training.epochs,
            seed=seed,
            augment=[AugmentConfig.from_dict(each) for each in augment],
        )
        model, test = TrainedModel.open(place).load(), data.split("test")
        outputs = predict_records(model_function(model), data.signature, test)
        return 100 * float((outputs.argmax(axis=1) == record_targets(test)).mean())

    figures: dict[str, list[float]] = {}
    for seed in range(2 if quick else SEEDS):
        data = digits(directory / f"digits-{seed}", seed, (TRAIN, 50, 60) if quick else (TRAIN, VALIDATION, TEST))
        for name, augment in {"none": [], **AUGMENTED}.items():
            figures.setdefault(name, []).append(accuracy(data, name, seed, augment))
    table: dict[str, dict[str, float | str]] = {}
    for name, found in figures.items():
        differences = np.subtract(found, figures["none"])
        mean = float(differences.mean())
        width = float(student.ppf(0.975, len(found) - 1) * differences.std(ddof=1) / len(found) ** 0.5)
        interval = "" if name == "none" else f"{mean:+.2f} ({mean - width:+.2f} to {mean + width:+.2f})"
        table[name] = {"accuracy": float(np.mean(found)), "interval": interval}
    columns = (Column("accuracy", "accuracy", "{:.2f} %"), Column("points over none", "interval"))
    return Table(f"ResNet, SGD, {TRAIN} digits, {len(figures['none'])} seeds", columns, table)


PARTS = {"sgd": sgd_part, "rows": rows_part, "accuracy": accuracy_part}


@benchmark
@part_option(PARTS)
def main(quick: bool, parts: tuple[str, ...]) -> Iterator[Table]:
    """Measure SGD, augmented rows, and the accuracy with and without augmentation."""
    with tempfile.TemporaryDirectory(prefix="recipes-") as directory:
        for part in parts:
            yield PARTS[part](Path(directory), quick)


if __name__ == "__main__":
    main()
