"""What is trained, on which rows, and how it is divided among the ranks: what there is before a checkpoint is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from tasks.artifacts.prepared.data import PreparedData
from tasks.artifacts.prepared.streamed import open_prepared
from tasks.distributed.agreement import same_error_on_all_ranks
from tasks.distributed.process_group import Group
from tasks.errors import UserError
from tasks.logs import logger
from tasks.models.factory import Predictor
from tasks.models.trained import Architecture
from tasks.train.arithmetic.ema import AveragedWeights
from tasks.train.arithmetic.precision import LossScaler, autocast, resolve_precision
from tasks.train.config import TrainingConfig
from tasks.train.data.loader import layout as layout_of
from tasks.train.data.loader import padding
from tasks.train.data.order import GlobalOrder
from tasks.train.lineage import Lineage
from tasks.train.loop.probe import Traits, probe
from tasks.train.loop.state import Progress, TrainingState, weights_of
from tasks.train.loop.step import make_optimizer, micro_batches, padded_rows
from tasks.train.parallel.compiled import Compiled, compiled
from tasks.train.parallel.config import GradientsConfig
from tasks.train.parallel.layout import Layout
from tasks.train.parallel.model import ParallelModel
from tasks.train.parallel.replicas import check_exchange, replicate
from tasks.train.request import TrainingRequest
from tasks.train.survival.reproducibility import conditions

LOG = logger("train")
META = torch.device("meta")


@dataclass(frozen=True)
class Setup:
    """The same on all ranks, but for the place in the layout and the part of the model that a rank holds."""

    data: PreparedData
    lineage: Lineage
    architecture: Architecture
    precision: str
    traits: Traits
    layout: Layout
    parallel: ParallelModel
    #: The compiled pass, if ``training.compile`` asks for it.
    compiled: Compiled | None

    @classmethod
    def begin(cls, request: TrainingRequest, group: Group, exchange: GradientsConfig) -> Setup:
        """Build the network and divide or replicate it. Raises ``AgreedUserError`` on all ranks if one of them finds
        that the data, the model, the settings or the devices do not go together."""
        training = request.training
        with same_error_on_all_ranks():
            data = open_prepared(request.prepared)
            check_rows(data)
            lineage = Lineage.open(request.start, request.teacher, request.teaching, data, training.parallel.divides)
            architecture = lineage.architecture(request.model, data)
            predictor = lineage.begin(architecture, training)
            precision = resolve_precision(training.precision, group.device)
            empty = any(parameter.is_meta for parameter in predictor.parameters())
            traits = probe(predictor if empty else predictor.to(group.device), META if empty else group.device)
            check_divisible(training, traits, precision)
            check_exchange(exchange, group, precision)
            fast = compile_pass(predictor, data, training, precision, group) if training.compile else None
        with same_error_on_all_ranks():
            layout = Layout.connect(training.parallel, group.rank, group.world, group.device)
            parallel: ParallelModel = (
                divide_model(predictor, data, training, layout, group, precision)
                if training.parallel.divides
                else replicate(predictor, traits, group, exchange, training.seed, fast)
            )
        return cls(data, lineage, architecture, precision, traits, layout, parallel, fast)

    def state(self, training: TrainingConfig, group: Group) -> TrainingState:
        """The state of a training from its beginning."""
        predictor = self.parallel.model
        return TrainingState(
            parallel=self.parallel,
            optimizer=make_optimizer(predictor, training),
            scaler=LossScaler(group.device, enabled=self.precision == "fp16"),
            best_weights=weights_of(predictor),
            progress=Progress(),
            traits=self.traits,
            averaged=AveragedWeights(predictor, training.ema) if training.ema else None,
            teacher=self.lineage.teacher_on(group.device, self.precision),
            conditions=conditions(training, group),
        )


def pieces_of(data: PreparedData, training: TrainingConfig, shares: int) -> list[slice]:
    """The micro-batches of a padded share of a batch."""
    largest = GlobalOrder(layout_of(data, "train"), training.batch_size, training.seed).largest
    return micro_batches(padded_rows(-(-largest // shares), training.accumulation), training.accumulation)


def divide_model(
    predictor: Predictor, data: PreparedData, training: TrainingConfig, layout: Layout, group: Group, precision: str
) -> ParallelModel:
    """Divide the model for micro-batches of the size that this training has."""
    # Half a second on every process, which most trainings need not spend.
    from tasks.train.parallel.divide import divide

    pieces = pieces_of(data, training, layout.data_size)
    size = {"micro_batches": len(pieces), "rows": pieces[0].stop}
    return divide(predictor, layout, group.device, training.seed, **size, precision=precision)


def compile_pass(
    predictor: Predictor, data: PreparedData, training: TrainingConfig, precision: str, group: Group
) -> Compiled:
    """Compile the model's pass for micro-batches of the size and layout that this training has."""
    pieces = pieces_of(data, training, group.world)
    inputs = tuple(x[pieces[0]] for x in padding(pieces[-1].stop, data.signature, group.device))
    found = compiled(predictor, inputs, partial(autocast, precision, group.device))
    if group.rank == 0:
        gain = found.figures["plain_pass_s"] / found.figures["pass_s"]
        LOG.info("compiled in %.1f s; a pass is %.2f times as fast as without", found.figures["seconds"], gain)
    return found


def check_divisible(training: TrainingConfig, traits: Traits, precision: str) -> None:
    """Raise ``UserError`` for models and types of numbers that no layout divides, and models that are not compiled."""
    if training.compile and traits.couples_rows:
        raise UserError(
            "training.compile: false expected: this model has batch normalisation or buffers that change, so its "
            "batches are not padded, and each size would be compiled for itself"
        )
    if training.parallel.divides and traits.couples_rows:
        raise UserError(
            "training.parallel: this model has batch normalisation or buffers that change, which cannot be divided; "
            "expected no shard, pipeline or tensor, or layer or group normalisation instead"
        )
    if training.parallel.divides and precision == "fp16":
        raise UserError(
            "training.precision: fp16 is not allowed with training.parallel, where its loss scaling was never tried; "
            "expected bf16 or fp32"
        )


def check_rows(data: PreparedData) -> None:
    """Raise ``UserError`` if the training or the validation split has no rows."""
    for split in ("train", "validation"):
        if not sum(data.segment_rows(split)):
            raise UserError(f"data.split: no row fell into the {split} split; give more rows or larger shares")
