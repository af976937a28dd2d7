"""Evaluation: scores of the trained model and the baseline on the test split (``evaluation.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from slipstream.artifacts.format import Artifact, ArtifactWriter
from slipstream.artifacts.records import read_record, write_record

KIND = "evaluate"
FILE = "evaluation.json"
#: Metrics by task; a classification with two classes also has ``roc_auc``.
METRICS = {
    "classification": ("accuracy", "log_loss", "macro_f1", "ece"),
    "regression": ("rmse", "mae", "r2"),
    "next token": ("accuracy", "log_loss"),
}
#: Metrics over whole documents of the task "next token"; only text has them.
OF_DOCUMENTS = ("bits_per_byte", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Metrics of one model; None for those of other tasks.

    ``log_loss`` is in nats; ``rmse`` and ``mae`` are in units of the target. ``roc_auc`` is also None if the test split
    has only one of the two classes, and ``r2`` if the targets do not vary. ``bits_per_byte`` is over the text of whole
    documents, ``perplexity`` over their tokens.
    """

    accuracy: float | None = None
    log_loss: float | None = None
    macro_f1: float | None = None
    ece: float | None = None
    roc_auc: float | None = None
    rmse: float | None = None
    mae: float | None = None
    r2: float | None = None
    bits_per_byte: float | None = None
    perplexity: float | None = None

    def of(self, metric: str) -> float | None:
        value: float | None = getattr(self, metric)
        return value


@dataclass(frozen=True, kw_only=True)
class BaselineScores(Scores):
    """Scores of the baseline, its name and the number of its training rows."""

    name: str
    rows_trained: int


@dataclass(frozen=True)
class Headline:
    """Metric that decides about the model.

    It is "accuracy" (a share of one), "rmse" (in units of the target) or "bits_per_byte".
    """

    name: Literal["accuracy", "rmse", "bits_per_byte"]
    value: float


@dataclass(frozen=True)
class Gain:
    """Gain of the model over the baseline on the same rows, with its 95 % interval.

    It is in points of accuracy, percent of the baseline's RMSE, or bits per byte.
    """

    value: float
    low: float
    high: float

    @property
    def shown(self) -> int:
        """1 if significantly better, -1 if significantly worse, 0 if not significant."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class CalibrationBin:
    """Interval (``above``, ``to``] of confidence: its rows, mean confidence, and accuracy with a 95 % interval."""

    above: Annotated[float, Field(alias="from")]
    to: float
    rows: int
    confidence: float
    accuracy: float
    low: float
    high: float


@dataclass(frozen=True)
class RocCurve:
    """False and true positive rates, ascending and of equal length."""

    fpr: list[float]
    tpr: list[float]


@dataclass(frozen=True)
class Scatter:
    """Actual and predicted values of a sample of the test rows."""

    actual: list[float]
    predicted: list[float]


@dataclass(frozen=True, kw_only=True)
class PlotData:
    """Data of the report's plots.

    A classification has ``confusion`` and ``calibration``, and ``roc`` if there are two classes that both occur in the
    test split; a regression has ``scatter``.
    """

    #: Rows are the true classes, columns the predicted ones.
    confusion: list[list[int]] | None = None
    calibration: list[CalibrationBin] | None = None
    roc: RocCurve | None = None
    scatter: Scatter | None = None


@dataclass(frozen=True)
class Continuation:
    """Start of a held-out document or a question, and the model's continuation."""

    document: str
    prompt: str
    text: str


@dataclass(frozen=True)
class LanguageFigures:
    """Held-out documents that measured a model of text: their number, bytes and learned tokens."""

    documents: int
    bytes: int
    tokens: int
    continuations: list[Continuation]


@dataclass(frozen=True, kw_only=True)
class Evaluation(PlotData):
    """Contents of ``evaluation.json``."""

    task: str
    #: Rows of the test split.
    rows: int
    metric: Headline
    model: Scores
    baseline: BaselineScores
    gain: Gain
    classes: list[str]
    #: For text only.
    language: LanguageFigures | None = None

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for an unknown task, a metric of another task, or plot data of other classes."""
        if self.metric.name not in (*METRICS.get(self.task, ()), *(OF_DOCUMENTS if self.language else ())):
            raise ValueError(f"{self.task!r} is not evaluated by {self.metric.name}")
        if self.roc is not None and (len(self.classes) != 2 or len(self.roc.fpr) != len(self.roc.tpr)):
            raise ValueError("the ROC curve needs two classes and equal numbers of false and true positive rates")
        if self.confusion is not None and {len(self.confusion), *map(len, self.confusion)} != {len(self.classes)}:
            raise ValueError(f"the confusion matrix does not have {len(self.classes)} classes")
        if self.scatter is not None and len(self.scatter.actual) != len(self.scatter.predicted):
            raise ValueError("the numbers of predicted and actual values differ")

    @property
    def metric_names(self) -> list[str]:
        """Names of this task's metrics, whether or not they are defined on these rows."""
        binary = ["roc_auc"] if len(self.classes) == 2 else []
        return [*METRICS[self.task], *binary, *(OF_DOCUMENTS if self.language else ())]

    @property
    def metric_of_rows(self) -> str:
        """Metric of variants and of the validation split, which have rows but no documents."""
        return "accuracy" if self.language else self.metric.name


def write_evaluation(directory: Path, evaluation: Evaluation, made_by: Mapping[str, object]) -> Artifact:
    """Write the artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    write_record(writer, FILE, evaluation)
    return writer.finish(KIND, made_by)


def read_evaluation(directory: Path) -> Evaluation:
    """Return the evaluation in ``directory``. Raises ``DamagedArtifact`` if it is not whole."""
    return read_record(Artifact.open(directory, KIND), FILE, Evaluation)
