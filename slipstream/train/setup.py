"""Setup of one training attempt, before a checkpoint is read.

It comprises the data, the model and its division among the ranks, the start model and the teacher, and the conditions
of bitwise reproducibility. If the conditions are equal, a resumed run ends with the same bits as an uninterrupted run.
Otherwise the samples and their order are the same, but numbers differ by rounding, or by more if a layer depends on how
a batch is divided among processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from slipstream.artifacts.homes import Holder
from slipstream.artifacts.prepared.data import PreparedData
from slipstream.artifacts.prepared.streamed import open_prepared
from slipstream.artifacts.results.training import ValidationPoint
from slipstream.distributed.process_group import Peers, RankContext
from slipstream.distributed.user_errors import AgreedUserError, same_error_on_all_ranks
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.models.adapters.network import hold_frozen
from slipstream.models.arithmetic import autocast_context, common_precision, device_capability
from slipstream.models.base.fingerprint import BaseRecord, fingerprint_origin
from slipstream.models.base.shape import shaped_for
from slipstream.models.config import ModelConfig, TeachingConfig
from slipstream.models.factory import Predictor, build_model, initial_values
from slipstream.models.initial.values import fill_parameters
from slipstream.models.trained import Architecture, TrainedModel
from slipstream.settings import to_dict
from slipstream.train.checks import (
    check_compiler,
    check_divisible,
    check_memory,
    check_parameters,
    check_pipeline,
    check_rows,
    micro_batch_slices,
    probe_traits,
)
from slipstream.train.config import TrainingConfig
from slipstream.train.data_loader import padding_inputs
from slipstream.train.device_clock import device_clock
from slipstream.train.loop.objective import Teacher
from slipstream.train.loop.optimizer import AveragedWeights, make_optimizer
from slipstream.train.loop.precision import LossScaler
from slipstream.train.loop.probe import ModelTraits
from slipstream.train.loop.state import Progress, TrainingState, copy_weights
from slipstream.train.parallel.compiled import CompiledTraining, compile_blocks
from slipstream.train.parallel.config import GradientsConfig, ParallelConfig
from slipstream.train.parallel.layout import Layout, count_nodes
from slipstream.train.parallel.model import ParallelModel
from slipstream.train.parallel.recompute import recompute_blocks
from slipstream.train.parallel.replicas import ReplicatedModel, check_exchange, replicate_model
from slipstream.train.telemetry.launch import overhead_seconds

LOG = logger("train")
#: Conditions that determine how a global batch is divided into micro-batches.
PARTITIONING = ("processes", "accumulation", "layout")


@dataclass(frozen=True)
class TrainingRequest:
    """Request to train a model in one attempt."""

    #: Directory with the prepared data, or a stub of it.
    prepared: Path
    model: ModelConfig
    training: TrainingConfig
    #: Directory in which rank 0 writes the trained model.
    directory: Path
    #: Checkpoint directory, a path or a store's address.
    home: str
    #: Provenance to write into the manifest of the trained model.
    made_by: Mapping[str, object]
    #: Execution and Flyte attempt that run this training.
    holder: Holder = Holder()
    #: True if another process continues the lease after training, until the model is delivered to Flyte.
    delivered_by_agent: bool = False
    #: Cloud whose preemption notices are polled; "auto" tries all clouds, "none" polls none.
    notices: str = "none"
    #: Seconds from SIGTERM to SIGKILL, in which to save and exit.
    grace_s: float = 25.0
    #: Trained model to start from, with its architecture and weights, instead of a fresh ``model``.
    start: Path | None = None
    #: Trained model to distil from; None without distillation.
    teacher: Path | None = None
    #: Settings of distillation.
    teaching: TeachingConfig = field(default_factory=TeachingConfig)
    #: The user's configured factory, the only untrusted factory that may build the start model and the teacher.
    factory: str = ""
    #: File to which rank 0 writes live progress; None disables it.
    so_far: Path | None = None
    #: Directory in which the telemetry sampler of this machine or pod stores its samples; None without a sampler.
    sampled: Path | None = None
    #: Callback after every evaluation, given on all ranks or on none. Called on rank 0 with all evaluations so far;
    #: True stops all ranks.
    told: Callable[[Sequence[ValidationPoint]], bool] | None = None


@dataclass(frozen=True)
class Lineage:
    """Start model and teacher of a training; either may be None.

    ``start`` gives the architecture and the initial weights. ``teacher`` adds a distillation loss to that of the
    labels.
    """

    start: TrainedModel | None
    teacher: TrainedModel | None
    teaching: TeachingConfig

    @classmethod
    def open(cls, request: TrainingRequest, data: PreparedData) -> Lineage:
        """Open the models of a request.

        Raises ``UserError`` if a model has other inputs or outputs than the data, or a factory that the request does
        not name, or if the training divides the model.
        """
        if request.training.parallel.divides and (request.start or request.teacher):
            raise UserError(
                "training.parallel: a model that is compressed cannot be divided; expected no shard, pipeline or tensor"
            )
        start, teacher = (open_model(each, request.factory, data) for each in (request.start, request.teacher))
        return cls(start, teacher, request.teaching)

    def architecture(self, model: ModelConfig, data: PreparedData) -> Architecture:
        """Return the start model's architecture; without one, that configured by ``model``."""
        if self.start:
            return self.start.architecture
        return Architecture(shaped_for(model, data.signature), data.signature)

    def begin(self, architecture: Architecture, training: TrainingConfig) -> Predictor:
        """Return the model with its initial weights, in training mode.

        It is on the meta device if its weights are filled later: from a base, or drawn by the model's rules.
        """
        if self.start:
            return self.start.load().train()
        return build_model(architecture.config, architecture.signature, training.seed, empty=True)

    def teacher_on(self, device: torch.device, precision: str) -> Teacher | None:
        """Load the teacher to ``device``; None without a teacher. Loading seeds torch's random generators."""
        if self.teacher is None:
            return None
        return Teacher(self.teacher.load().to(device).requires_grad_(False), self.teaching, precision)

    def identity(self) -> dict[str, object]:
        """Return the identity's entries for start model and teacher; empty without them."""
        identity: dict[str, object] = {}
        if self.start:
            identity["start"] = self.start.artifact.content
        if self.teacher:
            identity |= {"teacher": self.teacher.artifact.content, "teaching": to_dict(self.teaching)}
        return identity


def open_model(directory: Path | None, factory: str, data: PreparedData) -> TrainedModel | None:
    if directory is None:
        return None
    model = TrainedModel.open(directory, factory)
    if model.signature != data.signature:
        raise UserError(
            f"{directory}: this model has other inputs or outputs than the prepared data; expected the data that it "
            "was trained on, or data prepared alike (data.earlier)"
        )
    return model


@dataclass(frozen=True)
class Setup:
    """Setup of an attempt, equal on all ranks except for layout coordinates and the rank's part of the model."""

    training: TrainingConfig
    group: RankContext
    data: PreparedData
    lineage: Lineage
    architecture: Architecture
    precision: str
    traits: ModelTraits
    layout: Layout
    parallel: ParallelModel
    #: Compiled blocks; None unless ``training.compile`` is set.
    compiled: CompiledTraining | None
    #: Number of micro-batches per step.
    pieces: int
    #: Seconds of a pass that do not depend on its rows (kernel launches); 0 if unknown.
    overhead: float
    #: :func:`fingerprint_origin` of the base and adapter that training starts from; "" without them.
    origin: str

    @classmethod
    def begin(
        cls, request: TrainingRequest, group: RankContext, exchange: GradientsConfig, on_host: dist.ProcessGroup | None
    ) -> Setup:
        """Build the model and divide or replicate it.

        Raises ``AgreedUserError`` on all ranks (agreed in the group ``on_host``) if, on any rank, data, model, settings
        and devices are incompatible or memory is too small.
        """
        training = request.training
        peers = Peers(group.rank, group.world, on_host)
        abilities = peers.gather(device_capability(group.device))
        with same_error_on_all_ranks(on_host):
            data = open_prepared(request.prepared)
            check_rows(data)
            if training.compile:  # before the model's collectives, in which other ranks would wait
                check_compiler(group.device.type == "cuda")
            check_pipeline(training, gpu=any(ability.gpu for ability in abilities))
            divides = training.parallel.divides
            _, replicas, shards, _ = training.parallel.sizes(group.world, count_nodes(group.world))
            pieces = micro_batch_slices(data, training, replicas * shards)
            lineage = Lineage.open(request, data)
            architecture = lineage.architecture(request.model, data)
            predictor = lineage.begin(architecture, training)
            unfilled = any(parameter.is_meta for parameter in predictor.parameters())
            config, network = architecture.config, predictor.network
            values = initial_values(config, network, training.seed) if unfilled or divides else None
            precision = common_precision(training.precision, abilities)
            if predictor.adapted:
                hold_frozen(predictor.network, precision)
            check_memory(predictor, training, group, precision)
            if values and not divides:
                # On the device and in the final dtypes: host memory may not suffice for one model per process.
                fill_parameters(network.to_empty(device=group.device), values)
            if not (unfilled and divides):
                predictor = predictor.to(group.device)
            traits = probe_traits(predictor, group.device)
            check_divisible(training, traits, precision)
            if training.parallel.uses_fsdp(replicas * shards):
                check_parameters(predictor.network)
            check_exchange(exchange, group.backend, precision)
            if training.recompute == "full":
                recompute_blocks(predictor.network)
            digest = fingerprint_origin(architecture.config) if first_of_machine(group) else ""
            overhead = 0.0
            if not training.compile and not training.parallel.divides:
                overhead = overhead_seconds(
                    predictor,
                    partial(autocast_context, precision, group.device),
                    device_clock(group.device),
                    pieces[0].stop,
                    on_cpu=group.device.type == "cpu",
                    has_batch_statistics=traits.has_batch_statistics,
                )
            compiled = None
            if training.compile and not training.parallel.divides:
                compiled = compile_for(ReplicatedModel(predictor, traits), pieces[:1], precision, group)
        base, origin = architecture.config.base, ""
        if base:
            origin = same_origin(base, peers.gather(digest))
            architecture = replace(architecture, base=BaseRecord(base, origin.partition(" ")[0]))
        if group.rank == 0 and training.precision == "auto" and len(set(abilities)) > 1:
            LOG.warning("training.precision: auto is %s on all ranks, as their devices differ", precision)
        with same_error_on_all_ranks(on_host):
            layout = Layout.connect(training.parallel, group.rank, group.world, group.device)
            parallel: ParallelModel
            if divides and values:
                # The import takes half a second on every process, and most trainings do not need it.
                from slipstream.train.parallel.divide import divide_model

                size = {"micro_batches": len(pieces), "rows": pieces[0].stop}
                parallel = divide_model(predictor, layout, group.device, values, **size, precision=precision)
                if training.compile:
                    # A pipeline takes whole batches only.
                    tried = pieces if training.parallel.pipeline > 1 else pieces[:1]
                    compiled = compile_for(parallel, tried, precision, group)
            else:
                parallel = replicate_model(predictor, traits, group, exchange, training.seed, compiled)
        return cls(
            training=training,
            group=group,
            data=data,
            lineage=lineage,
            architecture=architecture,
            precision=precision,
            traits=traits,
            layout=layout,
            parallel=parallel,
            compiled=compiled,
            pieces=len(pieces),
            overhead=overhead,
            origin=origin,
        )

    def state(self) -> TrainingState:
        """Return the initial state of a training."""
        predictor, training, group = self.parallel.model, self.training, self.group
        return TrainingState(
            parallel=self.parallel,
            optimizer=make_optimizer(predictor, training),
            scaler=LossScaler(group.device, enabled=self.precision == "fp16"),
            best_weights=copy_weights(predictor),
            progress=Progress(),
            traits=self.traits,
            averaged=AveragedWeights(predictor, training.ema) if training.ema else None,
            teacher=self.lineage.teacher_on(group.device, self.precision),
            conditions=bit_identity_conditions(training, group),
        )


def first_of_machine(group: RankContext) -> bool:
    """Return True for the first process of a machine or pod, which does work needed once per machine.

    Rank 0 always counts, because a single process may have its GPU's number as local rank.
    """
    return group.rank == 0 or os.environ.get("LOCAL_RANK") == "0"


def same_origin(address: str, digests: Sequence[str]) -> str:
    """Return the digest of base and adapter on which all machines agree.

    ``digests`` are those of all processes, empty except for the first of every machine. ``address`` is the base's.
    Raises ``AgreedUserError`` on all ranks if digests differ.
    """
    found = {digest for digest in digests if digest}
    if len(found) > 1:
        raise AgreedUserError(
            f"model.base: {address}: machines have {len(found)} different bases there, or adapters in model.lora.start"
            "; expected the same files on all"
        )
    return found.pop()


def compile_for(
    parallel: ParallelModel, pieces: Sequence[slice], precision: str, group: RankContext
) -> CompiledTraining:
    """Compile this rank's part of the model for the micro-batches ``pieces``, and log the speedup."""
    batch = padding_inputs(pieces[-1].stop, parallel.model.signature, group.device)
    found = compile_blocks(parallel, batch, pieces, partial(autocast_context, precision, group.device))
    if group.rank == 0:
        gain = found.figures.plain_pass_s / found.figures.pass_s
        LOG.info(
            "model compiled in %.1f s; a pass is %.2f times as fast as without compilation", found.figures.seconds, gain
        )
    return found


def bit_identity_conditions(training: TrainingConfig, group: RankContext) -> dict[str, object]:
    """Return the conditions, beyond the identity, under which a resumed run is bit-identical."""
    gpu = group.device.type == "cuda"
    return {
        "processes": group.world,
        "accumulation": training.micro_batches,
        "layout": layout_in_words(training.parallel),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "backend": group.backend,
        "device": torch.cuda.get_device_name(group.device) if gpu else torch.backends.cpu.get_cpu_capability(),
    }


def layout_in_words(parallel: ParallelConfig) -> str:
    """Return the non-default settings of the layout as text."""
    changed = {name: value for name, value in vars(parallel).items() if value != getattr(ParallelConfig(), name)}
    return " ".join(f"{name} {value}" for name, value in changed.items()) or "none"


def describe_changes(then: Mapping[str, object], now: Mapping[str, object], model: nn.Module) -> str:
    """Return a sentence on changed conditions since the checkpoint, and their effect; "" without changes."""
    changed = [name for name in now if name in then and then[name] != now[name]]
    if not changed:
        return ""
    changes = ", ".join(f"{name} {then[name]} -> {now[name]}" for name in changed)
    layers = batch_dependent_layers(model) if set(changed) & set(PARTITIONING) else []
    numbers = f"other numbers ({', '.join(layers)})" if layers else "numbers equal up to rounding"
    return (
        f"training resumes, but training resumes, but not bit for bit ({changes}): the same samples in the same "
        f"order, {numbers}"
    )


def batch_dependent_layers(model: nn.Module) -> list[str]:
    """Return types of layers whose results depend on how a batch is divided: batch normalisation and dropout."""
    return sorted(
        {
            type(module).__name__
            for module in model.modules()
            if isinstance(module, _BatchNorm)
            or (isinstance(module, _DropoutNd) and module.p > 0)
            # Attention and recurrent layers store their dropout as a number.
            or (isinstance(dropout := getattr(module, "dropout", None), float) and dropout > 0)
        }
    )
