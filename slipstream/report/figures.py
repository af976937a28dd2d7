"""The figures of a run.

``summary.json`` holds the fields of :class:`RunFigures` under their own names, nested as here; only ``directory`` is
left out, because the file moves with the directory that it lies in.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from slipstream.artifacts.results.compression import Compression
from slipstream.artifacts.results.promotion import Promotion


@dataclass(frozen=True)
class DataFigures:
    """The data: where it came from, the target, and rows by what became of them."""

    source: str
    target: str
    #: "classification" or "regression".
    task: str
    #: Of a classification; 0 for a regression.
    classes: int
    rows_read: int
    rows_kept: int
    rows_quarantined: int
    rows_train: int
    rows_validation: int
    rows_test: int


@dataclass(frozen=True)
class QualityFigures:
    """How good the trained model is on the test split, beside a baseline trained and scored on the same rows."""

    #: The metric by which things are compared: "accuracy" (a share of one) or "rmse" (in units of the target).
    metric: str
    value: float
    baseline: str
    baseline_value: float | None
    #: All metrics of the model and of the baseline by name; None where one is not defined.
    model_metrics: dict[str, float | None]
    baseline_metrics: dict[str, float | None]


@dataclass(frozen=True)
class VariantFigures:
    """One form of the model. What was not measured, because the variant could not be made, is None."""

    name: str
    #: In the directory ``model``; empty for what is not a file.
    file: str
    bytes: int | None
    #: Milliseconds per call by batch size ("1", "32", "256"), where enough calls were measured for the percentile.
    latency_p50_ms: dict[str, float]
    latency_p90_ms: dict[str, float]
    latency_p99_ms: dict[str, float]
    #: How many times as fast as FP32 by batch size, and the lower limits of that; empty for FP32 itself.
    speedup: dict[str, float]
    speedup_low: dict[str, float]
    #: The metric of :class:`QualityFigures`.
    value: float | None
    #: What is lost against FP32 on the same rows, in points of accuracy or percent of RMSE, with its limits.
    loss: float | None
    loss_low: float | None
    loss_high: float | None
    #: The largest and the mean difference of any output from torch's, over the test split.
    largest_difference: float | None
    mean_difference: float | None
    chosen: bool
    #: What became of it, in one or two words, and why.
    verdict: str
    reason: str

    @property
    def timed(self) -> bool:
        """Whether it was measured, and not left out before."""
        return bool(self.latency_p50_ms) or self.value is not None


@dataclass(frozen=True)
class NetworkFigures:
    """The interconnect, by the conventions of nccl-tests. The all_reduce figures are None if it was not measured."""

    #: Processes, nodes, "gloo" or "nccl", and the device.
    world: int
    nodes: int
    backend: str
    device: str
    #: Median microseconds at the smallest size, which is given in bytes.
    all_reduce_latency_us: float | None
    all_reduce_latency_bytes: int | None
    #: Bus bandwidth in 1e9 bytes a second at the largest size, which is given in bytes. 0 for one process.
    all_reduce_busbw_gbps: float | None
    all_reduce_busbw_bytes: int | None
    #: Seconds since 1970, UTC: it may be the profile of an earlier run on the same hardware.
    measured_at: float
    #: What is slow, and other things that somebody should look at.
    findings: list[str]


@dataclass(frozen=True)
class StageFigures:
    """How long a stage took; next to nothing if its result was reused."""

    name: str
    seconds: float
    reused: bool


@dataclass(frozen=True)
class ScheduleFigures:
    """A run that a schedule started. Times are UTC, to the minute."""

    kickoff: str
    #: When its report was made.
    ended: str
    #: The later times of the schedule at which nothing was started, because this run was still going.
    skipped: list[str]


@dataclass(frozen=True)
class RunFigures:
    """The figures of a whole run."""

    #: Where the report and the model are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``: the page, the exported artifact, and the recommended variant in it.
    report: str
    model: str
    model_file: str
    data: DataFigures
    quality: QualityFigures
    variants: list[VariantFigures]
    chosen: str
    why: str
    #: What quantisation could gain at most, in words.
    ceiling: str
    #: The CPU that the latencies were measured on, and the threads of each variant.
    machine: str
    threads: int
    #: None if the benchmark of the interconnect failed.
    network: NetworkFigures | None
    stages: list[StageFigures]
    #: None if no schedule started the run.
    schedule: ScheduleFigures | None
    #: None if the model was not to go into service.
    promotion: Promotion | None
    #: None if the trained network was not to become smaller.
    compression: Compression | None


@dataclass(frozen=True)
class ExportFigures:
    """The figures of a run that only exports a trained model."""

    #: Where the page and the model are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    report: str
    model: str
    model_file: str
    target: str
    metric: str
    variants: list[VariantFigures]
    chosen: str
    why: str
    ceiling: str
    machine: str
    threads: int
    stages: list[StageFigures]


@dataclass(frozen=True)
class Quarantined:
    """Rows set aside for one reason: how many, and where the first of them was."""

    reason: str
    column: str
    rows: int
    file: str
    line: int


@dataclass(frozen=True)
class DataRunFigures:
    """The figures of a run that only prepares."""

    #: Where card and data are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``; of prepared data that lie elsewhere the URI.
    card: str
    prepared: str
    data: DataFigures
    #: Reasons for which rows were set aside, the most frequent first.
    quarantined: list[Quarantined]
    #: The number of columns by role.
    roles: dict[str, int]
    warnings: list[str]
    stages: list[StageFigures]


def to_json(summary: RunFigures | ExportFigures) -> dict[str, Any]:
    """What ``summary.json`` holds."""
    return {name: value for name, value in asdict(summary).items() if name != "directory"}
