"""What is trained, on which rows, and how it is divided among the ranks: what there is before a checkpoint is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.prepared.streamed import open_prepared
from slipstream.distributed.agreement import same_error_on_all_ranks
from slipstream.distributed.process_group import Group
from slipstream.logs import logger
from slipstream.models.factory import Predictor
from slipstream.models.trained import Architecture
from slipstream.train.checks import check_divisible, check_parameters, check_rows, pieces_of, traits_of
from slipstream.train.config import TrainingConfig
from slipstream.train.data.loader import padding
from slipstream.train.fault_tolerance.reproducibility import conditions
from slipstream.train.lineage import Lineage
from slipstream.train.loop.probe import Traits
from slipstream.train.loop.state import Progress, TrainingState, weights_of
from slipstream.train.loop.step import make_optimizer
from slipstream.train.optim.ema import AveragedWeights
from slipstream.train.optim.precision import LossScaler, autocast, resolve_precision
from slipstream.train.parallel.compiled import Compiled, compiled
from slipstream.train.parallel.config import GradientsConfig
from slipstream.train.parallel.layout import Layout, nodes
from slipstream.train.parallel.model import ParallelModel
from slipstream.train.parallel.replicas import check_exchange, replicate
from slipstream.train.request import TrainingRequest

LOG = logger("train")


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
            _, replicas, shards, _ = training.parallel.sizes(group.world, nodes(group.world))
            pieces = pieces_of(data, training, replicas * shards)
            lineage = Lineage.open(request, data)
            architecture = lineage.architecture(request.model, data)
            predictor = lineage.begin(architecture, training)
            precision = resolve_precision(training.precision, group.device)
            if not any(parameter.is_meta for parameter in predictor.parameters()):
                predictor = predictor.to(group.device)
            traits = traits_of(predictor, group.device)
            check_divisible(training, traits, precision)
            if training.parallel.uses_fsdp(replicas * shards):
                check_parameters(predictor.network)
            check_exchange(exchange, group.backend, precision)
            fast = compile_pass(predictor, pieces, precision, group) if training.compile else None
        with same_error_on_all_ranks():
            layout = Layout.connect(training.parallel, group.rank, group.world, group.device)
            parallel: ParallelModel = (
                divide_model(predictor, layout, group.device, training.seed, pieces, precision)
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


def divide_model(
    predictor: Predictor, layout: Layout, device: torch.device, seed: int, pieces: list[slice], precision: str
) -> ParallelModel:
    """Divide the model for the micro-batches ``pieces``."""
    # Half a second on every process, which most trainings need not spend.
    from slipstream.train.parallel.divide import divide

    size = {"micro_batches": len(pieces), "rows": pieces[0].stop}
    return divide(predictor, layout, device, seed, **size, precision=precision)


def compile_pass(predictor: Predictor, pieces: list[slice], precision: str, group: Group) -> Compiled:
    """Compile the model's pass for the micro-batches ``pieces``, as they lie in a batch."""
    inputs = tuple(x[pieces[0]] for x in padding(pieces[-1].stop, predictor.signature, group.device))
    found = compiled(predictor, inputs, partial(autocast, precision, group.device))
    if group.rank == 0:
        gain = found.figures.plain_pass_s / found.figures.pass_s
        LOG.info("compiled in %.1f s; a pass is %.2f times as fast as without", found.figures.seconds, gain)
    return found
