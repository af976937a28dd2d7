"""The page of a rehearsal: every pod over time, and failed attempts with their causes and retry budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.report.pages.rendering import environment
from tests.support.cluster.budgets import Verdict
from tests.support.cluster.pods import Pod
from tests.support.cluster.record import Attempt, Record

#: CSS pixels: the drawing, the names at its left, a row, and the axis at its foot.
WIDTH, NAMES, ROW, AXIS = 1110, 265, 22, 28
#: Room for half of the last tick's label.
MARGIN = 20
TICKS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200)


@dataclass(frozen=True)
class Bar:
    """A pod from its start to its end. ``failure`` is its attempt's number in the list of failures, 0 if it is none."""

    x: float
    width: float
    kind: str
    title: str
    failure: int
    struck: str


@dataclass(frozen=True)
class Row:
    """All pods of one place: a node, or one worker of its job."""

    name: str
    y: float
    bars: tuple[Bar, ...]


@dataclass(frozen=True)
class Failure:
    number: int
    task: str
    node: str
    attempt: int
    where: str
    struck: str
    cause: str
    payer: str


@dataclass(frozen=True)
class Chart:
    """One execution, drawn."""

    title: str
    summary: str
    height: float
    rows: tuple[Row, ...]
    ticks: tuple[tuple[float, str], ...]
    failures: tuple[Failure, ...]
    hits: tuple[str, ...]


def kind_of(verdict: Verdict | None) -> str:
    if verdict is None:
        return "aborted"
    return verdict.payer or "succeeded"


def chart(title: str, record: Record) -> Chart:
    """The drawing of an execution that has ended."""
    seconds = max(record.ended - record.started, 1.0)
    scale = (WIDTH - NAMES - MARGIN) / seconds
    failed = [attempt for attempt in record.attempts if attempt.verdict and not attempt.verdict.succeeded]
    numbers = {id(attempt): number for number, attempt in enumerate(failed, 1)}
    places: dict[str, list[Bar]] = {}
    for attempt in record.attempts:
        for pod in attempt.pods:
            worker = pod.name.rpartition("-worker-")[2] if "-worker-" in pod.name else ""
            name = f"{attempt.task} {attempt.node}" + (f" · worker {worker}" if worker else "")
            bar = bar_of(attempt, pod, record.started, scale, numbers.get(id(attempt), 0))
            places.setdefault(name, []).append(bar)
    rows = tuple(Row(name, ROW * index, tuple(bars)) for index, (name, bars) in enumerate(places.items()))
    step = next((each for each in TICKS if seconds / each <= 14), TICKS[-1])
    ticks = tuple((NAMES + each * scale, f"{each} s") for each in range(0, int(seconds) + 1, step))
    return Chart(
        title=title,
        summary=record.summary(),
        height=ROW * len(rows) + AXIS,
        rows=rows,
        ticks=ticks,
        failures=tuple(failure_of(number, attempt) for number, attempt in enumerate(failed, 1)),
        hits=tuple(f"{task} {node}" for node, task in record.hits.items()),
    )


def bar_of(attempt: Attempt, pod: Pod, origin: float, scale: float, failure: int) -> Bar:
    verdict = attempt.verdict
    said = "succeeded" if verdict and verdict.succeeded else verdict.cause if verdict else "aborted"
    title = f"{pod.name}, attempt {attempt.number}, {pod.ended - pod.started:.1f} s, exit code {pod.exit_code}: {said}"
    return Bar(
        x=NAMES + (pod.started - origin) * scale,
        width=max(2.0, (pod.ended - pod.started) * scale),
        kind=kind_of(verdict),
        title=f"{title}; {pod.struck}" if pod.struck else title,
        failure=failure,
        struck=pod.struck,
    )


def failure_of(number: int, attempt: Attempt) -> Failure:
    assert attempt.verdict
    struck = [(pod.name.partition("-worker-")[2], pod.struck) for pod in attempt.pods if pod.struck]
    return Failure(
        number,
        attempt.task,
        attempt.node,
        attempt.number,
        "spot" if attempt.on_spot else "on demand",
        ", ".join(f"worker {worker}: {how}" if worker else how for worker, how in struck),
        attempt.verdict.cause,
        attempt.verdict.payer,
    )


def write_page(path: Path, heading: str, lead: str, executions: Mapping[str, Record], checks: Sequence[str]) -> None:
    """One self-contained HTML file with a chart for each execution; ``checks`` are what was found out, a line each."""
    charts = [chart(title, record) for title, record in executions.items()]
    template = environment(Path(__file__).parent).get_template("timeline.html")
    page = template.render(heading=heading, lead=lead, charts=charts, checks=checks, width=WIDTH, names=NAMES, row=ROW)
    path.write_text(page, encoding="utf-8")
