"""The stages of the workflows. The artifact that a stage makes has the stage's name as its kind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """A stage, which a profile may give resources by its name if it has pods of its own.

    ``engines`` are the modules that compute its result, and ``libraries`` those whose version can change the numbers:
    its code version is made of both. A stage without engines is never cached.
    """

    name: str
    engines: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    #: Files of its artifact that describe how the result came about and decide nothing: no part of its content.
    figures: tuple[str, ...] = ()
    #: The stage in whose pods it runs, as that is given the same inputs; "" if it has pods of its own.
    pod_of: str = ""
    #: It is one process group. Of other stages with several nodes, each pod is preempted for itself.
    distributed: bool = False
    #: Its pods work each for itself, on machines as those of a process group.
    trains_alone: bool = False
    #: Its results are measured times: those of other hardware are not its.
    measured: bool = False
    #: It looks by itself for what an earlier run made, because only in the running group it knows the hardware that a
    #: result belongs to: neither Flyte nor the local store keeps its results.
    finds_earlier: bool = False


@dataclass(frozen=True)
class StageUsage:
    """What a stage used of the machine or pod that made it, the first if there were several. A value that nobody gives
    is None."""

    node: str
    #: The cloud's name of it, such as "p5.48xlarge"; "" if it is not known.
    instance_type: str
    spot: bool
    gpus: int
    #: Means over all devices: the share of the time in which they were busy; and the largest share of their memory.
    busy: float | None = None
    largest_memory: float | None = None
    #: Energy of all GPUs.
    joules: float | None = None


@dataclass(frozen=True)
class StageRun:
    """How a stage went: the wall-clock seconds it took when it was made, and whether it was reused this time."""

    name: str
    seconds: float
    reused: bool
    #: Absent if it was reused, or not long enough for two samples.
    usage: StageUsage | None = None


TRAINED = ("torch", "numpy", "safetensors")
JUDGED = (*TRAINED, "scikit-learn", "scipy")
#: Tokenizers and their chat templates.
TEXT = ("jinja2", "tokenizers", "transformers")
STAGES = {
    stage.name: stage
    for stage in (
        Stage("fingerprint"),
        Stage(
            "prepare",
            (
                "slipstream.prepare.engine",
                "slipstream.prepare.sharded.merge_partitions",
                "slipstream.prepare.sharded.shares",
            ),
            (*TEXT, "numpy", "pandas", "pillow", "pyarrow", "scikit-learn", "scipy", "xxhash"),
            figures=("card.json", "quarantine.parquet"),
        ),
        Stage(
            "train",
            ("slipstream.train.run",),
            (*TRAINED, "scipy"),
            figures=("attempt.json", "devices.json", "operations.json", "trace.json.gz"),
            distributed=True,
        ),
        Stage("sweep", trains_alone=True),
        Stage("compress", ("slipstream.compress.engine",), (*JUDGED, "torch-pruning")),
        Stage("evaluate", ("slipstream.evaluate.engine",), (*JUDGED, "pyarrow", "tokenizers"), pod_of="export"),
        Stage(
            "export",
            ("slipstream.export.engine",),
            (*JUDGED, *TEXT, "onnx", "onnxruntime", "onnxruntime-gpu", "onnxscript", "pyarrow"),
            measured=True,
        ),
        Stage("promote"),
        Stage("score"),
        Stage(
            "collectives",
            ("slipstream.collectives.engine",),
            ("torch", "numpy", "scipy"),
            distributed=True,
            measured=True,
            finds_earlier=True,
        ),
        Stage("report"),
    )
}
DISTRIBUTED = tuple(name for name, stage in STAGES.items() if stage.distributed)
