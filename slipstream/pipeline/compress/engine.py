"""Compression of a trained model: candidates, their losses, and the choice.

The trainer trains a candidate between :func:`propose_model` and :func:`evaluate_candidate`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.pipeline.compress.config import MOST_CANDIDATES, CompressionConfig
from slipstream.pipeline.compress.groups import PruningGroup, find_groups, unite_prunings
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.compression import Compression, CompressionTrial, ModelSize, TeachingGain
from slipstream.shared.artifacts.results.export import Estimate
from slipstream.shared.comparison.latencies import Workload, measure_latencies
from slipstream.shared.comparison.quality import UNITS, QualityLoss, in_words, quality_loss
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.metrics import HEADLINE, compute_scores
from slipstream.shared.models.predict import (
    ModelFunction,
    decided_outputs,
    held_out_rows,
    model_function,
    record_inputs,
    record_targets,
)
from slipstream.shared.models.pruning import LAYERS, Side, compose_prunings, count_units, prune_model, unit_dimension
from slipstream.shared.models.tables_and_images import MLP, ResNet
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained

#: Name of the trained model among the timed models; then seconds of the whole measurement, and rows per call.
WHOLE = "as trained"
SECONDS, TIMED_ROWS = 2.0, 32
NO_TIME = "whether its teacher helps was not measured, as compression.minutes leave no time for another training"


@dataclass(frozen=True)
class CompressionRun:
    trained: TrainedModel
    data: PreparedData
    config: CompressionConfig
    #: Seed of a student's initial weights.
    seed: int = 0

    def check(self) -> None:
        """Raise ``UserError`` if the model does not fit the data, or has adapters."""
        if self.trained.config.lora.rank:
            raise UserError(
                f"{self.trained.artifact.directory}: holds adapters, and a model with adapters cannot be compressed; "
                "expected a model without adapters"
            )
        signature = self.trained.signature
        if signature != self.data.signature:
            raise UserError(
                f"{self.trained.artifact.directory}: this model has other inputs or outputs than the prepared data; "
                "expected the data that it was trained on, or data prepared the same way (data.earlier)"
            )

    def names(self) -> list[str]:
        """Return the names of the candidates, the least compressed first."""
        if self.config.method == "prune":
            return [f"{100 * share:g} % fewer units" for share in removable_shares(self.config)]
        return [
            arguments_in_words(differing_arguments(student.arguments, self.trained.config.arguments))
            for student in self.students()
        ]

    def students(self) -> list[ModelConfig]:
        return student_configs(self.trained.config, self.trained.signature, self.config)


def differing_arguments(arguments: Mapping[str, object], others: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in arguments.items() if others.get(name) != value}


def propose_model(
    directory: Path,
    work: CompressionRun,
    tried: Sequence[CompressionTrial],
    made_by: Mapping[str, object],
    untaught: bool = False,
) -> Artifact:
    """Write the next model to train, with its initial weights, as a trained model.

    If the search or its time is over, writes an already trained candidate again; with ``untaught`` the candidate to
    train without its teacher. Raises ``UserError`` if the model cannot be compressed.
    """
    work.check()
    best = untaught_candidate(tried, work.config) if untaught else None
    candidate = best.candidate if best else next_candidate(len(work.names()), tried, work.config)
    if work.config.method == "prune":
        return write_pruned(directory, work, removable_shares(work.config)[candidate], made_by)
    student = Architecture(work.students()[candidate], work.trained.signature)
    weights = build_model(student.config, student.signature, work.seed).state_dict()
    return write_trained(directory, student, weights, weights, made_by)


def write_pruned(directory: Path, work: CompressionRun, share: float, made_by: Mapping[str, object]) -> Artifact:
    """Remove the least important ``share`` of the units of every group and write the model."""
    trained = work.trained
    model = trained.load()
    groups = find_groups(model)
    scores_of_groups = unit_importance(model, groups, work.data)
    retained = unite_prunings(
        [g.retained(units_to_keep(g, of, share)) for g, of in zip(groups, scores_of_groups, strict=True)]
    )
    prune_model(model.network, retained)
    pruned = replace(trained.architecture, retained=compose_prunings(trained.architecture.retained, retained))
    pruned.empty()  # refuses a model that does not run with these units
    weights = model.state_dict()
    return write_trained(directory, pruned, weights, weights, made_by, trained.inherited_files())


def evaluate_candidate(
    work: CompressionRun, fine_tuned: TrainedModel, seconds: float, tried: Sequence[CompressionTrial]
) -> list[CompressionTrial]:
    """Return ``tried`` with the result of ``fine_tuned``, the candidate of :func:`propose_model` after training."""
    candidate = next_candidate(len(work.names()), tried, work.config)
    if any(one.candidate == candidate for one in tried):
        return list(tried)
    rows = work.data.split("validation")
    outputs = decided_outputs(fine_tuned, rows)
    loss = loss_on(work, outputs, rows)
    return [
        *tried,
        CompressionTrial(
            candidate,
            work.names()[candidate],
            size_of(fine_tuned),
            value_of(work, outputs, rows),
            loss.loss,
            loss.low,
            loss.high,
            loss.rows,
            loss.answer(work.config.max_loss),
            seconds,
        ),
    ]


def value_of(work: CompressionRun, outputs: np.ndarray, rows: np.ndarray) -> float:
    task = work.trained.signature.task
    return cast(float, compute_scores(task, outputs, record_targets(rows)).of(HEADLINE[task][0]))


def loss_on(work: CompressionRun, outputs: np.ndarray, rows: np.ndarray) -> QualityLoss:
    before = decided_outputs(work.trained, rows)
    return quality_loss(work.trained.signature.task, record_targets(rows), before, outputs, work.config.max_loss)


def size_of(model: TrainedModel) -> ModelSize:
    network = model.load()
    layers = [module for module in network.modules() if type(module) in LAYERS and "in" in LAYERS[type(module)]]
    return ModelSize(sum(p.numel() for p in network.parameters()), [count_units(layer, "out") for layer in layers[:-1]])


def speeds_of(work: CompressionRun, fine_tuned: Mapping[str, TrainedModel], rows: np.ndarray) -> dict[str, Estimate]:
    networks = {WHOLE: work.trained, **fine_tuned}
    loads = {name: partial(load_anew, model) for name, model in networks.items()}
    timed = measure_latencies(loads, WHOLE, Workload(work.trained.signature, rows, 1), SECONDS, [TIMED_ROWS])
    return {name: speedup for name in fine_tuned if (speedup := timed[name][str(TIMED_ROWS)].speedup)}


def load_anew(model: TrainedModel) -> ModelFunction:
    return model_function(model.load())


def choose_model(
    work: CompressionRun, fine_tuned: Sequence[TrainedModel], tried: Sequence[CompressionTrial]
) -> tuple[TrainedModel, Compression]:
    """Return the model to continue with, and the record of the compression.

    ``fine_tuned`` are the trained candidates in the order of ``tried``, then candidates that :func:`propose_model`
    repeated after the search, and last the best candidate without its teacher, if :func:`untaught_candidate` names one.
    The test rows are used once, for the best candidate.
    """
    config, signature, rows = work.config, work.trained.signature, work.data.split("validation")
    metric, _ = HEADLINE[signature.task]
    given = not config.searches
    models = {one.name: model for one, model in zip(tried, fine_tuned, strict=False)}
    compression = Compression(
        config.method,
        metric,
        size_of(work.trained),
        value_of(work, decided_outputs(work.trained, rows), rows),
        list(tried),
        speeds_of(work, models, rows[:TIMED_ROWS]),
        TIMED_ROWS,
    )
    winner = best_candidate(tried, config)
    if winner is None:
        why = (
            f"none of {len(tried)} models was shown to lose less than the {config.max_loss:g} {UNITS[signature.task]} "
            "allowed, on the validation rows"
        )
        return work.trained, replace(compression, why=why)
    model, taught_words = models[winner.name], ""
    if config.method == "distil" and config.teaching.weight and len(fine_tuned) > len(tried):
        gain = teaching_gain(work, model, fine_tuned[-1]) if untaught_candidate(tried, config) else None
        model = fine_tuned[-1] if gain and gain.kept == "labels" else model
        compression = replace(compression, teaching=gain)
        taught_words = f"; {gain or NO_TIME}"
    rows = held_out_rows(work.data)
    loss = loss_on(work, decided_outputs(model, rows), rows)
    answer, words = loss.answer(config.max_loss), in_words(loss, signature.task, config.max_loss, "test")
    if given or config.passes(answer):
        doubt = (
            ""
            if answer == "passed"
            else " (taken anyway: " + ("it was requested)" if given else "compression.when_in_doubt)")
        )
        return model, replace(compression, taken=winner.name, why=words + doubt + taught_words)
    return work.trained, replace(compression, why=f"{winner.name}: {words}{taught_words}")


def best_candidate(tried: Sequence[CompressionTrial], config: CompressionConfig) -> CompressionTrial | None:
    """Return the candidate to take, if its test rows agree; None if the trained model stays."""
    return smallest_passing(tried, config) if config.searches else tried[0]


def untaught_candidate(tried: Sequence[CompressionTrial], config: CompressionConfig) -> CompressionTrial | None:
    """Return the student that is trained without its teacher, too.

    None without a teacher, without a student to take, or if the training would end after ``compression.minutes``.
    """
    best = best_candidate(tried, config)
    if config.method != "distil" or not config.teaching.weight or best is None:
        return None
    spent = sum({one.candidate: one.seconds for one in tried}.values())
    return best if spent + best.seconds <= 60 * config.minutes else None


def teaching_gain(work: CompressionRun, taught: TrainedModel, untaught: TrainedModel) -> TeachingGain:
    """Return what the teacher gained on the validation rows."""
    task, rows = work.trained.signature.task, work.data.split("validation")
    before, after = (decided_outputs(model, rows) for model in (untaught, taught))
    loss = quality_loss(task, record_targets(rows), before, after, work.config.max_loss)
    gain, low, high = (round(-value, 6) + 0.0 for value in (loss.loss, loss.high, loss.low))
    return TeachingGain(Estimate(gain, low, high), UNITS[task], loss.rows, "labels" if gain < 0 else "teacher")


def removable_shares(config: CompressionConfig) -> list[float]:
    """Return the fractions of units that pruning may remove, one per candidate."""
    steps = MOST_CANDIDATES + 1
    return [config.share] if config.share else [step / steps for step in range(1, steps)]


def smallest_passing(tried: Sequence[CompressionTrial], config: CompressionConfig) -> CompressionTrial | None:
    """Return the most compressed passing candidate."""
    passed = [one for one in tried if config.passes(one.answer)]
    return max(passed, key=lambda one: one.candidate, default=None)


def next_candidate(count: int, tried: Sequence[CompressionTrial], config: CompressionConfig) -> int:
    """Return the index of the candidate to train next, by bisection of ``count`` candidates.

    If the search or its time is over, return a trained candidate: the best, or else the last.
    """
    good = {one.candidate for one in tried if config.passes(one.answer)}
    low = max(good, default=-1)
    high = min((one.candidate for one in tried if one.candidate > low and one.candidate not in good), default=count)
    spent = sum({one.candidate: one.seconds for one in tried}.values())
    if tried and (high - low <= 1 or spent >= 60 * config.minutes):
        return low if good else tried[-1].candidate
    return (low + high) // 2


#: Built-in models with the argument that holds their widths; and the fractions of the widths that students have.
WIDTHS = {"mlp": (MLP, "hidden"), "resnet": (ResNet, "widths")}
SHARES = (0.75, 0.5, 0.375, 0.25, 0.1875, 0.125, 0.0625)
#: Divisor of widths, for group normalisation.
MULTIPLE = 8


def student_configs(trained: ModelConfig, signature: Signature, config: CompressionConfig) -> list[ModelConfig]:
    """Return the models of ``compression.students``, else narrower versions of the trained model; the largest first.

    Raises ``UserError`` if a student is no smaller than the trained model or cannot be built, or if none is named for a
    model that is not built in.
    """
    wanted = config.students or narrower_arguments(trained)
    students = [ModelConfig(trained.name, {**trained.arguments, **arguments}) for arguments in wanted]
    sizes = [count_parameters(student, signature) for student in students]
    whole = count_parameters(trained, signature)
    for student, arguments, size in zip(students, wanted, sizes, strict=True):
        if size >= whole:
            raise UserError(
                f"compression.students: {arguments_in_words(arguments)} has {size:,} parameters, not fewer than the "
                "trained "
                f"model's {whole:,}; expected arguments that make {student.name} smaller"
            )
    return [students[index] for index in sorted(range(len(students)), key=lambda index: -sizes[index])]


def narrower_arguments(trained: ModelConfig) -> list[dict[str, object]]:
    if trained.name not in WIDTHS:
        raise UserError(
            f"compression.students: there is no rule to make {trained.name} smaller; expected a list of arguments of "
            'its factory, such as [{"hidden": [96, 48]}]'
        )
    network, argument = WIDTHS[trained.name]
    widths = trained.arguments.get(argument) or inspect.signature(network).parameters[argument].default
    candidates: list[dict[str, object]] = []
    for share in SHARES:
        scaled = [min(width, max(MULTIPLE, round(share * width / MULTIPLE) * MULTIPLE)) for width in widths]
        if scaled != list(widths) and {argument: scaled} not in candidates:
            candidates.append({argument: scaled})
    if not candidates:
        raise UserError(
            "compression.students: this model is too small to be made narrower; train it without compression"
        )
    return candidates


def count_parameters(config: ModelConfig, signature: Signature) -> int:
    """Return the number of parameters. Raises ``UserError`` if the model cannot be built."""
    try:
        return sum(p.numel() for p in build_model(config, signature, seed=0, empty=True).parameters())
    except UserError as error:
        raise UserError(f"compression.students: {error.message}") from error


def arguments_in_words(arguments: Mapping[str, object]) -> str:
    """Return the arguments as text, such as ``hidden 96-48``."""
    values = {
        name: "-".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        for name, value in arguments.items()
    }
    return ", ".join(f"{name} {value}" for name, value in values.items())


# To first order, zeroing a unit's weights changes the loss by the sum of weight times gradient (Molchanov et al. 2019,
# "Importance Estimation for Neural Network Pruning"). This change is squared and added up over batches and members.
#: Number of batches and rows per batch, evenly spaced in the training split.
BATCHES, ROWS = 32, 64


def unit_importance(model: Predictor, groups: Sequence[PruningGroup], data: PreparedData) -> list[Tensor]:
    """Return the estimates of every group's units, float64 ``[units]``. ``model`` is in evaluation mode."""
    records = data.sample("train", BATCHES * ROWS)
    sums = [torch.zeros(group.units, dtype=torch.float64) for group in groups]
    for start in range(0, len(records), ROWS):
        add_batch(model, groups, records[start : start + ROWS], sums)
    return sums


def add_batch(model: Predictor, groups: Sequence[PruningGroup], records: np.ndarray, sums: Sequence[Tensor]) -> None:
    inputs = [torch.from_numpy(array) for array in record_inputs(model.signature, records)]
    target = torch.from_numpy(record_targets(records))
    model.zero_grad(set_to_none=True)
    outputs = model(*inputs)
    if model.signature.task == "regression":
        loss = (((outputs[:, 0] - target) / model.signature.target_std) ** 2).mean()
    else:
        loss = functional.cross_entropy(outputs.flatten(0, -2), target.long().flatten())
    loss.backward()
    for group, total in zip(groups, sums, strict=True):
        for member in group.members:
            changes = change_by_index(model.network.get_submodule(member.name), member.side)
            if changes is not None:
                total += changes[member.indices].sum(dim=1) ** 2
    model.zero_grad(set_to_none=True)


@torch.no_grad()
def change_by_index(module: nn.Module, side: Side) -> Tensor | None:
    """Return the sum of weight times gradient for each input (``side`` "in") or output of a layer, in float64.

    It is the first-order change of the loss. None if no parameter with a gradient has that dimension.
    """
    sums = [
        (p * p.grad).double().transpose(0, dim).flatten(1).sum(dim=1) if p.ndim > 1 else (p * p.grad).double()
        for p in module.parameters(recurse=False)
        if p.grad is not None and p.ndim > (dim := unit_dimension(module, p, side))
    ]
    return torch.stack(sums).sum(dim=0) if sums else None


def units_to_keep(group: PruningGroup, importance: Tensor, share: float) -> list[int]:
    """Return the units to keep, in order, if about ``share`` of all units are removed.

    The most important units of every block are kept, at least one.
    """
    length = group.units // group.blocks
    number = max(1, round((1 - share) * length))
    best = importance.reshape(group.blocks, length).topk(number, dim=1).indices
    return (best + torch.arange(group.blocks)[:, None] * length).sort(dim=1).values.flatten().tolist()
