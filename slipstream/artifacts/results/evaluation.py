"""The evaluation: how the trained model and the baseline score on the test split (``evaluation.json``)."""

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
#: The metrics of each task; of a classification with two classes also ``roc_auc``.
METRICS = {
    "classification": ("accuracy", "log_loss", "macro_f1", "ece"),
    "regression": ("rmse", "mae", "r2"),
    "next token": ("accuracy", "log_loss"),
}
#: Of the task "next token" those of whole documents, which only text has.
OF_DOCUMENTS = ("bits_per_byte", "perplexity")


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Metrics of one model; None for those of other tasks.

    ``log_loss`` is in nats; ``rmse`` and ``mae`` are in units of the target. ``roc_auc`` is None, too, if the test
    split has only one of the two classes, and ``r2`` if the targets do not vary. ``bits_per_byte`` is of the text of
    whole documents, and ``perplexity`` of their tokens.
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
    """The scores of the baseline, its name and the number of rows that it was trained on."""

    name: str
    rows_trained: int


@dataclass(frozen=True)
class Headline:
    """The one metric by which the model is judged: "accuracy" (a share of one), "rmse" (in units of the target) or
    "bits_per_byte"."""

    name: Literal["accuracy", "rmse", "bits_per_byte"]
    value: float


@dataclass(frozen=True)
class Gain:
    """How much better the model is than the baseline on the same rows, with its 95 % interval: points of accuracy,
    percent of the baseline's RMSE, or bits per byte."""

    value: float
    low: float
    high: float

    @property
    def shown(self) -> int:
        """1 if it is shown to be better, -1 if it is shown to be worse, 0 if the rows can't tell."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class CalibrationBin:
    """An interval (``above``, ``to``] of confidence: its rows, their mean confidence, and their accuracy with its 95 %
    interval."""

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
    """Data of the report's plots. A classification has ``confusion`` and ``calibration``, and ``roc`` if there are two
    classes that both occur in the test split; a regression has ``scatter``."""

    #: Rows are the true classes, columns the predicted ones.
    confusion: list[list[int]] | None = None
    calibration: list[CalibrationBin] | None = None
    roc: RocCurve | None = None
    scatter: Scatter | None = None


@dataclass(frozen=True)
class Continuation:
    """How a held-out document begins, or what is asked, and what the model goes on with."""

    document: str
    prompt: str
    text: str


@dataclass(frozen=True)
class LanguageFigures:
    """The held-out documents that a model of text was measured on: how many, their bytes, and their learned tokens."""

    documents: int
    bytes: int
    tokens: int
    continuations: list[Continuation]


@dataclass(frozen=True, kw_only=True)
class Evaluation(PlotData):
    """The contents of ``evaluation.json``."""

    task: str
    #: Rows of the test split.
    rows: int
    metric: Headline
    model: Scores
    baseline: BaselineScores
    gain: Gain
    classes: list[str]
    #: Of text.
    language: LanguageFigures | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a task that is none, or is not judged by this metric, and for data of plots that is
        not of these classes."""
        if self.metric.name not in (*METRICS.get(self.task, ()), *(OF_DOCUMENTS if self.language else ())):
            raise ValueError(f"{self.task!r} is not judged by {self.metric.name}")
        if self.roc is not None and (len(self.classes) != 2 or len(self.roc.fpr) != len(self.roc.tpr)):
            raise ValueError("a ROC curve of two classes has as many false as true positive rates")
        if self.confusion is not None and {len(self.confusion), *map(len, self.confusion)} != {len(self.classes)}:
            raise ValueError(f"the confusion matrix is not one of {len(self.classes)} classes")
        if self.scatter is not None and len(self.scatter.actual) != len(self.scatter.predicted):
            raise ValueError("there are not as many predicted as actual values")

    @property
    def metric_names(self) -> list[str]:
        """The names of the metrics that this task has, whether they are defined on these rows or not."""
        binary = ["roc_auc"] if len(self.classes) == 2 else []
        return [*METRICS[self.task], *binary, *(OF_DOCUMENTS if self.language else ())]

    @property
    def metric_of_rows(self) -> str:
        """The metric of variants and of the validation split, of which rows are known, but no documents."""
        return "accuracy" if self.language else self.metric.name


def write_evaluation(directory: Path, evaluation: Evaluation, made_by: Mapping[str, object]) -> Artifact:
    """Write the artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    write_record(writer, FILE, evaluation)
    return writer.finish(KIND, made_by)


def read_evaluation(directory: Path) -> Evaluation:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole evaluation."""
    return read_record(Artifact.open(directory, KIND), FILE, Evaluation)
