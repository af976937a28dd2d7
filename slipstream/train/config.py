"""The settings of training."""

from __future__ import annotations

import json
from dataclasses import field
from typing import Annotated, Literal, get_type_hints

from pydantic import Field

from slipstream.settings import LARGEST, Natural, Positive, Seed, Settings, settings, to_dict
from slipstream.train.parallel.config import GradientsConfig, ParallelConfig

#: Version of the arithmetic of a step. Raise it when a change of the code changes what a step computes on purpose: a
#: training that was begun before is then begun again instead of going on with other arithmetic.
STEP_VERSION = 1

#: Marks a setting that may be another when a training is resumed: it does not decide the result, or only by rounding.
#: All others must equal the checkpoint's, and are part of the key of its home.
MAY_CHANGE = "may change on resume"


@settings
class StepProfileConfig(Settings):
    """Which steps are profiled."""

    section = "training.profile"

    steps: Natural = 0
    """Steps of which the report shows the operations and has a trace, from the sixth on; 0 means none."""


@settings
class TrainingConfig(Settings):
    """How it is trained. Sizes are global: they do not change with the number of processes."""

    section = "training"

    seed: Seed = 0
    """Decides the initial weights, the order of the samples and the dropout."""
    epochs: Positive = 20
    """The most passes over the training split."""
    batch_size: Positive = 256
    """Samples per optimiser step, over all processes."""
    accumulation: Annotated[int | Literal["auto"], MAY_CHANGE] = 1
    """Pieces into which each process cuts its share of a batch, to save memory; "auto": the fewest that fit into the
    devices' memory, by a trace of the step before the first attempt. Later ones keep them. After a step that ran out of
    memory the next attempt has twice as many."""
    recompute: Annotated[Literal["none", "full"], MAY_CHANGE] = "none"
    """What the backward pass computes once more instead of keeping it: nothing, or all that the model's blocks compute,
    which takes less memory, more time, and changes no bit."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-3
    """The largest learning rate, at the end of the warm-up."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    """Weight decay of AdamW."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Share of all steps over which the learning rate rises."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest norm of the gradient; 0 switches clipping off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The share of each label that is spread over all classes."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """The type that is computed in: "auto" takes bf16 where all GPUs have it, else fp16 on GPUs, else fp32."""
    tf32: bool = False
    """Whether GPUs may round the factors of fp32 matrix products and convolutions to 10 bits: faster, less exact."""
    deterministic: bool = True
    """Whether only kernels are used that give the same bits every time; GPUs have faster ones for some operations."""
    compile: bool = False
    """Whether torch.compile makes the model's pass in training faster, which takes it a minute or so at every start.
    Small models gain nothing; the report says what it was worth."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay per step of an exponential moving average of the weights, which is then what is evaluated and kept as the
    trained model; 0 switches it off."""
    skip_nonfinite: Annotated[Natural, MAY_CHANGE] = 3
    """Steps in a row that are skipped as their loss or gradient is non-finite; one more rolls back to a checkpoint."""
    evaluate_every: Natural = 0
    """Steps between evaluations; 0 means once an epoch."""
    patience: Natural = 5
    """Evaluations without improvement after which training stops; 0 switches it off."""
    checkpoint_every: Annotated[Natural, MAY_CHANGE] = 0
    """Steps between checkpoints. Without this and the next two: once an epoch."""
    checkpoint_seconds: Annotated[float, Field(ge=0), MAY_CHANGE] = 0.0
    """Instead: seconds between checkpoints."""
    mean_time_between_failures: Annotated[float, Field(ge=0), MAY_CHANGE] = 0.0
    """Instead: seconds between failures of the whole job, from which Young's and Daly's formula finds the interval."""
    checkpoint_uri: Annotated[str, MAY_CHANGE] = ""
    """A directory or a store's address of your own for the checkpoints, which are left there after the end. Empty: a
    place that every attempt and execution of the same training finds, and that is emptied after the end."""
    resume: Annotated[Literal["auto", "same-code", "never"], MAY_CHANGE] = "auto"
    """Which checkpoints to resume from: all of this training, those that this very code made ("same-code"), or only
    those of this execution ("never")."""
    repetition: Natural = 0
    """Another number is another training: it begins afresh, and neither Flyte's cache nor older checkpoints count."""
    when_held: Annotated[Literal["wait", "refuse"], MAY_CHANGE] = "wait"
    """What to do while another execution is at work on the same training: wait for it, or end with an error."""
    unsaved_limit: Annotated[float, Field(gt=0), MAY_CHANGE] = 3600.0
    """Seconds for which training goes on though the store takes no checkpoint; then it waits for the store."""

    parallel: Annotated[ParallelConfig, MAY_CHANGE] = field(default_factory=ParallelConfig)
    """How the model is divided among the processes."""
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    """How gradients are exchanged where the model is not divided."""
    backend: Annotated[Literal["auto", "nccl", "gloo"], MAY_CHANGE] = "auto"
    """What processes talk by: "auto" takes NCCL (RCCL on AMD) with GPUs and gloo without. Over gloo, NVIDIA and AMD
    GPUs can work in one job, but for a pipeline."""

    profile: Annotated[StepProfileConfig, MAY_CHANGE] = field(default_factory=StepProfileConfig)
    """Which operations take the time of a step."""
    network_profile: Annotated[str, MAY_CHANGE] = ""
    """The address of a result of the tuner, or of a history of such, that is applied if it is of the same hardware;
    "latest": the newest in collectives.history."""
    network_numbers: Annotated[Literal["", "keep", "may_change"], MAY_CHANGE] = ""
    """Whether settings are applied that can change numbers; empty: as collectives.numbers says."""

    @property
    def micro_batches(self) -> int:
        """The number that ``accumulation`` is. Whoever asks has found out what "auto" means."""
        assert isinstance(self.accumulation, int), "accumulation: auto is decided before a model is built"
        return self.accumulation

    def check(self) -> None:
        # Here, as Flyte's decoder takes no union of annotated types.
        if self.accumulation != "auto" and not 1 <= self.accumulation <= LARGEST:
            raise self.reject("accumulation", 'a whole number from 1 on, or "auto"')
        if self.parallel.divides and self.ema:
            raise self.reject("ema", "0 with training.parallel: averages of divided weights are not built")
        changed = [n for n, value in vars(self.gradients).items() if value != getattr(GradientsConfig(), n)]
        # Where gradients lie changes no number: settings from when the default was another say so of divided models.
        if self.parallel.divides and (name := next((n for n in changed if n != "gradient_as_bucket_view"), "")):
            default = getattr(GradientsConfig(), name)
            raise self.gradients.reject(name, f"{json.dumps(default)} with training.parallel: only DDP has it")
        if self.gradients.hook == "bf16" and self.backend == "gloo":
            raise self.gradients.reject("hook", "fp16 or powersgd with training.backend gloo, which has no bf16 hook")
        if self.gradients.hook == "powersgd" and self.precision == "fp16":
            raise self.gradients.reject("hook", "another with training.precision fp16, whose loss scale changes")
        ways = ("checkpoint_every", "checkpoint_seconds", "mean_time_between_failures")
        chosen = [name for name in ways if getattr(self, name)]
        if len(chosen) > 1:
            raise self.reject(chosen[1], f"0, as training.{chosen[0]} is set: only one of them decides")


#: Settings that were thought to decide the result: checkpoints may say anything of them.
NO_LONGER_LASTING = ("training.gradients.gradient_as_bucket_view",)


def lasting(training: TrainingConfig) -> dict[str, object]:
    """The settings that decide the result, and so must stay when a training is resumed."""
    hints = get_type_hints(TrainingConfig, include_extras=True)
    free = {name for name, hint in hints.items() if MAY_CHANGE in getattr(hint, "__metadata__", ())}
    # Homes are found by it: they say of what no longer counts what the default was at first.
    gradients = {**to_dict(training.gradients), "gradient_as_bucket_view": False}
    return {name: value for name, value in to_dict(training).items() if name not in free} | {"gradients": gradients}
