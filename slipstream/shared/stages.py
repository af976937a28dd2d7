"""Stages of the workflows. A stage's artifact has the stage's name as its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Stage of the workflows; a profile sets the resources of every stage with its own pods.

    ``engines`` are the modules that compute its result, and ``libraries`` those whose version can change the numbers;
    its code version is made of both. A stage without engines is never cached.
    """

    name: str
    engines: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    #: Files of its artifact that only describe how the result was made; excluded from the artifact's content digest.
    figures: tuple[str, ...] = ()
    #: Stage whose placement its pods have, because both have the same inputs; "" if a profile places it.
    pod_of: str = ""
    #: True if it is one process group, which ends if any of its pods is preempted. Pods of other stages with several
    #: nodes are preempted individually.
    distributed: bool = False
    #: True if its pods train independently (trials of a sweep), on machines like those of a process group.
    trains_alone: bool = False
    #: True if its results are timings, which are invalid on other hardware.
    measured: bool = False
    #: True if it looks up earlier results itself, because only the running group knows the hardware that a result
    #: belongs to. Neither Flyte nor the local store keeps its results.
    finds_earlier: bool = False


@dataclass(frozen=True)
class StageUsage:
    """Usage of the machine or (first) pod that ran a stage; unknown values are None."""

    node: str
    #: The cloud's machine type, such as "p5.48xlarge"; "" if unknown.
    instance_type: str
    spot: bool
    gpus: int
    #: Share of the time in which devices were busy, averaged over them; and the largest share of their memory.
    busy: float | None = None
    largest_memory: float | None = None
    #: Energy of all GPUs.
    joules: float | None = None


@dataclass(frozen=True)
class StageRun:
    """Run of a stage: wall-clock seconds of making its result, and whether the result was reused this time."""

    name: str
    seconds: float
    reused: bool
    #: None if the stage was reused, or too short for two samples.
    usage: StageUsage | None = None


TRAINED = ("torch", "numpy", "safetensors")
JUDGED = (*TRAINED, "scikit-learn", "scipy")
#: Libraries of tokenizers and chat templates.
TEXT = ("jinja2", "tokenizers", "transformers")
STAGES = {
    stage.name: stage
    for stage in (
        Stage("fingerprint"),
        Stage(
            "prepare",
            (
                "slipstream.pipeline.prepare.engine",
                "slipstream.pipeline.prepare.sharded.merge_partitions",
                "slipstream.pipeline.prepare.sharded.shares",
            ),
            (*TEXT, "numpy", "pandas", "pillow", "pyarrow", "scikit-learn", "scipy", "xxhash"),
            figures=("card.json", "quarantine.parquet"),
        ),
        Stage(
            "train",
            ("slipstream.pipeline.train.run",),
            (*TRAINED, "scipy"),
            figures=("attempt.json", "devices.json", "operations.json", "trace.json.gz"),
            distributed=True,
        ),
        Stage("sweep", trains_alone=True),
        Stage("compress", ("slipstream.pipeline.compress.engine",), (*JUDGED, "torch-pruning")),
        Stage(
            "evaluate", ("slipstream.pipeline.evaluate.engine",), (*JUDGED, "pyarrow", "tokenizers"), pod_of="export"
        ),
        Stage(
            "export",
            ("slipstream.pipeline.export.engine",),
            (*JUDGED, *TEXT, "onnx", "onnxruntime", "onnxscript", "pyarrow"),
            measured=True,
        ),
        Stage("promote"),
        Stage("score"),
        Stage(
            "collectives",
            ("slipstream.pipeline.collectives.engine",),
            ("torch", "numpy", "scipy"),
            distributed=True,
            measured=True,
            finds_earlier=True,
        ),
        Stage("report"),
    )
}
DISTRIBUTED = tuple(name for name, stage in STAGES.items() if stage.distributed)
