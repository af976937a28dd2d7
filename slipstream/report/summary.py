"""What a workflow returns, and its text for a terminal of at least 80 columns, which ``pyflyte run`` prints at the
end."""

from __future__ import annotations

from dataclasses import dataclass, field

from slipstream.artifacts.records import to_tree
from slipstream.artifacts.results.bottleneck import Bottleneck
from slipstream.artifacts.results.compression import Compression
from slipstream.artifacts.results.evaluation import Evaluation
from slipstream.artifacts.results.export import ExportReport
from slipstream.artifacts.results.promotion import Promotion
from slipstream.artifacts.results.sweep import Sweep
from slipstream.artifacts.results.training_figures import TrainingFigures
from slipstream.report import formatting as fmt
from slipstream.report import terminal
from slipstream.report.against_plan import AgainstPlan
from slipstream.report.costs import CostFigures
from slipstream.report.figures import DataFigures, NetworkFigures, Quarantined, ScheduleFigures
from slipstream.stages import StageRun


@dataclass(frozen=True)
class RunSummary:
    """A whole run. ``summary.json`` holds these fields, nested as here, but for ``directory``."""

    #: Where the report and the model are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``: the page, the exported artifact, and the recommended variant in it, or what other
    #: libraries load if there is none.
    report: str
    model: str
    model_file: str
    data: DataFigures
    #: Without the data of its plots.
    evaluation: Evaluation
    export: ExportReport
    #: None if the benchmark of the interconnect failed.
    network: NetworkFigures | None
    stages: list[StageRun]
    #: None if no schedule started the run.
    schedule: ScheduleFigures | None = None
    #: None if the model was not to go into service.
    promotion: Promotion | None = None
    #: None if the trained model was not to become smaller.
    compression: Compression | None = None
    #: None if no settings were searched.
    sweep: Sweep | None = None
    #: None if training finished no step.
    bottleneck: Bottleneck | None = None
    #: Of each stage that was made, then of all; empty where neither GPUs nor prices are known.
    costs: list[CostFigures] = field(default_factory=list)
    #: What the training measured, for who plans the next; absent in summaries from before it was kept.
    training: TrainingFigures | None = None
    #: None unless a plan wrote the profile and the model was trained in this run.
    against_plan: AgainstPlan | None = None

    def __str__(self) -> str:
        sections = (
            terminal.data(self.data),
            terminal.swept(self.sweep),
            terminal.tried(self.compression),
            terminal.quality(self.evaluation),
            terminal.held_back(self.bottleneck),
            terminal.trained_by(self.training),
            terminal.variants(self.export, self.evaluation.metric_of_rows),
            terminal.network(self.network),
            terminal.time(self.stages),
            terminal.cost(self.costs),
            terminal.planned(self.against_plan),
            terminal.schedule(self.schedule),
            terminal.promotion(self.promotion),
            terminal.places({"Report": self.report, "Model": self.model_file}, self.directory),
        )
        return terminal.framed(f"{self.data.source} → {self.data.target}", sections)


@dataclass(frozen=True)
class DataSummary:
    """A run that only prepares."""

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
    stages: list[StageRun]

    def __str__(self) -> str:
        sections = (
            terminal.data(self.data),
            terminal.quarantined(self.quarantined),
            terminal.labelled("Columns", ", ".join(f"{fmt.count(n)} {role}" for role, n in self.roles.items())),
            terminal.warnings(self.warnings),
            terminal.time(self.stages),
            terminal.places({"Card": self.card, "Prepared": self.prepared}, self.directory),
        )
        return terminal.framed(f"{self.data.source} → {self.data.target}", sections)


@dataclass(frozen=True)
class ExportSummary:
    """A run that only exports a trained model. ``summary.json`` holds these fields, but for ``directory``."""

    #: Where the page and the model are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    report: str
    model: str
    model_file: str
    target: str
    metric: str
    export: ExportReport
    stages: list[StageRun]

    def __str__(self) -> str:
        sections = (
            terminal.variants(self.export, self.metric),
            terminal.time(self.stages),
            terminal.places({"Report": self.report, "Model": self.model_file}, self.directory),
        )
        return terminal.framed(f"export → {self.target}", sections)


@dataclass(frozen=True)
class CompressionSummary:
    """A trained model that was to become smaller."""

    compression: Compression

    def __str__(self) -> str:
        its = self.compression
        title = f"{its.method} → {its.taken or 'the trained model stays'}"
        return terminal.framed(title, [[*terminal.tried(its), f"{'Model':<{terminal.INDENT}}{its.model}"]])


@dataclass(frozen=True)
class NetworkSummary:
    """A measurement of the interconnect alone. ``str`` gives the table for the terminal."""

    #: Where page and profile are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    page: str
    profile: str
    #: All measurements in the columns of nccl-tests.
    table: str

    def __str__(self) -> str:
        return f"{self.table}\n\nReport      {self.directory}/{self.page}\nProfile     {self.directory}/{self.profile}"


@dataclass(frozen=True)
class TuningSummary:
    """Settings with which training steps are faster, or none. ``str`` gives them for the terminal."""

    #: Where page and result are: ``runs/<timestamp>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    page: str
    tuning: str
    #: The recommendation with lines to paste, and what was tried.
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n\nReport      {self.directory}/{self.page}\nTuning      {self.directory}/{self.tuning}"


def figures_of(summary: RunSummary | ExportSummary) -> dict[str, object]:
    """What ``summary.json`` holds: it moves with the directory that it lies in."""
    return {name: value for name, value in to_tree(summary).items() if name != "directory"}
