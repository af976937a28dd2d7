"""Cost of preemptions against closed forms for exponential times."""

from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

from slipstream.operations.plan.simulation import (
    MOST_ATTEMPTS,
    TrainingPace,
    is_warned,
    preemption_table,
    simulate_constant_rate,
)
from slipstream.operations.proofs.rehearsal.command import main
from slipstream.shared.errors import UserError
from slipstream.shared.profiles.profile import load_profile
from tests.support.wording import same_wording

SPOT = load_profile("a100-spot").placement("train")


def mean(per_hour: float, pace: TrainingPace, *, warned: bool) -> tuple[float, float, float]:
    random = np.random.default_rng(1)
    found = simulate_constant_rate(random, per_hour, pace, warned=warned)
    return float(found.lost.mean()), float(found.clock.mean()), float(found.retries.mean())


def test_a_warned_training_loses_starts_and_saves_and_no_step() -> None:
    """Of 24 hours at one preemption in two hours: one retry for each, each of a start and a save."""
    pace = TrainingPace(hours=24, save_s=36, start_s=0)
    lost, clock, retries = mean(0.5, pace, warned=True)
    assert lost == 0
    assert retries == pytest.approx(12, rel=0.02)
    assert clock == pytest.approx(24 + 12 * 0.01, rel=0.001)


def test_without_a_warning_half_an_interval_is_lost_and_what_was_not_published() -> None:
    """Preemptions are independent of saves: the time since the last save is uniform."""
    pace = TrainingPace(hours=24, save_every_s=360, save_s=36, start_s=0)
    lost, _, retries = mean(0.05, pace, warned=False)
    assert lost / retries == pytest.approx(0.1 / 2 + 0.01, rel=0.05)


def test_without_any_save_it_takes_as_long_as_is_known() -> None:
    """A task of t hours that restarts at every event of rate r takes (exp(rt) - 1) / r hours (Daly, 2006)."""
    _, clock, _ = mean(0.5, TrainingPace(hours=2, save_every_s=1e6, start_s=0), warned=False)
    assert clock == pytest.approx((np.exp(1) - 1) / 0.5, rel=0.05)


def test_what_never_gets_on_is_given_up() -> None:
    found = simulate_constant_rate(np.random.default_rng(0), 60.0, TrainingPace(start_s=3600), warned=True, trainings=1)
    assert found.retries[0] == MOST_ATTEMPTS and np.isinf(found.clock[0])


def test_the_notice_has_to_leave_time_for_a_save() -> None:
    assert is_warned(SPOT, TrainingPace(save_s=120)) and not is_warned(SPOT, TrainingPace(save_s=121))
    assert not is_warned(replace(SPOT, notices="none"), TrainingPace(save_s=1))


def test_the_table_marks_what_the_profile_does_and_says_which_retries_suffice() -> None:
    said = preemption_table("a100-spot", SPOT, 8, TrainingPace(), 30.0)
    assert "▸ saves before each end" in said and "▸ resumes" not in said and "price" in said
    assert "24 h of training on 2 pods, at 8 preemptions a day and pod" in said
    assert f"within the {SPOT.retries} retries of this profile; 99 % do within 2" in said
    slow = preemption_table("a100-spot", SPOT, 8, TrainingPace(save_s=500))
    assert "▸ resumes from the last save" in slow and "price" not in slow


@pytest.mark.parametrize("arguments", [["local", "--storm"], ["a100-spot", "--storm", "--hours", "0"]])
def test_what_cannot_be_told_is_one_line(arguments: list[str]) -> None:
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code == 1
    same_wording(ran.output)
    with pytest.raises(UserError):
        preemption_table("local", load_profile("local").placement("train"), 0, TrainingPace())


def test_the_command_takes_the_rate_of_the_profile() -> None:
    ran = CliRunner().invoke(main, ["a100-spot", "--storm", "--hours", "12"])
    assert ran.exit_code == 0 and "12 h of training on 2 pods, at 1 preemptions a day and pod" in ran.output
