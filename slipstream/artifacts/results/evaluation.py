"""The evaluation: how the trained model and the baseline score on the test split (``evaluation.json``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from slipstream.artifacts.format import Artifact, ArtifactWriter

KIND = "evaluate"
FILE = "evaluation.json"


class Scores(TypedDict, total=False):
    """Metrics of one model. A classification has the first five, tokens the first two, a regression the last three.

    ``log_loss`` is in nats; ``rmse`` and ``mae`` are in units of the target. ``roc_auc`` is there for two classes only;
    it is None if the test split has only one of them. ``r2`` is None if the targets do not vary.
    """

    accuracy: float
    log_loss: float
    macro_f1: float
    ece: float
    roc_auc: float | None
    rmse: float
    mae: float
    r2: float | None


class BaselineScores(Scores):
    """The scores of the baseline, its name and the number of rows that it was trained on."""

    name: str
    rows_trained: int


class Headline(TypedDict):
    """The one metric by which the model is judged."""

    name: str
    value: float


#: One occupied interval (from, to] of confidence: its rows, their mean confidence and their accuracy.
CalibrationBin = TypedDict(
    "CalibrationBin", {"from": float, "to": float, "rows": int, "confidence": float, "accuracy": float}
)


class RocCurve(TypedDict):
    """False and true positive rates, ascending and of equal length."""

    fpr: list[float]
    tpr: list[float]


class Scatter(TypedDict):
    """Actual and predicted values of a sample of the test rows."""

    actual: list[float]
    predicted: list[float]


class PlotData(TypedDict):
    """Data of the report's plots. A classification has ``confusion`` and ``calibration``, and ``roc`` if there are two
    classes (None if the test split has only one of them); a regression has ``scatter``."""

    #: Rows are the true classes, columns the predicted ones.
    confusion: NotRequired[list[list[int]]]
    calibration: NotRequired[list[CalibrationBin]]
    roc: NotRequired[RocCurve | None]
    scatter: NotRequired[Scatter]


class Evaluation(PlotData):
    """The contents of ``evaluation.json``."""

    task: str
    #: Rows of the test split.
    rows: int
    metric: Headline
    model: Scores
    baseline: BaselineScores
    classes: list[str]


def write_evaluation(directory: Path, evaluation: Evaluation, made_by: Mapping[str, Any]) -> Artifact:
    """Write the artifact into the fresh ``directory``."""
    writer = ArtifactWriter(directory)
    writer.write_json(FILE, evaluation)
    return writer.finish(KIND, made_by)


def read_evaluation(directory: Path) -> Evaluation:
    """Raises ``DamagedArtifact`` if the directory does not hold a whole evaluation."""
    return Artifact.open(directory, KIND).read_json(FILE)
