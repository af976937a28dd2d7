"""Comparison of a plan with the training's measured results."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.report.against_plan import AgainstPlan, PlannedAmount, against_plan, on_the_clock
from slipstream.pipeline.report.costs import CostFigures
from slipstream.pipeline.report.engine import build_report
from slipstream.shared.artifacts.results.devices import AttemptSpan
from slipstream.shared.errors import UserError
from slipstream.shared.profiles import profile as profiles
from slipstream.shared.profiles.placement import Planned
from slipstream.shared.profiles.profile import Profile, current_profile, load_profile, parse_profile
from slipstream.shared.stages import StageRun
from tests.support.measured_trainings import BATCH, FIGURES, LEDGER, STEPS_DONE
from tests.support.report_pages import Parsed
from tests.support.report_runs import STAGES, results
from tests.support.wording import refuses

ROWS = STEPS_DONE * BATCH
PLANNED = Planned("p4d.24xlarge, spot", ROWS, [5.0, 5.5, 6.0], [10.0, 11.0, 12.5], 1.5)
#: Two attempts of an hour and of four, half an hour apart.
SPANS = [
    AttemptSpan(1, 1.7e9, 3_600.0, "killed", spot=True, lost=60.0),
    AttemptSpan(2, 1.7e9 + 5_400.0, 14_400.0, "finished", spot=True, lost=0.0),
]
RAN = replace(FIGURES, attempts=SPANS, ledger=replace(LEDGER, attempts=2, wall=18_000.0))
COSTS = [CostFigures("train", 5.0, 5.0, None, 13.0, 1.0, 30.0, 0.0)]
TABLE = """
extends = "a100-spot"

[plan]
take = "p4d.24xlarge, spot"
rows = 5000000000
hours = [5, 5.5, 6.0]
dollars = [10.0, 11.0, 12.5]
interruptions = 1.5
"""


def found(planned: Planned = PLANNED) -> AgainstPlan:
    against = against_plan(planned, RAN, COSTS)
    assert against
    return against


def test_hours_are_on_the_clock_and_dollars_those_of_the_training() -> None:
    assert found().hours == PlannedAmount([5.0, 5.5, 6.0], 5.5), "with the half hour between its attempts"
    assert (found().hours.answer, found().dollars.answer) == ("as planned", "more than planned")
    assert found().dollars.actual == 13.0 and found().interruptions == 1 and not found().caveat
    assert against_plan(None, RAN, COSTS) is None


@pytest.mark.parametrize(
    ("actual", "answer"),
    [(4.99, "less than planned"), (5.0, "as planned"), (6.0, "as planned"), (6.01, "more than planned")],
)
def test_as_planned_is_within_what_ninety_of_a_hundred_are(actual: float, answer: str) -> None:
    assert PlannedAmount([5.0, 5.5, 6.0], actual).answer == answer


def test_attempts_of_unknown_times_count_without_their_waits() -> None:
    unknown = replace(RAN, attempts=[replace(SPANS[0], began_at=0.0), SPANS[1]])
    assert on_the_clock(unknown) == 18_000.0 and on_the_clock(replace(RAN, attempts=[])) == 18_000.0


def test_a_training_on_other_rows_is_said_to_be_another() -> None:
    assert "It trained on 18,432,000 rows, not on the planned number" in found(replace(PLANNED, rows=ROWS // 2)).caveat
    assert not found(replace(PLANNED, rows=round(ROWS * 1.009))).caveat


def test_without_a_price_the_dollars_are_not_known() -> None:
    against = against_plan(PLANNED, RAN, [])
    assert against and against.dollars.answer == "unknown"
    assert ("dollars", "$11.00 ($10.00 to $12.50)", "—", "unknown") in list(against.lines())


def test_dollars_of_a_part_of_the_hours_are_not_compared_with_those_of_all() -> None:
    against = against_plan(PLANNED, RAN, [replace(COSTS[0], unpriced_pod_hours=2.0)])
    assert against and against.dollars.answer == "unknown"


def test_less_than_a_cent_is_as_planned() -> None:
    against = against_plan(replace(PLANNED, dollars=[0.001, 0.002, 0.003]), RAN, [replace(COSTS[0], paid=0.0)])
    assert against and against.dollars.answer == "as planned"


def test_the_plan_travels_with_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(TABLE)
    (tmp_path / "larger.toml").write_text('extends = "mine.toml"\n[distributed]\nnodes = 3\n')
    own = load_profile(str(file))
    assert own.plan == Planned("p4d.24xlarge, spot", 5_000_000_000, [5.0, 5.5, 6.0], [10.0, 11.0, 12.5], 1.5)
    assert load_profile(str(tmp_path / "larger.toml")).plan is None, "it is another one than was planned"
    monkeypatch.setenv(profiles.RESOLVED, own.to_json())
    current_profile.cache_clear()
    try:
        assert current_profile() == own
    finally:
        current_profile.cache_clear()


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({"hours": [5.0, 6.0]}, "profile.plan.hours: "),
        ({"dollars": [3.0, 2.0, 4.0]}, "profile.plan.dollars: "),
        ({"interruptions": -1.0}, "profile.plan.interruptions: "),
        ({"rows": 0}, "profile.plan.rows: "),
        ({"hour": 1.0}, "hour"),
    ],
)
def test_a_wrong_plan_is_named(changed: dict[str, object], place: str) -> None:
    table = {"take": "x", "rows": 1, "hours": [1, 2, 3], "dollars": [1, 2, 3], "interruptions": 0.0}
    with refuses(UserError, match=place):
        parse_profile("p", {"plan": {**table, **changed}})
    with refuses(UserError, match="plan:"):
        parse_profile("p", {"plan": 3})


def test_page_and_terminal_say_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> Profile:
        return replace(load_profile("local"), plan=PLANNED)

    monkeypatch.setattr("slipstream.pipeline.report.engine.current_profile", planned)
    train = StageRun("train", 100.0, reused=False)
    summary = build_report(tmp_path / "runs", results(tmp_path / "in", ["no", "yes"]), [STAGES[0], train], {})
    text = " ".join(Parsed(Path(summary.directory, summary.report).read_text(encoding="utf-8")).text.split())
    assert "Planned and actual" in text and "Planned: p4d.24xlarge, spot." in text
    assert "5 h 30 min (5 h 0 min to 6 h 0 min)" in text and "less than planned" in text
    assert ": less than planned, 5 h 30 min (5 h 0 min to 6 h 0 min)" in str(summary)
    again = build_report(
        tmp_path / "runs", results(tmp_path / "on", ["no", "yes"]), [STAGES[0], replace(train, reused=True)], {}
    )
    assert again.against_plan is None and "Planned and actual" not in str(again)
