"""Results of workflows, and their text for a terminal of at least 80 columns.

``pyflyte run`` prints the text at the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from slipstream.pipeline.report import terminal
from slipstream.pipeline.report.against_plan import AgainstPlan
from slipstream.pipeline.report.costs import CostFigures
from slipstream.pipeline.report.figures import DataFigures, NetworkFigures, Quarantined, ScheduleFigures
from slipstream.pipeline.report.terminal import framed_text, labelled_lines
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.artifacts.results.devices import Bottleneck
from slipstream.shared.artifacts.results.evaluation import Evaluation
from slipstream.shared.artifacts.results.export import ExportReport
from slipstream.shared.artifacts.results.ledger import TrainingFigures
from slipstream.shared.artifacts.results.scoring import DriftFigures, Promotion, Publication, ScoredTable, Stability
from slipstream.shared.artifacts.results.sweep import Sweep
from slipstream.shared.stages import StageRun

#: Maximum number of columns and reasons shown; the table's manifest lists all.
LISTED = 5


@dataclass(frozen=True)
class ScoringSummary:
    """Result of a scoring run: the published table."""

    #: Output in which tables are published, and this table's location in it.
    output: str
    table: str
    publication: Publication
    #: False if the table already existed.
    new: bool
    scored: ScoredTable
    #: Outcome of retraining on drift; "" if retraining was not requested.
    retrained: str = ""

    def __str__(self) -> str:
        it = self.scored
        sections = (
            rows(it),
            model(it),
            drift(it.drift),
            labelled_lines("Retrained", self.retrained) if self.retrained else (),
            published(self),
        )
        return framed_text(f"scored → {it.target}", sections)


def rows(it: ScoredTable) -> Iterator[str]:
    aside = f"{fmt.count(it.set_aside)} quarantined" if it.set_aside else "none quarantined"
    yield from labelled_lines("Data", f"{fmt.rows(it.rows)} read, {fmt.count(it.scored)} scored, {aside}")
    for reason in it.reasons[:LISTED]:
        where = f" in column {reason.column!r}" if reason.column else ""
        words = (
            f"{fmt.rows(reason.rows)}: {reason.reason}{where} (first in {reason.file}, line {fmt.count(reason.line)})"
        )
        yield from labelled_lines("", words)


def model(it: ScoredTable) -> Iterator[str]:
    answers = f"probabilities of {len(it.classes)} classes" if it.classes else "values"
    yield from labelled_lines("Model", f"version {it.model}, by its {it.by}; {answers}")


def drift(figures: DriftFigures) -> Iterator[str]:
    if figures.why_unknown:
        yield from labelled_lines("Drift", f"unknown: {figures.why_unknown}")
        return
    if figures.alarms:
        named = ", ".join(map(in_words, figures.alarms[:LISTED]))
        more = f" and {len(figures.alarms) - LISTED} more" if len(figures.alarms) > LISTED else ""
        yield from labelled_lines("Drift", f"found in {named}{more}; the threshold is {figures.threshold:g}")
        return
    largest = max((each for each in figures.measured if each.index is not None), key=lambda each: each.index or 0.0)
    yield from labelled_lines("Drift", f"none found; the largest index is {in_words(largest)} of {figures.threshold:g}")


def in_words(each: Stability) -> str:
    return f"{each.name} {each.index:.3f}"


def published(it: ScoringSummary) -> Iterator[str]:
    """Yield the state of the publication and the table's location, which is never wrapped."""
    state = "now" if it.new else "earlier: the same data, model and settings were already scored"
    yield from labelled_lines("Published", state)
    yield f"{'Table':<12}{it.table}"


@dataclass(frozen=True)
class RunSummary:
    """Result of a whole run.

    ``summary.json`` holds these fields with the same nesting, except ``directory``.
    """

    #: Directory of report and model: ``runs/<time>-<data>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``: the page, the exported artifact, and its recommended variant (or the files for other
    #: libraries if there is none).
    report: str
    model: str
    model_file: str
    data: DataFigures
    #: Evaluation without plot data.
    evaluation: Evaluation
    export: ExportReport
    #: None if the interconnect benchmark failed.
    network: NetworkFigures | None
    stages: list[StageRun]
    #: None if no schedule started the run.
    schedule: ScheduleFigures | None = None
    #: None if promotion was not requested.
    promotion: Promotion | None = None
    #: None if compression was not requested.
    compression: Compression | None = None
    #: None if no sweep ran.
    sweep: Sweep | None = None
    #: None if training finished no step.
    bottleneck: Bottleneck | None = None
    #: Costs of every executed stage, then the total; empty if neither GPUs nor prices are known.
    costs: list[CostFigures] = field(default_factory=list)
    #: Measurements for planning the next training; absent in older summaries.
    training: TrainingFigures | None = None
    #: None unless a plan wrote the profile and this run trained the model.
    against_plan: AgainstPlan | None = None

    def __str__(self) -> str:
        sections = (
            terminal.data_lines(self.data),
            terminal.sweep_lines(self.sweep),
            terminal.compression_lines(self.compression),
            terminal.quality_lines(self.evaluation),
            terminal.training_lines(self.training, self.bottleneck),
            terminal.trained_by(self.training),
            terminal.variant_lines(self.export, self.evaluation.metric_of_rows),
            terminal.network_lines(self.network),
            terminal.time_lines(self.stages),
            terminal.cost_lines(self.costs),
            terminal.plan_lines(self.against_plan),
            terminal.schedule_lines(self.schedule),
            terminal.promotion_lines(self.promotion),
            terminal.file_lines({"Report": self.report, "Model": self.model_file}, self.directory),
        )
        return terminal.framed_text(f"{self.data.source} → {self.data.target}", sections)


@dataclass(frozen=True)
class DataSummary:
    #: Directory of card and data: ``runs/<time>-<data>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``, or the URI of prepared data stored elsewhere.
    card: str
    prepared: str
    data: DataFigures
    #: Reasons for quarantined rows, most frequent first.
    quarantined: list[Quarantined]
    #: Number of columns by role.
    roles: dict[str, int]
    warnings: list[str]
    stages: list[StageRun]

    def __str__(self) -> str:
        sections = (
            terminal.data_lines(self.data),
            terminal.quarantine_lines(self.quarantined),
            terminal.labelled_lines("Columns", ", ".join(f"{fmt.count(n)} {role}" for role, n in self.roles.items())),
            terminal.warning_lines([each for each in self.warnings if each not in self.data.drawn]),
            terminal.time_lines(self.stages),
            terminal.file_lines({"Card": self.card, "Prepared": self.prepared}, self.directory),
        )
        return terminal.framed_text(f"{self.data.source} → {self.data.target}", sections)


@dataclass(frozen=True)
class ExportSummary:
    """Result of an export-only run.

    ``summary.json`` holds these fields, except ``directory``.
    """

    #: Directory of page and model: ``runs/<time>``, or a URI if the run was on a cluster.
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
            terminal.variant_lines(self.export, self.metric),
            terminal.time_lines(self.stages),
            terminal.file_lines({"Report": self.report, "Model": self.model_file}, self.directory),
        )
        return terminal.framed_text(f"export → {self.target}", sections)


@dataclass(frozen=True)
class CompressionSummary:
    compression: Compression

    def __str__(self) -> str:
        its = self.compression
        title = f"{its.method} → {its.taken or 'the trained model stays'}"
        return terminal.framed_text(
            title, [[*terminal.compression_lines(its), f"{'Model':<{terminal.INDENT}}{its.model}"]]
        )


@dataclass(frozen=True)
class NetworkSummary:
    """Result of an interconnect measurement. ``str`` gives the table for the terminal."""

    #: Directory of page and profile: ``runs/<time>``, or a URI if the run was on a cluster.
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
    """Recommended interconnect settings, if any. ``str`` gives them for the terminal."""

    #: Directory of page and result: ``runs/<time>``, or a URI if the run was on a cluster.
    directory: str
    #: Paths within ``directory``.
    page: str
    tuning: str
    #: Recommendation with lines to paste, and the tested settings.
    text: str

    def __str__(self) -> str:
        return f"{self.text}\n\nReport      {self.directory}/{self.page}\nTuning      {self.directory}/{self.tuning}"


def summary_content(summary: RunSummary | ExportSummary) -> dict[str, object]:
    """Return the content of ``summary.json``, which does not name its directory."""
    return {name: value for name, value in to_tree(summary).items() if name != "directory"}
