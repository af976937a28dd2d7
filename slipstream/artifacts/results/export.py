"""The exported model: ONNX files, what was measured about them, and how to call the chosen one.

The artifact holds one ``.onnx`` file per variant, ``model.onnx`` (the chosen one) and, for a table, ``model.raw.onnx``
(the same from raw columns), ``export.json`` (an :class:`ExportReport`), ``signature.json`` (a
:class:`DeployedSignature`), ``schema.json`` and ``statistics.json`` (how raw columns become the model's inputs, copied
from the prepared data), ``distributions.json`` (how the training rows are distributed), ``samples.npz`` and
``samples.json`` (rows to check it with) and ``MODEL_CARD.md``; of a transformer also ``hugging-face/``, which a model
of more parameters than ``export.most_parameters`` has in place of all ONNX files and sample rows; and of one with
adapters ``adapter/``, which are also in the weights of all others. Beside the manifest lies its digest,
``manifest.sha256``; :mod:`slipstream.export.check` verifies all of it.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.artifacts.format import MANIFEST, Artifact
from slipstream.artifacts.records import read_record
from slipstream.artifacts.results.evaluation import METRICS, Scores
from slipstream.errors import UserError

KIND = "export"
REPORT = "export.json"
SIGNATURE = "signature.json"
MODEL_CARD = "MODEL_CARD.md"
#: The SHA-256 of the manifest, as ``sha256sum`` writes it: the one digest over all files.
DIGEST = "manifest.sha256"
#: Files of the prepared data that are copied beside the model, so that it can be used anywhere.
PREPROCESSING = ("schema.json", "statistics.json")


@dataclass(frozen=True)
class Estimate:
    """A measured figure and its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyFigures:
    """Milliseconds per call by percentile, with 95 % intervals; None if fewer than ten calls lie beyond it."""

    p50: Estimate | None
    p90: Estimate | None
    p99: Estimate | None
    calls: int
    #: How many times as fast as ``onnx-fp32``, in paired turns; each limit holds with 95 %.
    speedup: Estimate | None = None
    #: The mean, and the coefficient of variation; None in files from before they were recorded.
    mean: float | None = None
    variation: float | None = None

    def percentile(self, name: str) -> Estimate | None:
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99}[name]


#: A limit of so many percent or points, or more, says that there is none.
NO_LIMIT = 1000.0


@dataclass(frozen=True)
class QualityFigures:
    """What a variant loses against FP32 on the same rows, in points of accuracy or percent of RMSE."""

    loss: float
    #: Limits of the true loss, each of which holds with the probability ``level``.
    low: float
    high: float
    level: float
    rows: int
    #: The splits that the rows are from.
    evidence: str
    #: "passed", "failed" or "can't tell".
    answer: str
    #: How many rows would show it, if that can be said.
    rows_enough: int | None


@dataclass(frozen=True)
class VariantFigures:
    """One variant. Of one that was not timed only the first fields are known; ``file`` and ``bytes`` are then None,
    unless it was made for other devices. ``file`` is also None for what is not part of the artifact: torch, and
    variants that were left out early."""

    name: str
    file: str | None
    bytes: int | None
    chosen: bool
    #: What became of it, in one or two words, and why.
    verdict: str
    reason: str
    #: The code by which a quantised one was made, which is also in the name of its file.
    recipe: str = ""
    #: By batch size.
    latency_ms: dict[str, LatencyFigures] = field(default_factory=dict)
    rows_per_second: dict[str, float] = field(default_factory=dict)
    #: By batch size, if there is a price per hour: its currency for a million rows.
    cost_per_million: dict[str, float] = field(default_factory=dict)
    #: On the test split.
    metrics: Scores | None = None
    #: The largest and the mean absolute difference to the torch model's outputs on the test split.
    largest_difference: float | None = None
    mean_difference: float | None = None
    quality: QualityFigures | None = None

    @property
    def timed(self) -> bool:
        """Whether it was measured, and not left out before."""
        return self.metrics is not None

    def milliseconds(self, batch: str, percentile: str) -> float | None:
        """A percentile of its latency at a batch size; None if that was not measured often enough."""
        latency = self.latency_ms.get(batch)
        estimate = latency.percentile(percentile) if latency else None
        return estimate.value if estimate else None


@dataclass(frozen=True)
class ProfileFigures:
    """Where FP32 spends its time at one batch size."""

    batch: int
    #: Shares of the time by operator, the largest first.
    operators: dict[str, float]
    #: The share of products and convolutions, which INT8 can speed up, and how many times as fast a network would be
    #: in which they took no time at all.
    products: float
    at_most: float


@dataclass(frozen=True)
class MachineFigures:
    """The CPU, the threads per call and the library versions with which the variants were measured."""

    cpu: str
    #: On which they ran, if ``export.provider`` was cuda; else "".
    gpu: str
    architecture: str
    #: Instruction set extensions that matter for INT8.
    flags: list[str]
    cores: int
    threads: int
    onnxruntime: str
    onnx: str
    torch: str

    @property
    def device(self) -> str:
        """What the variants ran on."""
        return self.gpu or self.cpu


#: The values that vLLM takes for ``--max-lora-rank``, whose default is 16.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LibraryFiles:
    """A directory of the artifact that Hugging Face's libraries, and what is made for them, load: a model, or an
    adapter."""

    name: str
    #: Files of weights, and the bytes of all of them.
    parts: int
    bytes: int
    #: Of an adapter the address of the model that it was trained for, as it was configured, and its width.
    base: str = ""
    rank: int = 0
    #: Whether that model was held in four bits meanwhile.
    four_bits: bool = False

    @property
    def note(self) -> str:
        """What of it differs from the trained model; "" if nothing does."""
        if not self.four_bits:
            return ""
        beside = "it was trained beside the base's weights in four bits (NF4), which the whole model holds"
        return f"{beside}, and gives other outputs on the base as it is"

    @property
    def loaded_by(self) -> dict[str, str]:
        """By library the line that loads it, where the artifact is the working directory."""
        if not self.base:
            return {
                "transformers": f'AutoModelForCausalLM.from_pretrained("{self.name}")',
                "vLLM": f"vllm serve {self.name}",
            }
        base, rank = json.dumps(self.base, ensure_ascii=False), next((n for n in VLLM_RANKS if n >= self.rank), 0)
        line = f"vllm serve {shlex.quote(self.base)} --enable-lora --max-lora-rank {rank}"
        return {
            "peft": f'PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), "{self.name}")',
            **({"vLLM": f"{line} --lora-modules {self.name}={self.name}"} if rank else {}),
        }


@dataclass(frozen=True)
class ExportReport:
    """The contents of ``export.json``."""

    task: str
    #: None of a model that is too large for ONNX.
    variants: list[VariantFigures]
    #: The name of the variant to deploy, and the reason; "" and why there is none.
    chosen: str
    why: str
    decided_at_batch: int
    #: The best variant at each batch size.
    best: dict[str, str]
    max_loss: float
    #: Bits of the INT8 variants' weights: 7 give the same numbers on every CPU, 8 need VNNI on x86.
    weight_bits: int
    #: Empty if ``export.provider`` was cuda.
    profile: list[ProfileFigures]
    machine: MachineFigures
    #: Of the model; "" if it was not given.
    licence: str
    #: Empty of networks that are no transformers; absent in files from before it was told.
    libraries: list[LibraryFiles] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raises ``ValueError`` unless the task is one, one variant is the chosen one if there are any, and the batch
        size that decided was profiled."""
        expected = [self.chosen] if self.variants or self.chosen else []
        if [variant.name for variant in self.variants if variant.chosen] != expected:
            raise ValueError("not one variant is the chosen one")
        if self.task not in METRICS:
            raise ValueError(f"{self.task!r} is no task")
        if self.profile and self.decided_at_batch not in [each.batch for each in self.profile]:
            raise ValueError("the batch size that decided was not profiled")

    @property
    def timed(self) -> list[VariantFigures]:
        return [variant for variant in self.variants if variant.timed]

    @property
    def batches(self) -> list[str]:
        """The batch sizes at which a median was measured, ascending."""
        return sorted({batch for v in self.timed for batch in v.latency_ms if v.milliseconds(batch, "p50")}, key=int)

    @property
    def recommended(self) -> VariantFigures | None:
        """None if there is no ONNX model."""
        return next((variant for variant in self.variants if variant.chosen), None)

    @property
    def ceiling(self) -> str:
        """What quantisation could gain at most at the batch size that decides, in words."""
        if not self.profile:
            return "What quantisation could gain at most is not known, as operators are timed on CPUs only"
        at = next(each for each in self.profile if each.batch == self.decided_at_batch)
        return (
            f"Products are {100 * at.products:.0f} % of FP32's time at batch {at.batch}: if they took none at all, "
            f"the model would be {at.at_most:.2f} times as fast"
        )


@dataclass(frozen=True)
class DeployedTensor:
    """An input or output of the ONNX model; the first dimension of ``shape`` is the text ``batch``."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    units: str | None = None


@dataclass(frozen=True)
class Holdout:
    """How test rows were held out, from which follows whether a row can have been trained on.

    ``by`` is "content", "id", "group" or "time"; ``settings`` are those of the split, the columns that are hashed, and
    all else that their hashes depend on: hashes of other settings say nothing of each other;
    ``cuts`` the seconds since 1970 from which rows validated and tested, where they were split in time.
    """

    by: str
    settings: dict[str, object]
    cuts: list[float] | None


@dataclass(frozen=True)
class RawSignature:
    """The model that takes raw columns: each an input ``[batch, 1]`` in this order, float64 (NaN for missing) or text.

    Its outputs are ``label`` and ``probabilities``, or ``value``.
    """

    model: str
    inputs: list[DeployedTensor]
    outputs: list[DeployedTensor]
    #: How a missing text is written.
    missing: str
    #: By how much the last output may differ from the sample rows' on another machine.
    tolerance: float


@dataclass(frozen=True)
class SampleRows:
    """The rows in ``samples.npz``: whether they are of the test split, or drawn from the schema and the vocabularies;
    and by how much the output may differ from theirs on another machine."""

    real: bool
    tolerance: float


@dataclass(frozen=True)
class ModelSignature:
    """The model on tensors: what a caller must know of it."""

    format: int
    task: str
    target: str
    #: ``model.onnx``, a copy of the chosen variant that says of itself what is written here, and its opset; "" and 0
    #: if there is none.
    model: str
    opset: int
    dynamic_batch: bool
    inputs: list[DeployedTensor]
    outputs: list[DeployedTensor]
    classes: list[str]
    cardinalities: list[int]
    preprocessing: list[str]


@dataclass(frozen=True)
class DeployedSignature(ModelSignature):
    """The contents of ``signature.json``: what a caller who has only this directory must know."""

    #: None without an ONNX model.
    samples: SampleRows | None
    #: None where a graph cannot start from raw columns; ``no_raw`` then says why.
    raw: RawSignature | None
    no_raw: str
    holdout: Holdout | None
    #: Why there is no ONNX model; "" if there is one.
    no_onnx: str = ""

    def onnx(self, directory: Path) -> Path:
        """The ONNX model of the package in ``directory``. Raises ``UserError`` if there is none."""
        if not self.model:
            raise without_onnx(directory, self.no_onnx)
        return directory / self.model


def without_onnx(place: object, why: str) -> UserError:
    return UserError(f"{place}: this export has no ONNX model: {why}")


def digest_line(fingerprint: str) -> str:
    """The content of ``DIGEST`` for an artifact."""
    return f"{fingerprint}  {MANIFEST}\n"


def read_export(directory: Path) -> ExportReport:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole exported model."""
    return read_record(Artifact.open(directory, KIND), REPORT, ExportReport)
