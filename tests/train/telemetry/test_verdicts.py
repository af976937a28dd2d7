"""Trainings that are held back by one known cause name it and no other, and predict their time without it.

Two processes on two cores; nothing else may run at the same time.
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.links import NotAllowed
from harness.provoked import BITES, HEALTHY, PROVOCATIONS, QUIET_CPUS, Outcome, Provocation, quiet_run, varied
from slipstream.shared.artifacts.results import devices as causes

SEEDS, HEALTHY_RUNS = 5, 10


@dataclass(frozen=True)
class Rounds:
    """Runs by seed: ``healthy[seed]`` belongs to ``provoked[name][seed]``."""

    healthy: list[Outcome]
    provoked: dict[str, list[Outcome]]


def made(provocation: Provocation, tables: Path, place: Path) -> Outcome:
    """Skips the test where the fault cannot be made."""
    try:
        return quiet_run(provocation, tables, place)
    except NotAllowed as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def rounds(tmp_path_factory: pytest.TempPathFactory) -> Rounds:
    base = tmp_path_factory.mktemp("verdicts")
    found = Rounds([], {each.name: [] for each in PROVOCATIONS})
    for seed in range(SEEDS):
        for number in range(HEALTHY_RUNS // SEEDS):
            found.healthy.append(made(HEALTHY, base, base / f"healthy-{seed}-{number}"))
        for each in PROVOCATIONS:
            place = base / f"{each.name}-{seed}".replace(" ", "-")
            outcome = made(varied(each, seed), base, place)
            print(f"{each.name:24} {outcome.bottleneck.verdict:14} {outcome.bottleneck.shares}", flush=True)
            found.provoked[each.name].append(outcome)
    return found


def bites(outcome: Outcome, healthy: Outcome) -> bool:
    return outcome.row_s >= BITES * healthy.row_s


@pytest.mark.prove
@pytest.mark.alone
def test_the_verdict_is_the_cause_and_no_other(rounds: Rounds) -> None:
    right, counted, wrong = 0, 0, []
    for each in PROVOCATIONS:
        for seed, outcome in enumerate(rounds.provoked[each.name]):
            healthy = rounds.healthy[seed * (HEALTHY_RUNS // SEEDS)]
            if not bites(outcome, healthy):
                continue
            counted += 1
            verdict = outcome.bottleneck.verdict
            right += verdict == each.cause
            if verdict not in (each.cause, "", causes.CONTENDED):
                wrong.append((each.name, seed, outcome.bottleneck))
            assert verdict != causes.CONTENDED or outcome.others_cpus >= QUIET_CPUS, (each.name, seed, outcome)
    assert not wrong
    assert counted >= 0.9 * SEEDS * len(PROVOCATIONS), f"only {counted} faults bit"
    assert right >= 0.95 * counted, f"{right} of {counted}"


@pytest.mark.prove
@pytest.mark.alone
def test_healthy_runs_are_not_blamed(rounds: Rounds) -> None:
    for outcome in rounds.healthy:
        verdict = outcome.bottleneck.verdict
        assert verdict in ("", causes.CONTENDED), outcome.bottleneck
        assert not verdict or outcome.others_cpus >= QUIET_CPUS
        assert outcome.bottleneck.useful > 0.6


@pytest.mark.prove
@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "within"),
    [("slow loader on all", 0.25), ("slow loader on one", 0.25), ("slow link", 0.4), ("slow rank", 0.4)],
)
def test_what_mending_it_gains(rounds: Rounds, name: str, within: float) -> None:
    ratios = []
    for seed, outcome in enumerate(rounds.provoked[name]):
        pair = rounds.healthy[seed * (HEALTHY_RUNS // SEEDS) : (seed + 1) * (HEALTHY_RUNS // SEEDS)]
        ratios.append(outcome.predicted_s / statistics.mean(each.step_s for each in pair))
    print(name, [f"{ratio:.2f}" for ratio in ratios])
    assert abs(statistics.median(ratios) - 1) <= within
