"""Results of the steps of a training: each is the input of the next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from slipstream.pipeline.train.applied_tuning import AppliedTuning
from slipstream.pipeline.train.checkpoint.manager import Checkpoints, RestoredCheckpoint
from slipstream.pipeline.train.checkpoint.restore import ResumePolicy
from slipstream.pipeline.train.config import NO_LONGER_LASTING, TrainingConfig
from slipstream.pipeline.train.data_loader import padding_inputs
from slipstream.pipeline.train.documents import document_layout, kernel_takes_documents
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.identity import bit_identity_conditions, run_identity
from slipstream.pipeline.train.loop.goal import class_weights
from slipstream.pipeline.train.loop.optimizer import AveragedWeights, make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.memory.decision import DecisionConditions
from slipstream.pipeline.train.parallel.compiled import CompiledTraining, compile_blocks
from slipstream.pipeline.train.parallel.layout import Layout, ParallelModel
from slipstream.pipeline.train.request import Lineage, TrainingRequest
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import AgreedUserError
from slipstream.shared.logs import logger
from slipstream.shared.models.arithmetic import DeviceCapability, autocast_context
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, resolve_model_name
from slipstream.shared.models.initial.drawn import InitialValues
from slipstream.shared.models.trained import Architecture
from slipstream.shared.settings import to_dict

LOG = logger("train")


@dataclass(frozen=True)
class ResolvedTraining:
    """Inputs of a training, equal on all ranks: nothing is "auto", and every file is open."""

    #: The request with its number of micro-batches.
    request: TrainingRequest
    group: RankContext
    #: Conditions for which the number of micro-batches holds.
    made_for: DecisionConditions
    data: PreparedData
    lineage: Lineage
    architecture: Architecture
    #: Files of the trained model with its base's settings; on rank 0 only.
    inherited: Mapping[str, bytes]
    precision: str
    #: Micro-batches of one rank's batch.
    pieces: list[slice]
    #: True if all ranks compute the loss of tokens by Triton kernels.
    fused_loss: bool
    #: Number of data-parallel ranks.
    data_ranks: int

    @property
    def training(self) -> TrainingConfig:
        return self.request.training


@dataclass(frozen=True)
class BuiltModel:
    """Model before it takes memory on a device; its weights may be on the meta device."""

    resolved: ResolvedTraining
    predictor: Predictor
    #: Values to fill the weights with once no checkpoint could be restored; None if they are filled.
    values: InitialValues | None

    @property
    def unfilled(self) -> bool:
        """True if any weight is on the meta device."""
        return any(parameter.is_meta for parameter in self.predictor.parameters())


@dataclass(frozen=True)
class PlacedModel:
    """Whole model on this rank's device; on the meta device if it is to be divided."""

    resolved: ResolvedTraining
    predictor: Predictor
    #: As in :class:`BuiltModel`.
    values: InitialValues | None
    traits: ModelTraits
    #: Compiled blocks of a replica; None unless ``training.compile`` is set, and before a division.
    compiled: CompiledTraining | None
    #: Seconds of a pass that do not depend on its rows (kernel launches); 0 if unknown.
    overhead: float
    #: :attr:`.ModelOrigin.digest` of the base and adapter that training starts from; "" without them.
    origin: str


@dataclass(frozen=True)
class Setup:
    """Setup of an attempt, equal on all ranks except for layout coordinates and the rank's part of the model."""

    resolved: ResolvedTraining
    traits: ModelTraits
    #: As in :class:`PlacedModel`, which is not kept: it holds the undivided model.
    overhead: float
    origin: str
    layout: Layout
    parallel: ParallelModel
    #: Compiled blocks; None unless ``training.compile`` is set.
    compiled: CompiledTraining | None
    #: As in :class:`BuiltModel`.
    values: InitialValues | None

    @property
    def training(self) -> TrainingConfig:
        return self.resolved.training

    @property
    def group(self) -> RankContext:
        return self.resolved.group

    def initial_state(self) -> TrainingState:
        """Return the state before the first step. Loading a teacher seeds torch's random generators."""
        predictor, training, group = self.parallel.model, self.training, self.group
        weights = class_weights(training, self.resolved.data)
        return TrainingState(
            parallel=self.parallel,
            optimizer=make_optimizer(predictor, training),
            scaler=LossScaler(group.device, enabled=self.resolved.precision == "fp16"),
            best_weights=copy_weights(predictor) if group.rank == 0 or not self.parallel.is_whole else {},
            progress=Progress(),
            traits=self.traits,
            averaged=AveragedWeights(predictor, training.ema) if training.ema else None,
            teacher=self.resolved.lineage.teacher_on(group.device, self.resolved.precision),
            fused_loss=self.resolved.fused_loss,
            class_weights=None if weights is None else torch.from_numpy(weights).to(group.device),
            conditions=bit_identity_conditions(training, group) | self.kernels,
        )

    @property
    def kernels(self) -> dict[str, object]:
        """Return the conditions of bitwise equality that automatic settings and this device decide."""
        found: dict[str, object] = {"compiled": self.compiled is not None}
        if self.resolved.data.signature.task == "next token":
            found["loss"] = "fused" if self.resolved.fused_loss else "reference"
        if self.resolved.data.signature.document_start >= 0:
            kernel = kernel_takes_documents(self.group.device, self.resolved.precision)
            found["documents"] = (
                "bounds" if document_layout(self.parallel.model_parts[0], 1, 1, kernel=kernel) else "mask"
            )
        return found

    def resume_policy(self, applied: AppliedTuning, code: tuple[str, dict[str, str]], passed_s: float) -> ResumePolicy:
        """Return the policy that decides which checkpoints this training resumes from.

        ``code`` comes from :func:`.training_code`; ``passed_s`` are the seconds since the start of the attempt.
        """
        resolved, training, config = self.resolved, self.training, self.resolved.architecture.config
        this = run_identity(resolved.data, config, training, applied, self.origin)
        this |= resolved.lineage.identity()
        version, modules = code
        return ResumePolicy(
            this,
            version=version,
            modules=modules,
            holder=resolved.request.holder,
            resume=training.resume,
            defaults={"model": to_dict(ModelConfig()), "training": to_dict(TrainingConfig())},
            ignored=NO_LONGER_LASTING,
            layout=self.layout.sizes if training.parallel.divides else (),
            grace_s=max(0.0, resolved.request.grace_s - passed_s),
        )


@dataclass(frozen=True)
class ResumedTraining:
    """Training that is ready for its next step."""

    setup: Setup
    state: TrainingState
    checkpoints: Checkpoints
    guard: Guard
    #: Checkpoint that training continues from; None at the start.
    restored: RestoredCheckpoint | None
    #: Number of steps that earlier attempts have taken.
    first_step: int


@dataclass(frozen=True)
class TrainedState:
    """Training after its last step; its checkpoints are published, and only the model is to be written."""

    resumed: ResumedTraining
    #: Record files to write with the weights, by name.
    record: dict[str, bytes]


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


def suits_compilation(architecture: Architecture, ranks: Sequence[DeviceCapability]) -> bool:
    """Return True for a transformer on GPUs: it gains most, and every block is compiled once."""
    name = resolve_model_name(architecture.config, architecture.signature)
    return name == "transformer" and all(rank.gpu for rank in ranks)


def compile_for(
    parallel: ParallelModel, pieces: Sequence[slice], precision: str, group: RankContext
) -> CompiledTraining:
    """Compile this rank's part of the model for the micro-batches ``pieces``, and log the speedup."""
    batch = padding_inputs(pieces[-1].stop, parallel.model.signature, group.device)
    kernel = kernel_takes_documents(group.device, precision)
    layout = document_layout(parallel.model_parts[0], pieces[0].stop, len(pieces), kernel=kernel)
    documents = layout.whole_rows().to(group.device) if layout else None
    found = compile_blocks(parallel, batch, pieces, partial(autocast_context, precision, group.device), documents)
    if group.rank == 0:
        gain = found.figures.plain_pass_s / found.figures.pass_s
        LOG.info(
            "model compiled in %.1f s; a pass is %.2f times as fast as without compilation", found.figures.seconds, gain
        )
    return found
