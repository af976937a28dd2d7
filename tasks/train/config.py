"""The settings of training."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.settings import Settings, setting


@dataclass(frozen=True)
class TrainingConfig(Settings):
    """How it is trained. Sizes are global: they do not change with the number of processes."""

    section = "training"

    seed: int = setting(0, at_least=0)
    epochs: int = setting(20, at_least=1)
    #: Samples per optimiser step, over all processes.
    batch_size: int = setting(256, at_least=1)
    #: Pieces into which each process cuts its share of a batch, to save memory.
    accumulation: int = setting(1, at_least=1)
    learning_rate: float = setting(2e-3, above=0)
    weight_decay: float = setting(1e-2, at_least=0)
    #: Share of all steps over which the learning rate rises.
    warmup: float = setting(0.05, at_least=0, below=1)
    #: Largest norm of the gradient; 0 switches clipping off.
    clip_norm: float = setting(1.0, at_least=0)
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    #: "auto" takes bf16 where the GPU has it, else fp16 on a GPU, else fp32.
    precision: str = setting("auto", choices=("auto", "fp32", "bf16", "fp16"))
    #: Steps between evaluations; 0 means once an epoch.
    evaluate_every: int = setting(0, at_least=0)
    #: Evaluations without improvement after which training stops; 0 switches it off.
    patience: int = setting(5, at_least=0)
    #: Steps between checkpoints. Instead: seconds, or the mean time between failures of the whole job (seconds), from
    #: which Young's and Daly's formula finds the interval. Without any of the three: once an epoch.
    checkpoint_every: int = setting(0, at_least=0)
    checkpoint_seconds: float = setting(0.0, at_least=0)
    mean_time_between_failures: float = setting(0.0, at_least=0)
    #: A directory or s3:// prefix for the checkpoints of this run and of later ones that are to go on from it.
    checkpoint_uri: str = ""
    #: "never" leaves older checkpoints alone.
    resume: str = setting("auto", choices=("auto", "never"))

    def check(self) -> None:
        ways = ("checkpoint_every", "checkpoint_seconds", "mean_time_between_failures")
        chosen = [name for name in ways if getattr(self, name)]
        if len(chosen) > 1:
            raise self.reject(chosen[1], f"0, as training.{chosen[0]} is set: only one of them decides")
