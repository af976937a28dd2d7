"""Page of a rehearsal: every pod over time, and failed attempts with their causes and retry budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.operations.proofs.rehearsal.outcomes import AttemptOutcome
from slipstream.operations.proofs.rehearsal.pods import PodProcess
from slipstream.operations.proofs.rehearsal.record import AttemptSteps, ExecutionRecord, TaskAttempt
from slipstream.pipeline.report.pages.rendering import jinja_environment

#: CSS pixels: width of the drawing, width of the names on its left, height of a row and of the axis below.
WIDTH, NAMES, ROW, AXIS = 1110, 265, 22, 28
#: Space for half of the last tick's label.
MARGIN = 20
TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


@dataclass(frozen=True)
class PodBar:
    """Bar of a pod from its start to its end. ``failure`` is the number of its failed attempt in the list, or 0."""

    x: float
    width: float
    kind: str
    title: str
    failure: int
    struck: str


@dataclass(frozen=True)
class PodRow:
    """Row of all pods of a node, or of one worker of its job."""

    name: str
    y: float
    bars: tuple[PodBar, ...]


@dataclass(frozen=True)
class FailedAttempt:
    number: int
    task: str
    node: str
    attempt: int
    where: str
    struck: str
    cause: str
    payer: str


@dataclass(frozen=True)
class ExecutionChart:
    """Drawing of one execution."""

    title: str
    summary: str
    height: float
    rows: tuple[PodRow, ...]
    ticks: tuple[tuple[float, str], ...]
    failures: tuple[FailedAttempt, ...]
    hits: tuple[str, ...]
    steps: tuple[AttemptSteps, ...]


def kind_of(outcome: AttemptOutcome | None) -> str:
    if outcome is None:
        return "aborted"
    return outcome.payer or "succeeded"


def execution_chart(title: str, record: ExecutionRecord) -> ExecutionChart:
    """Return the drawing of an execution that has ended."""
    seconds = max(record.ended - record.started, 1.0)
    scale = (WIDTH - NAMES - MARGIN) / seconds
    failed = [attempt for attempt in record.attempts if attempt.outcome and not attempt.outcome.succeeded]
    numbers = {id(attempt): number for number, attempt in enumerate(failed, 1)}
    places: dict[str, list[PodBar]] = {}
    for attempt in record.attempts:
        for pod in attempt.pods:
            worker = pod.name.rpartition("-worker-")[2] if "-worker-" in pod.name else ""
            name = f"{attempt.task} {attempt.node}" + (f" · worker {worker}" if worker else "")
            bar = bar_of(attempt, pod, record.started, scale, numbers.get(id(attempt), 0))
            places.setdefault(name, []).append(bar)
    rows = tuple(PodRow(name, ROW * index, tuple(bars)) for index, (name, bars) in enumerate(places.items()))
    step = next((each for each in TICKS if seconds / each <= 14), TICKS[-1])
    ticks = tuple((NAMES + each * scale, f"{each} s") for each in range(0, int(seconds) + 1, step))
    return ExecutionChart(
        title=title,
        summary=record.summary(),
        height=ROW * len(rows) + AXIS,
        rows=rows,
        ticks=ticks,
        failures=tuple(failure_of(number, attempt) for number, attempt in enumerate(failed, 1)),
        hits=tuple(f"{task} {node}" for node, task in record.hits.items()),
        steps=record.steps,
    )


def bar_of(attempt: TaskAttempt, pod: PodProcess, origin: float, scale: float, failure: int) -> PodBar:
    outcome = attempt.outcome
    said = "succeeded" if outcome and outcome.succeeded else outcome.cause if outcome else "aborted"
    title = f"{pod.name}, attempt {attempt.number}, {pod.ended - pod.started:.1f} s, exit code {pod.exit_code}: {said}"
    return PodBar(
        x=NAMES + (pod.started - origin) * scale,
        width=max(2.0, (pod.ended - pod.started) * scale),
        kind=kind_of(outcome),
        title=f"{title}; {pod.struck}" if pod.struck else title,
        failure=failure,
        struck=pod.struck,
    )


def failure_of(number: int, attempt: TaskAttempt) -> FailedAttempt:
    assert attempt.outcome
    struck = [(pod.name.partition("-worker-")[2], pod.struck) for pod in attempt.pods if pod.struck]
    return FailedAttempt(
        number,
        attempt.task,
        attempt.node,
        attempt.number,
        "spot" if attempt.on_spot else "on demand",
        ", ".join(f"worker {worker}: {how}" if worker else how for worker, how in struck),
        attempt.outcome.cause,
        attempt.outcome.payer,
    )


def write_page(
    path: Path, heading: str, lead: str, executions: Mapping[str, ExecutionRecord], checks: Sequence[str]
) -> None:
    """Write a self-contained HTML file with a chart per execution and the ``checks`` that passed."""
    charts = [execution_chart(title, record) for title, record in executions.items()]
    template = jinja_environment(Path(__file__).parent).get_template("timeline.html")
    page = template.render(heading=heading, lead=lead, charts=charts, checks=checks, width=WIDTH, names=NAMES, row=ROW)
    path.write_text(page, encoding="utf-8")
