"""The exported model: ONNX files, what was measured about them, and how to call the chosen one.

The artifact holds one ``.onnx`` file per variant, ``export.json`` (an :class:`ExportReport`), ``signature.json`` (a
:class:`DeployedSignature`), ``schema.json`` and ``statistics.json`` (how raw columns become the model's inputs, copied
from the prepared data) and ``MODEL_CARD.md``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from tasks.artifacts.evaluation import Scores
from tasks.artifacts.format import Artifact

KIND = "export"
REPORT = "export.json"
SIGNATURE = "signature.json"
MODEL_CARD = "MODEL_CARD.md"
#: Files of the prepared data that are copied beside the model, so that it can be used anywhere.
PREPROCESSING = ("schema.json", "statistics.json")


class LatencyFigures(TypedDict):
    """Milliseconds per call (median and 99th percentile) and the number of calls measured."""

    p50: float
    p99: float
    calls: int


class PairedTest(TypedDict):
    """Whether a variant and FP32 differ by more than chance on the same rows: the two-sided p-value and, for a
    classification, how many rows only one of the two predicts correctly."""

    only_fp32_right: NotRequired[int]
    only_variant_right: NotRequired[int]
    p: float


class VariantFigures(TypedDict):
    """One variant. One that could not be made has only ``name``, ``verdict`` and ``chosen``; ``file`` and ``bytes`` are
    then None. ``file`` is also None for the torch model, which is not part of the artifact."""

    name: str
    file: str | None
    bytes: int | None
    chosen: bool
    verdict: str
    #: By batch size.
    latency_ms: NotRequired[dict[str, LatencyFigures]]
    rows_per_second: NotRequired[dict[str, float]]
    #: On the test split.
    metrics: NotRequired[Scores]
    #: The largest absolute difference to the torch model's outputs on the test split.
    largest_difference: NotRequired[float]
    paired: NotRequired[PairedTest]


class MachineFigures(TypedDict):
    """The CPU, the threads per call and the library versions with which the variants were measured."""

    cpu: str
    architecture: str
    #: Instruction set extensions that matter for INT8.
    flags: list[str]
    cores: int
    threads: int
    onnxruntime: str
    onnx: str
    torch: str


class ExportReport(TypedDict):
    """The contents of ``export.json``."""

    task: str
    variants: list[VariantFigures]
    #: The name of the variant to deploy, and the reason.
    chosen: str
    why: str
    decided_at_batch: int
    machine: MachineFigures


class DeployedTensor(TypedDict):
    """An input or output of the ONNX model; the first dimension of ``shape`` is the text ``batch``."""

    name: str
    dtype: str
    shape: list[str | int]
    #: Of an output only.
    units: NotRequired[str]


class DeployedSignature(TypedDict):
    """The contents of ``signature.json``: what a caller who has only this directory must know."""

    format: int
    task: str
    target: str
    #: The file of the chosen variant.
    model: str
    opset: int
    dynamic_batch: bool
    inputs: list[DeployedTensor]
    outputs: list[DeployedTensor]
    classes: list[str]
    cardinalities: list[int]
    preprocessing: list[str]


def read_export(directory: Path) -> ExportReport:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole exported model."""
    return Artifact.open(directory, KIND).read_json(REPORT)
