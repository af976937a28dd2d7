"""Settings of training."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from slipstream.pipeline.train.parallel.config import GradientsConfig, ParallelConfig
from slipstream.shared.settings import (
    LARGEST,
    LATER,
    Natural,
    Positive,
    Seed,
    Settings,
    as_written,
    counted_settings,
    settings,
    to_dict,
)
from slipstream.shared.spelling import NO_NUMBER, NO_TEXT, NONE, SettingVariant

#: Version of the arithmetic of a training step. Increment it when a code change alters a step's results on purpose:
#: older trainings then restart instead of resuming with different arithmetic.
STEP_VERSION = 2

#: Values of ``batch_size: auto``, the largest first, and the number of steps per epoch that it aims at.
AUTOMATIC_SIZES, STEPS_PER_EPOCH = (256, 128, 64, 32, 16), 20
#: Default learning rate, which is AdamW's and stands in stored digests; and default momentum of SGD.
ADAMW_RATE, MOMENTUM = 2e-3, 0.9
#: Annotation of settings that may change on resume: they affect the result at most by rounding. All other settings must
#: equal the checkpoint's, and are part of the key of the checkpoint directory.
MAY_CHANGE = "may change on resume"
#: Setting whose variants give the interval between checkpoints.
INTERVAL = "checkpoint_interval"
#: Range of factors that change nothing, and the default range of a crop's aspect ratio.
ONE, ASPECT = (1.0, 1.0), (3 / 4, 4 / 3)
#: Lower and upper limit of random numbers, or nothing.
Limits = list[Annotated[float, Field(ge=0, le=10)]]


@settings
class AugmentConfig(Settings):
    """Random transform of the images of training rows."""

    section = "training.augment"

    transform: Literal["horizontal_flip", "vertical_flip", "crop", "colour"]
    """Kind of change. A crop has the size of the stored image."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of a flip."""
    padding: Annotated[int, Field(ge=0, le=1 << 14)] = 0
    """For a crop: pixels of zeros around the image from which it is cut."""
    area: Limits = field(default_factory=list)
    """For a crop in place of padding: range of its fraction of the image, such as [0.3, 1]; it is resized."""
    aspect: Limits = field(default_factory=list)
    """Range of a crop's width over its height, by default [3/4, 4/3]; for crops by area."""
    brightness: Limits = field(default_factory=list)
    """For colour: range of the factor of all pixels, such as [0.8, 1.2]."""
    contrast: Limits = field(default_factory=list)
    """For colour: range of the factor of the difference from the mean luminance."""
    saturation: Limits = field(default_factory=list)
    """For colour: range of the factor of the difference from grey."""

    def ranges(self, *names: str) -> tuple[tuple[float, float], ...]:
        """Return ranges by name, with defaults for those that are not given."""
        given = {"aspect": ASPECT} | {name: tuple(getattr(self, name)) for name in names if getattr(self, name)}
        return tuple(given.get(name, ONE) for name in names)

    def check(self) -> None:
        own = {"crop": ("padding", "area", "aspect"), "colour": ("brightness", "contrast", "saturation")}
        mine = own.get(self.transform, ("probability",))
        for name, about in vars(AugmentConfig)["__pydantic_fields__"].items():
            value = getattr(self, name)
            if name not in ("transform", *mine) and value != about.get_default(call_default_factory=True):
                raise self.reject(name, f"none for {self.transform}, which has {', '.join(mine)}")
            least = 0.0 if self.transform == "colour" else 1e-3
            if isinstance(value, list) and value and not (len(value) == 2 and least <= value[0] <= value[1]):
                raise self.reject(name, "two numbers, [lowest, highest]" + (", above 0" if least else ""))
        if self.area and self.area[1] > 1:
            raise self.reject("area", "at most 1, the whole image")
        if self.transform == "crop" and bool(self.padding) == bool(self.area):
            raise self.reject("padding", "above 0, or an area in place of it")
        if self.aspect and not self.area:
            raise self.reject("aspect", "none without area")
        if self.transform == "colour" and not any(getattr(self, name) for name in mine):
            raise self.reject("brightness", "a range such as [0.8, 1.2], or one of contrast or saturation")


@settings
class StepProfileConfig(Settings):
    """Steps to profile with torch.profiler."""

    section = "training.profile"

    steps: Natural = 0
    """Number of steps to profile, from the sixth step on, but at most as many as fit into a trace of 100 MB. The
    report shows their operations, with a trace; 0 disables profiling."""


@settings
class TrainingConfig(Settings):
    """Settings of a training.

    Sizes are global: they do not change with the number of processes.
    """

    section = "training"

    seed: Seed = 0
    """Seed of the initial weights, the order of the samples and the dropout."""
    epochs: Positive = 20
    """Maximum number of epochs."""
    batch_size: int | Literal["auto"] = "auto"
    """Samples per optimiser step, over all processes. "auto" takes the largest power of two from 16 to 256 with at
    least 20 steps per epoch, or else 16."""
    accumulation: Annotated[int | Literal["auto"], MAY_CHANGE] = 1
    """Micro-batches into which each process divides its batch, to save memory. "auto" traces a step before the first
    attempt and takes the fewest micro-batches that fit into the devices' memory; later attempts keep the number. If a
    step runs out of memory, the next attempt doubles the number."""
    recompute: Annotated[Literal["none", "full"], NONE, MAY_CHANGE] = "none"
    """Activation checkpointing: null, or "full" to recompute the activations of all blocks in the backward pass. It
    takes less memory and more time, and changes no bit of the result."""
    optimizer: Annotated[Literal["adamw", "sgd"], LATER] = "adamw"
    """Optimiser: AdamW, or SGD with momentum."""
    momentum: Annotated[float, Field(ge=0, lt=1), LATER] = MOMENTUM
    """Momentum of SGD; 0 disables it."""
    nesterov: Annotated[bool, LATER] = False
    """Nesterov's variant of the momentum, for SGD."""
    learning_rate: Annotated[float, Field(gt=0)] = ADAMW_RATE
    """Largest learning rate, at the end of the warm-up. The default is AdamW's; SGD needs its own, such as 0.1."""
    weight_decay: Annotated[float, Field(ge=0)] = 1e-2
    """Weight decay, not for biases and normalisation layers: AdamW decouples it, SGD adds it to the gradient."""
    warmup: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of all steps over which the learning rate rises linearly."""
    schedule: Annotated[Literal["cosine", "linear", "constant"], LATER] = "cosine"
    """Learning rate after the warm-up: "cosine" (half a cosine to zero), "linear" (to zero) or "constant"."""
    clip_norm: Annotated[float, Field(ge=0), NO_NUMBER] = 1.0
    """Largest norm of the gradient; null disables clipping."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of each label that is spread over all classes."""
    balance_classes: Annotated[bool, LATER] = False
    """Give every class the same total weight in the loss, as class_weight="balanced" in scikit-learn."""
    class_weights: Annotated[dict[str, Annotated[float, Field(gt=0)]], LATER] = field(default_factory=dict)
    """Weights of classes in the loss, 1 for others; scaled so that their mean over the training rows is 1."""
    threshold: Annotated[Literal["none", "f1", "cost"], NONE, LATER] = "none"
    """Threshold of two classes, from the validation rows: "f1" for the largest macro F1, "cost" for the least
    error_costs, null for the likelier class. It decides in all later stages; probabilities are unchanged."""
    error_costs: Annotated[dict[str, Annotated[float, Field(ge=0)]], LATER] = field(default_factory=dict)
    """Cost of a wrong decision by true class, 1 for others; for threshold "cost"."""
    augment: Annotated[list[AugmentConfig], LATER] = field(default_factory=list)
    """Random changes of the images of training rows, one after the other. Empty: none."""
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Floating-point type of forward and backward passes: "auto" takes bf16 if all GPUs support it, else fp16 on GPUs,
    else fp32."""
    tf32: bool = False
    """Let GPUs round the inputs of fp32 matmuls and convolutions to TF32 (10 bits of mantissa): faster, less exact."""
    deterministic: bool = True
    """Use only kernels that give the same bits every time; GPUs have faster ones for some operations."""
    compile: Annotated[bool | Literal["auto"], MAY_CHANGE] = "auto"
    """Compile the model's training pass with torch.compile, which takes about a minute at every start: "auto" compiles
    transformers on GPUs, unless a checkpoint to resume from was trained without. The report shows the speedup."""
    kernels: Annotated[Literal["auto", "reference"], LATER, MAY_CHANGE] = "auto"
    """Kernels of the loss of tokens: "auto" takes a fused Triton kernel on GPUs, "reference" torch's operations, which
    CPUs always take. They differ by rounding."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay per step of an exponential moving average (EMA) of the weights. The averaged weights are evaluated and
    become the trained model; 0 disables the average."""
    skip_nonfinite: Annotated[Natural, MAY_CHANGE] = 3
    """Consecutive steps with a non-finite loss or gradient that are skipped; one more rolls back to a checkpoint."""
    evaluate_every: Annotated[Natural, NO_NUMBER] = 0
    """Steps between evaluations; null means once per epoch."""
    metric: Annotated[Literal["loss", "auc", "f1", "accuracy", "rmse"], LATER] = "loss"
    """Validation metric by which the best weights are chosen, training stops early and sweeps search: "loss", "auc"
    (ROC, two classes), "f1" (macro F1), "accuracy" or "rmse"."""
    patience: Annotated[Natural, NO_NUMBER] = 5
    """Evaluations without improvement after which training stops; null disables early stopping. Evaluations before step
    200 do not count."""
    checkpoint_interval: ClassVar[None]  # stored in one of the next three
    """Interval between checkpoints: {steps: …}, {seconds: …}, or {mean_time_between_failures: …}, from which Young's
    and Daly's formula computes it: the mean seconds between failures of the whole job. null: once per epoch."""
    checkpoint_every: Annotated[Natural, SettingVariant(INTERVAL, "steps"), MAY_CHANGE] = 0
    """Earlier spelling of checkpoint_interval: {steps: …}."""
    checkpoint_seconds: Annotated[float, Field(ge=0), SettingVariant(INTERVAL, "seconds"), MAY_CHANGE] = 0.0
    """Earlier spelling of checkpoint_interval: {seconds: …}."""
    mean_time_between_failures: Annotated[
        float, Field(ge=0), SettingVariant(INTERVAL, "mean_time_between_failures"), MAY_CHANGE
    ] = 0.0
    """Earlier spelling of checkpoint_interval: {mean_time_between_failures: …}."""
    checkpoint_uri: Annotated[str, NO_TEXT, MAY_CHANGE] = ""
    """Your own directory or store address for the checkpoints, which are kept after the end. null: a location that
    is the same for every attempt and execution of this training, and that is emptied after the end."""
    resume: Annotated[Literal["auto", "same-code", "never"], MAY_CHANGE] = "auto"
    """Checkpoints to resume from: "auto" for all checkpoints of this training, "same-code" for checkpoints that only
    the current code has trained, "never" for checkpoints of the current execution only."""
    repetition: Natural = 0
    """Number of the repetition. Another number starts from scratch, ignoring Flyte's cache and older checkpoints."""
    when_held: Annotated[Literal["wait", "refuse"], MAY_CHANGE] = "wait"
    """Action while another execution works on the same training: "wait" until it ends, or "refuse" with an error."""
    unsaved_limit: Annotated[float, Field(gt=0), MAY_CHANGE] = 3600.0
    """Seconds for which training continues while the store accepts no checkpoint; then training waits for the store."""

    parallel: Annotated[ParallelConfig, MAY_CHANGE] = field(default_factory=ParallelConfig)
    """Division of the model among the processes."""
    gradients: GradientsConfig = field(default_factory=GradientsConfig)
    """Gradient exchange of DistributedDataParallel, used if the model is not divided."""
    backend: Annotated[Literal["auto", "nccl", "gloo"], MAY_CHANGE] = "auto"
    """Communication backend: "auto" takes NCCL (RCCL on AMD) on GPUs and gloo on CPUs. With gloo, NVIDIA and AMD GPUs
    can train in one job, except in a pipeline."""

    profile: Annotated[StepProfileConfig, MAY_CHANGE] = field(default_factory=StepProfileConfig)
    """Profiling of the operations in a step."""
    network_profile: Annotated[str, NO_TEXT, MAY_CHANGE] = ""
    """Address of a tuner result, or of a history of results. It is applied if it is for the same hardware; "latest"
    means the newest in collectives.history, null means none."""
    network_numbers: Annotated[Literal["", "keep", "may_change"], NO_TEXT, MAY_CHANGE] = ""
    """Policy for tuner settings that can change numerical results: "keep" ignores them, "may_change" applies them;
    null means the value of collectives.numbers."""

    def for_rows(self, rows: int) -> TrainingConfig:
        """Return the settings for a training split of ``rows`` rows, with a number as ``batch_size``."""
        if self.batch_size != "auto":
            return self
        fitting = (size for size in AUTOMATIC_SIZES if -(-rows // size) >= STEPS_PER_EPOCH)
        return replace(self, batch_size=next(fitting, AUTOMATIC_SIZES[-1]))

    @property
    def rows_per_step(self) -> int:
        """Return ``batch_size`` as an int; "auto" must be resolved before by :meth:`for_rows`."""
        assert isinstance(self.batch_size, int), "batch_size: auto is decided once the rows are known"
        return self.batch_size

    @property
    def micro_batches(self) -> int:
        """Return ``accumulation`` as an int; "auto" must be resolved before."""
        assert isinstance(self.accumulation, int), "accumulation: auto is decided before a model is built"
        return self.accumulation

    def check(self) -> None:
        # Here, because Flyte's decoder accepts no union of annotated types.
        for name in ("batch_size", "accumulation"):
            value = getattr(self, name)
            if value != "auto" and not 1 <= value <= LARGEST:
                raise self.reject(name, 'a whole number from 1 on, or "auto"')
        if self.parallel.divides and self.ema:
            raise self.reject("ema", "0 with training.parallel: averages of divided weights are not supported")
        changed = [n for n, value in vars(self.gradients).items() if value != getattr(GradientsConfig(), n)]
        # gradient_as_bucket_view changes no number, and old settings of divided models hold its earlier default.
        if self.parallel.divides and (name := next((n for n in changed if n != "gradient_as_bucket_view"), "")):
            default = as_written(GradientsConfig())[name]
            raise self.gradients.reject(name, f"{json.dumps(default)} with training.parallel: only DDP has it")
        if self.gradients.hook == "bf16" and self.backend == "gloo":
            raise self.gradients.reject("hook", "fp16 or powersgd with training.backend gloo, which has no bf16 hook")
        if self.gradients.hook == "powersgd" and self.precision == "fp16":
            raise self.gradients.reject("hook", "another with training.precision fp16, whose loss scale changes")
        if self.optimizer == "sgd" and self.learning_rate == ADAMW_RATE:
            raise self.reject("learning_rate", "another with training.optimizer sgd, such as 0.1: this one is AdamW's")
        if self.optimizer == "adamw" and (self.nesterov or self.momentum != MOMENTUM):
            name = "nesterov" if self.nesterov else "momentum"
            default = "false" if self.nesterov else f"{MOMENTUM:g}"
            raise self.reject(name, f"{default} with training.optimizer adamw: only sgd has it")
        if self.nesterov and not self.momentum:
            raise self.reject("nesterov", "false with training.momentum 0")
        if self.balance_classes and self.class_weights:
            raise self.reject("balance_classes", "false with training.class_weights")
        if bool(self.error_costs) != (self.threshold == "cost"):
            raise self.reject("threshold", "cost with training.error_costs, and only then")
        ways = ("checkpoint_every", "checkpoint_seconds", "mean_time_between_failures")
        chosen = [name for name in ways if getattr(self, name)]
        if len(chosen) > 1:
            raise self.reject(chosen[1], f"0, as training.{chosen[0]} is set: {INTERVAL} is only one of them")


#: Settings that older releases required to be unchanged on resume; checkpoints may hold any value of them.
NO_LONGER_LASTING = ("training.compile", "training.gradients.gradient_as_bucket_view")


def resume_settings(training: TrainingConfig) -> dict[str, object]:
    """Return the settings that decide the result and must not change on resume."""
    # The key of a checkpoint directory contains this setting, so it always has its first default here.
    gradients = {**to_dict(training.gradients), "gradient_as_bucket_view": False}
    counted = counted_settings(training).items()
    return {name: value for name, value in counted if decides_result(name)} | {"gradients": gradients}


def decides_result(name: str) -> bool:
    """Return True for a setting of the training that must not change on resume."""
    return MAY_CHANGE not in vars(TrainingConfig)["__pydantic_fields__"][name].metadata


def first_difference(
    then: object, now: object, path: str = "", *, ignored: Collection[str] = ()
) -> tuple[str, object, object] | None:
    """Return the dotted path and both values of the first difference between two nested mappings.

    Returns None if they are equal. Paths in ``ignored`` are not compared.
    """
    if path in ignored:
        return None
    if isinstance(then, Mapping) and isinstance(now, Mapping):
        for key in sorted({*then, *now}, key=lambda name: (name != "optimizer", name)):  # other settings follow from it
            deeper = f"{path}.{key}" if path else str(key)
            difference = first_difference(then.get(key), now.get(key), deeper, ignored=ignored)
            if difference:
                return difference
        return None
    # A tuple comes back from JSON as a list, and a mapping in it with sorted keys.
    return None if json.dumps(then, sort_keys=True) == json.dumps(now, sort_keys=True) else (path, then, now)
