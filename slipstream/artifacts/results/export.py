"""Exported model: ONNX files, their measurements, and the signature of the chosen one.

The artifact holds one ``.onnx`` file per variant, ``model.onnx`` (the chosen one) and, for a table, ``model.raw.onnx``
(the same from raw columns), ``export.json`` (an :class:`ExportReport`), ``signature.json`` (a
:class:`DeployedSignature`), ``schema.json`` and ``statistics.json`` (the transformation of raw columns to inputs, from
the prepared data), ``distributions.json`` (of the training rows), ``samples.npz`` and ``samples.json`` (rows to check
it with) and ``MODEL_CARD.md``.

A transformer also has ``hugging-face/``; above ``export.most_parameters`` parameters this replaces all ONNX files and
sample rows. A model with adapters also has ``adapter/``; all other weights include the adapters. Next to the manifest
lies its digest, ``manifest.sha256``; :mod:`slipstream.export.check` verifies all of it.
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
#: SHA-256 of the manifest, as ``sha256sum`` writes it: one digest over all files.
DIGEST = "manifest.sha256"
#: Files of the prepared data, copied next to the model so that it can be used anywhere.
PREPROCESSING = ("schema.json", "statistics.json")


@dataclass(frozen=True)
class Estimate:
    """Measured figure with its interval."""

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
    #: Speedup over ``onnx-fp32``, in paired turns; every limit holds with 95 %.
    speedup: Estimate | None = None
    #: Mean and coefficient of variation; None in older files.
    mean: float | None = None
    variation: float | None = None

    def percentile(self, name: str) -> Estimate | None:
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99}[name]


#: A limit of this many percent or points, or more, means that there is none.
NO_LIMIT = 1000.0


@dataclass(frozen=True)
class QualityFigures:
    """Loss of a variant against FP32 on the same rows, in points of accuracy or percent of RMSE."""

    loss: float
    #: Limits of the true loss; every one holds with the probability ``level``.
    low: float
    high: float
    level: float
    rows: int
    #: Splits that the rows come from.
    evidence: str
    #: "passed", "failed" or "can't tell".
    answer: str
    #: Number of rows that would decide it, if known.
    rows_enough: int | None


@dataclass(frozen=True)
class VariantFigures:
    """Figures of one variant.

    A variant that was not timed has the first fields only; its ``file`` and ``bytes`` are None unless it was made for
    other devices. ``file`` is also None for variants outside the artifact: torch, and variants that were ruled out
    early.
    """

    name: str
    file: str | None
    bytes: int | None
    chosen: bool
    #: Outcome in one or two words, and the reason.
    verdict: str
    reason: str
    #: Code of the recipe of a quantised variant, also in its file name.
    recipe: str = ""
    #: By batch size.
    latency_ms: dict[str, LatencyFigures] = field(default_factory=dict)
    rows_per_second: dict[str, float] = field(default_factory=dict)
    #: By batch size, if there is a price per hour: cost of a million rows in its currency.
    cost_per_million: dict[str, float] = field(default_factory=dict)
    #: On the test split.
    metrics: Scores | None = None
    #: Largest and mean absolute difference to the torch model's outputs on the test split.
    largest_difference: float | None = None
    mean_difference: float | None = None
    quality: QualityFigures | None = None

    @property
    def timed(self) -> bool:
        """True if it was measured rather than ruled out earlier."""
        return self.metrics is not None

    def milliseconds(self, batch: str, percentile: str) -> float | None:
        """Return a percentile of the latency at a batch size; None if there are too few measurements."""
        latency = self.latency_ms.get(batch)
        estimate = latency.percentile(percentile) if latency else None
        return estimate.value if estimate else None


@dataclass(frozen=True)
class ProfileFigures:
    """Time of FP32 by operator at one batch size."""

    batch: int
    #: Shares of the time by operator, the largest first.
    operators: dict[str, float]
    #: Share of matmuls and convolutions, which INT8 can speed up, and the speedup of a model in which they took no
    #: time.
    products: float
    at_most: float


@dataclass(frozen=True)
class MachineFigures:
    """CPU, threads per call and library versions with which the variants were measured."""

    cpu: str
    #: The GPU of the measurements if ``export.provider`` was cuda; else "".
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
        """Device that ran the variants."""
        return self.gpu or self.cpu


#: Values that vLLM accepts for ``--max-lora-rank``, whose default is 16.
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LibraryFiles:
    """Directory of the artifact that Hugging Face's and compatible libraries load: a model or an adapter."""

    name: str
    #: Number of weight files, and their bytes in total.
    parts: int
    bytes: int
    #: For an adapter: the configured address of its base model, and its width.
    base: str = ""
    rank: int = 0
    #: Whether the base was held in four bits during training.
    four_bits: bool = False

    @property
    def note(self) -> str:
        """Difference to the trained model; "" if there is none."""
        if not self.four_bits:
            return ""
        why = "it was trained with the base's weights in four bits (NF4), which the complete model contains"
        return f"{why}; on the original base its outputs differ"

    @property
    def loaded_by(self) -> dict[str, str]:
        """Line of code or shell that loads it from the artifact's directory, by library."""
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
    """Contents of ``export.json``."""

    task: str
    #: Empty for a model that is too large for ONNX.
    variants: list[VariantFigures]
    #: Name of the variant to deploy and the reason; "" and why there is none.
    chosen: str
    why: str
    decided_at_batch: int
    #: Best variant by batch size.
    best: dict[str, str]
    max_loss: float
    #: Bits of the INT8 variants' weights: 7 give the same numbers on every CPU, 8 need VNNI on x86.
    weight_bits: int
    #: Empty if ``export.provider`` was cuda.
    profile: list[ProfileFigures]
    machine: MachineFigures
    #: Licence of the model; "" if not given.
    licence: str
    #: Empty for models other than transformers; absent in older files.
    libraries: list[LibraryFiles] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for inconsistent fields.

        The task must be known, one variant must be the chosen one if there are any, and the batch size that decided
        must have been profiled.
        """
        expected = [self.chosen] if self.variants or self.chosen else []
        if [variant.name for variant in self.variants if variant.chosen] != expected:
            raise ValueError("expected exactly one chosen variant, named by the field chosen")
        if self.task not in METRICS:
            raise ValueError(f"{self.task!r} is not a task")
        if self.profile and self.decided_at_batch not in [each.batch for each in self.profile]:
            raise ValueError("the batch size of the decision was not profiled")

    @property
    def timed(self) -> list[VariantFigures]:
        return [variant for variant in self.variants if variant.timed]

    @property
    def batches(self) -> list[str]:
        """Batch sizes at which a median was measured, ascending."""
        return sorted({batch for v in self.timed for batch in v.latency_ms if v.milliseconds(batch, "p50")}, key=int)

    @property
    def recommended(self) -> VariantFigures | None:
        """Chosen variant; None without an ONNX model."""
        return next((variant for variant in self.variants if variant.chosen), None)

    @property
    def ceiling(self) -> str:
        """Greatest possible gain of quantisation at the deciding batch size, in words."""
        if not self.profile:
            return "The largest possible gain of quantisation is unknown, as operators are timed on CPUs only"
        at = next(each for each in self.profile if each.batch == self.decided_at_batch)
        return (
            f"Matmuls and convolutions take {100 * at.products:.0f} % of FP32's time at batch {at.batch}: without "
            f"them the model would be {at.at_most:.2f} times as fast"
        )


@dataclass(frozen=True)
class DeployedTensor:
    """Input or output of the ONNX model; the first dimension of ``shape`` is the text ``batch``."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    units: str | None = None


@dataclass(frozen=True)
class Holdout:
    """Rule by which test rows were held out; it decides whether a row can have been trained on.

    ``by`` is "content", "id", "group" or "time". ``settings`` are those of the split, the hashed columns, and
    everything else that the hashes depend on: hashes of different settings cannot be compared. ``cuts`` are the seconds
    since 1970 from which rows validated and tested, if they were split in time.
    """

    by: str
    settings: dict[str, object]
    cuts: list[float] | None


@dataclass(frozen=True)
class RawSignature:
    """Signature of the model on raw columns.

    Every column is an input ``[batch, 1]`` in this order, float64 (NaN for missing) or text. Outputs are ``label`` and
    ``probabilities``, or ``value``.
    """

    model: str
    inputs: list[DeployedTensor]
    outputs: list[DeployedTensor]
    #: Text that stands for a missing one.
    missing: str
    #: Largest allowed difference of the last output to the sample rows' on another machine.
    tolerance: float


@dataclass(frozen=True)
class SampleRows:
    """Rows in ``samples.npz``.

    They are test rows if ``real``, else drawn from the schema and the vocabularies. ``tolerance`` is the largest
    allowed difference to their output on another machine.
    """

    real: bool
    tolerance: float


@dataclass(frozen=True)
class ModelSignature:
    """Signature of the model on tensors, for callers."""

    format: int
    task: str
    target: str
    #: ``model.onnx``, a copy of the chosen variant with this signature as metadata, and its opset; "" and 0 if there is
    #: none.
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
    """Contents of ``signature.json``, for callers who have only this directory."""

    #: None without an ONNX model.
    samples: SampleRows | None
    #: None if a graph cannot start from raw columns; ``no_raw`` then gives the reason.
    raw: RawSignature | None
    no_raw: str
    holdout: Holdout | None
    #: Reason why there is no ONNX model; "" if there is one.
    no_onnx: str = ""

    def onnx(self, directory: Path) -> Path:
        """Return the path of the ONNX model of the package in ``directory``. Raises ``UserError`` without one."""
        if not self.model:
            raise without_onnx(directory, self.no_onnx)
        return directory / self.model


def without_onnx(place: object, why: str) -> UserError:
    return UserError(f"{place}: this export has no ONNX model: {why}")


def digest_line(fingerprint: str) -> str:
    """Return the content of ``DIGEST`` for an artifact."""
    return f"{fingerprint}  {MANIFEST}\n"


def read_export(directory: Path) -> ExportReport:
    """Return the report of the exported model in ``directory``. Raises ``DamagedArtifact`` if it is not whole."""
    return read_record(Artifact.open(directory, KIND), REPORT, ExportReport)
