"""The settings of training."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Literal

from pydantic import Field

from tasks.settings import Settings, settings
from tasks.train.parallel.config import ParallelConfig


@settings
class TrainingConfig(Settings):
    """How it is trained. Sizes are global: they do not change with the number of processes."""

    section = "training"

    seed: Annotated[int, Field(ge=0)] = 0
    """Decides the initial weights, the order of the samples and the dropout."""
    epochs: Annotated[int, Field(ge=1)] = 20
    """The most passes over the training split."""
    batch_size: Annotated[int, Field(ge=1)] = 256
    """Samples per optimiser step, over all processes."""
    accumulation: Annotated[int, Field(ge=1)] = 1
    """Pieces into which each process cuts its share of a batch, to save memory."""
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
    """The type that is computed in: "auto" takes bf16 where the GPU has it, else fp16 on a GPU, else fp32."""
    tf32: bool = False
    """Whether GPUs may round the factors of fp32 matrix products and convolutions to 10 bits: faster, less exact."""
    deterministic: bool = True
    """Whether only kernels are used that give the same bits every time; GPUs have faster ones for some operations."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay per step of an exponential moving average of the weights, which is then what is evaluated and kept as the
    trained model; 0 switches it off."""
    skip_nonfinite: Annotated[int, Field(ge=0)] = 3
    """Steps in a row that are skipped as their loss or gradient is no number; one more goes back to a checkpoint."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 means once an epoch."""
    patience: Annotated[int, Field(ge=0)] = 5
    """Evaluations without improvement after which training stops; 0 switches it off."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints. Without this and the next two: once an epoch."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Instead: seconds between checkpoints."""
    mean_time_between_failures: Annotated[float, Field(ge=0)] = 0.0
    """Instead: seconds between failures of the whole job, from which Young's and Daly's formula finds the interval."""
    checkpoint_uri: str = ""
    """A directory or a store's address for the checkpoints of this run and of later ones that are to go on from it."""
    resume: Literal["auto", "never"] = "auto"
    """Whether to go on from an older checkpoint: "never" leaves them alone."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """How the model is divided among the processes."""

    def check(self) -> None:
        if self.parallel.divides and self.ema:
            raise self.reject("ema", "0 with training.parallel: averages of divided weights are not built")
        ways = ("checkpoint_every", "checkpoint_seconds", "mean_time_between_failures")
        chosen = [name for name in ways if getattr(self, name)]
        if len(chosen) > 1:
            raise self.reject(chosen[1], f"0, as training.{chosen[0]} is set: only one of them decides")
