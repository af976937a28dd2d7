"""Exported model: ONNX files, their measurements, and the signature of the chosen variant.

The artifact holds one ``.onnx`` file per variant, ``model.onnx`` (the chosen variant) and, for a table,
``model.raw.onnx`` (the chosen variant with raw columns as inputs), ``export.json`` (an :class:`ExportReport`),
``signature.json`` (a :class:`DeployedSignature`), ``schema.json`` and ``statistics.json`` (the transformation of raw
columns to inputs, from the prepared data), ``distributions.json`` (of the training rows), ``samples.npz`` and
``samples.json`` (rows to check the model with) and ``MODEL_CARD.md``.

A transformer also has ``hugging-face/``, which replaces all ONNX files and sample rows above ``export.most_parameters``
parameters. A model with adapters also has ``adapter/``; all other weights include the adapters. ``manifest.sha256``,
next to the manifest, is its digest; :mod:`slipstream.pipeline.export.check` verifies all files.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.shared.artifacts.format import MANIFEST, Artifact
from slipstream.shared.artifacts.records import read_record
from slipstream.shared.artifacts.results.evaluation import METRICS, Scores
from slipstream.shared.artifacts.results.later import Later
from slipstream.shared.errors import UserError

KIND = "export"
REPORT = "export.json"
SIGNATURE = "signature.json"
MODEL_CARD = "MODEL_CARD.md"
#: File with the SHA-256 of the manifest in the format of ``sha256sum``: one digest for all files.
DIGEST = "manifest.sha256"
#: Files of the prepared data, copied so that the export is complete without it.
PREPROCESSING = ("schema.json", "statistics.json")


@dataclass(frozen=True)
class Estimate:
    """Measured value with the limits ``low`` and ``high`` of its interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class LatencyFigures:
    """Latency percentiles in milliseconds per call, with 95 % intervals.

    A percentile is None if fewer than ten calls were slower. Medians have the ratio of paired turns, ``speedup``.
    """

    p50: Estimate | None
    p90: Estimate | None
    p99: Estimate | None
    calls: int
    #: Speedup over ``onnx-fp32`` from alternating measurements; each limit separately holds with 95 %.
    speedup: Estimate | None = None
    #: Mean in milliseconds and coefficient of variation; None in older files.
    mean: float | None = None
    variation: float | None = None

    def percentile(self, name: str) -> Estimate | None:
        return {"p50": self.p50, "p90": self.p90, "p99": self.p99}[name]


@dataclass(frozen=True)
class QualityFigures:
    """Quality lost by a variant against FP32 on the same rows, in points of accuracy or percent of RMSE."""

    loss: float
    #: One-sided limits of the true loss; each holds with the probability ``level``.
    low: float
    high: float
    level: float
    rows: int
    #: Names of the splits of the rows.
    evidence: str
    #: "passed", "failed" or "can't tell".
    answer: str
    #: Estimated number of rows for an answer other than "can't tell"; None if unknown.
    rows_enough: int | None


@dataclass(frozen=True)
class BatchDependence:
    """Differences between the answers of calls with one row and with ``batch`` rows, on the test split."""

    batch: int
    #: Number of labels that differ (0 for a regression), of all.
    labels: int
    of: int
    #: Largest absolute difference of outputs.
    largest_difference: float

    def __str__(self) -> str:
        """Return the dependence in words."""
        return (
            f"a row's answer depends on the other rows of its call: {self.labels:,} of {self.of:,} labels differ "
            f"between calls of 1 and of {self.batch} rows, outputs by up to {self.largest_difference:.2g}"
        )


@dataclass(frozen=True)
class VariantFigures:
    """Measurements of one variant of the exported model.

    A variant that was not timed has only the fields up to ``recipe``, and ``file`` and ``bytes`` only if it was made
    for other devices. ``file`` is also None for torch, which is measured but not exported.
    """

    name: str
    file: str | None
    bytes: int | None
    chosen: bool
    #: Outcome in one or two words, and its reason.
    verdict: str
    reason: str
    #: Code of the quantisation recipe, also part of the file name; "" if not quantised.
    recipe: str = ""
    #: Latency and throughput by batch size.
    latency_ms: dict[str, LatencyFigures] = field(default_factory=dict)
    rows_per_second: dict[str, float] = field(default_factory=dict)
    #: Cost of a million rows by batch size, in the currency of the configured price per hour; empty without a price.
    cost_per_million: dict[str, float] = field(default_factory=dict)
    #: Metrics on the test split; None if it was not timed.
    metrics: Scores | None = None
    #: Largest and mean absolute difference of outputs to the torch model on the test split.
    largest_difference: float | None = None
    mean_difference: float | None = None
    quality: QualityFigures | None = None
    #: None if a row's answer does not depend on the other rows of its call, and in older files.
    by_batch: Later[BatchDependence] = None

    @property
    def timed(self) -> bool:
        """True if the variant was timed."""
        return self.metrics is not None

    def milliseconds(self, batch: str, percentile: str) -> float | None:
        """Return a latency percentile ("p50", "p90" or "p99") at a batch size; None if too few calls were timed."""
        latency = self.latency_ms.get(batch)
        estimate = latency.percentile(percentile) if latency else None
        return estimate.value if estimate else None


@dataclass(frozen=True)
class ProfileFigures:
    """Time of the FP32 variant by operator at one batch size, as the profiler counts it."""

    batch: int
    #: Share of the time (0 to 1) by operator, largest first.
    operators: dict[str, float]
    #: Share of matmuls and convolutions, and its limits, which hold with 95 %; None in older files.
    products: float
    products_limits: Later[tuple[float, float]] = None
    #: Earlier versions' limit of the gain of quantisation, which measured gains exceeded.
    at_most: Later[float] = None
    at_most_limits: Later[tuple[float, float]] = None


@dataclass(frozen=True)
class MachineFigures:
    """Hardware, threads per call and library versions of the measurements."""

    cpu: str
    #: GPU of the measurements if ``export.provider`` is cuda, else "".
    gpu: str
    architecture: str
    #: CPU instruction set extensions relevant to INT8.
    flags: list[str]
    cores: int
    threads: int
    onnxruntime: str
    onnx: str
    torch: str

    @property
    def device(self) -> str:
        return self.gpu or self.cpu


#: Accepted values of vLLM's ``--max-lora-rank`` (default 16).
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class LibraryFiles:
    """Subdirectory with a model or an adapter in Hugging Face's format."""

    name: str
    #: Number of weight files, and their total bytes.
    parts: int
    bytes: int
    #: For an adapter: configured address of the base model, and LoRA rank. "" and 0 for a model.
    base: str = ""
    rank: int = 0
    #: Whether the base was quantised to four bits (NF4) during training.
    four_bits: bool = False

    @property
    def note(self) -> str:
        """Reason why outputs differ from the trained model's; "" if they do not."""
        if not self.four_bits:
            return ""
        why = "it was trained with the base's weights in four bits (NF4), which the complete model contains"
        return f"{why}; on the original base its outputs differ"

    @property
    def loaded_by(self) -> dict[str, str]:
        """Python or shell line that loads the files from the artifact's directory, by library name."""
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
    """Contents of ``export.json``: all variants and the choice."""

    task: str
    #: Empty for a model that is too large for ONNX.
    variants: list[VariantFigures]
    #: Name of the variant to deploy and the reason; "" and the reason if there is none.
    chosen: str
    why: str
    decided_at_batch: int
    #: Name of the best variant by batch size.
    best: dict[str, str]
    max_loss: float
    #: Bits of the INT8 variants' weights. 7 bits give equal results on every CPU; 8 bits require VNNI on x86.
    weight_bits: int
    #: Empty if ``export.provider`` was cuda.
    profile: list[ProfileFigures]
    machine: MachineFigures
    #: Licence of the model; "" if not given.
    licence: str
    #: Empty for models other than transformers; absent in older files.
    libraries: list[LibraryFiles] = field(default_factory=list)
    #: Whether requests may be batched although answers depend on it (``export.mix_requests``); None if not.
    mix_requests: Later[bool] = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for inconsistent fields.

        The task must be known. If there are variants, exactly one must be chosen. If there are profiles, one must be at
        ``decided_at_batch``.
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
        """Batch sizes with a measured median latency, ascending."""
        return sorted({batch for v in self.timed for batch in v.latency_ms if v.milliseconds(batch, "p50")}, key=int)

    @property
    def recommended(self) -> VariantFigures | None:
        """Chosen variant; None if there is no ONNX model."""
        return next((variant for variant in self.variants if variant.chosen), None)

    @property
    def profile_in_words(self) -> str:
        """Sentence with the profiled share of matmuls and convolutions at ``decided_at_batch``; "" if unknown."""
        at = next((each for each in self.profile if each.batch == self.decided_at_batch), None)
        if at is None or at.products_limits is None:
            return ""
        low, high = (100 * limit for limit in at.products_limits)
        return (
            f"Matmuls and convolutions take {100 * at.products:.0f} % ({low:.0f} to {high:.0f}) of the time that ONNX "
            f"Runtime's profiler counts at batch {at.batch}. It slows operators itself, so gains can be larger."
        )


@dataclass(frozen=True)
class DeployedTensor:
    """Input or output of the ONNX model; the first entry of ``shape`` is the text "batch"."""

    name: str
    dtype: str
    shape: tuple[str | int, ...]
    units: str | None = None


#: ``Holdout.by`` of splits that come with the data, and the setting with a digest of their test rows.
GIVEN, HELD_OUT = "the given split", "held_out"


@dataclass(frozen=True)
class Holdout:
    """Rule by which test rows were held out; it tells whether the model may have been trained on a given row.

    ``by`` is "content", "id", "group", "time" or ``GIVEN``. ``settings`` holds all that affects the hashes, such as the
    split's settings and the hashed columns; hashes under others are not comparable. For "time", ``cuts`` are the starts
    of the validation and test splits in seconds since 1970.
    """

    by: str
    settings: dict[str, object]
    cuts: list[float] | None


@dataclass(frozen=True)
class RawSignature:
    """Signature of the model that takes raw columns.

    Every column is an input ``[batch, 1]`` in this order, float64 (NaN if missing) or text. Outputs are ``label`` and
    ``probabilities``, or ``value`` for a regression.
    """

    model: str
    inputs: list[DeployedTensor]
    outputs: list[DeployedTensor]
    #: Text that represents a missing text.
    missing: str
    #: Largest allowed difference of the last output to the stored sample output on another machine.
    tolerance: float


@dataclass(frozen=True)
class SampleRows:
    """Description of ``samples.npz``, sample inputs with the model's outputs.

    ``real`` is True for test rows, False for rows generated from schema and vocabularies. ``tolerance`` is the largest
    allowed difference on another machine.
    """

    real: bool
    tolerance: float


@dataclass(frozen=True)
class ModelSignature:
    """Signature of the model that takes tensors, for its callers."""

    format: int
    task: str
    target: str
    #: File name and opset of the ONNX model, which also holds this signature as metadata; "" and 0 if there is none.
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
    """Contents of ``signature.json``, all that a caller of the exported model needs."""

    #: None without an ONNX model.
    samples: SampleRows | None
    #: None if no graph can take raw columns; ``no_raw`` is then the reason.
    raw: RawSignature | None
    no_raw: str
    holdout: Holdout | None
    #: Reason for having no ONNX model; "" if there is one.
    no_onnx: str = ""
    #: Probability of the second class above which it is predicted; None if the likeliest class is.
    threshold: Later[float] = None

    def onnx(self, directory: Path) -> Path:
        """Return the path of the ONNX model below ``directory``. Raises ``UserError`` if there is none."""
        if not self.model:
            raise without_onnx(directory, self.no_onnx)
        return directory / self.model


def without_onnx(place: object, why: str) -> UserError:
    return UserError(f"{place}: this export has no ONNX model: {why}")


def digest_line(fingerprint: str) -> str:
    """Return the content of ``manifest.sha256`` for an artifact's fingerprint."""
    return f"{fingerprint}  {MANIFEST}\n"


def read_export(directory: Path) -> ExportReport:
    """Return the report of an exported model. Raises ``DamagedArtifact`` if it is incomplete."""
    return read_record(Artifact.open(directory, KIND), REPORT, ExportReport)
