"""Optuna proposes the same from records as in its own study."""

import random

import optuna
import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.config import SweepConfig
from slipstream.pipeline.sweep.records import CurvePoint, RungReported, TrialEnded, TrialHistory
from slipstream.pipeline.sweep.space import searched_parameters

SPACE = {
    "training.learning_rate": {"low": 1e-4, "high": 1e-1, "log": True},
    "training.batch_size": {"low": 8, "high": 64},
    "model.arguments.hidden": {"choices": [[8], [16, 16]]},
}
CONFIG = RunConfig.from_dict({"sweep": {"space": SPACE}})
PARAMETERS = searched_parameters(CONFIG)


@pytest.mark.parametrize(
    ("epochs", "evaluations", "places"),
    [
        (20, 20, [2222, 6666]),
        (27, 27, [1000, 3000, 9000]),
        (1, 9, [111, 333]),
        (2, 2, []),
        (1000, 1000, [12345, 37035, 111105, 333315]),
    ],
)
def test_rungs(epochs: int, evaluations: int, places: list[int]) -> None:
    assert study.rung_positions(epochs, evaluations) == places


def test_a_rung_is_due_once() -> None:
    trial = TrialHistory(1, {}, (RungReported(3000, 0.5, stops=False),))
    assert not study.is_due([2222, 6666], trial, 4000)
    assert study.is_due([2222, 6666], trial, 7000)
    assert not study.is_due([2222, 6666], TrialHistory(1, {}), 2000)


def test_trials_end_where_optunas_pruner_ends_them() -> None:
    """Random losses of sixty trials, one after another: the same decisions as of a study that Optuna keeps itself."""
    draws, places = random.Random(0), [1000, 3000, 9000]
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1000, reduction_factor=study.REDUCTION)
    theirs = optuna.create_study(pruner=pruner)
    ours: list[TrialHistory] = [
        TrialHistory(0, {}, ended=TrialEnded("failed"))
    ]  # the settings as given, which nothing is compared with
    ends = []
    for number in range(1, 61):
        asked, now, best, stopped = theirs.ask(), TrialHistory(number, {"x": 1}), 9.0, False
        for epoch in range(1, 28):
            best = min(best, draws.random() + 3 / epoch)
            asked.report(best, 1000 * epoch)
            expected = asked.should_prune()
            if study.is_due(places, now, 1000 * epoch):
                report = RungReported(1000 * epoch, best, stops=False)
                stopped = study.stops_at_rung(CONFIG.sweep, places, [*ours, now], now, report)
                now = TrialHistory(number, now.values, (*now.reports, RungReported(1000 * epoch, best, stopped)))
            assert stopped == expected, (number, epoch)
            if stopped:
                break
        theirs.tell(asked, state=optuna.trial.TrialState.PRUNED if stopped else None, values=None if stopped else best)
        ours.append(
            TrialHistory(
                now.number, now.values, now.reports, ended=TrialEnded("pruned" if stopped else "complete", best)
            )
        )
        ends.append(epoch)
    assert {1, 3, 9, 27} <= set(ends)


def test_the_settings_as_given_are_trained_to_their_end() -> None:
    others = [TrialHistory(number, {"x": 1}, (RungReported(3000, 0.1, stops=False),)) for number in range(1, 9)]
    given, report = TrialHistory(0, {}), RungReported(3000, 9.0, stops=False)
    assert not study.stops_at_rung(CONFIG.sweep, [2222], [given, *others], given, report)
    worse = TrialHistory(9, {"x": 1})
    assert study.stops_at_rung(CONFIG.sweep, [2222], [given, *others, worse], worse, report)
    assert not study.stops_at_rung(SweepConfig(pruning="none"), [2222], [given, *others, worse], worse, report)


def known(number: int) -> list[TrialHistory]:
    """Trials whose loss depends on the learning rate alone."""
    trials = [TrialHistory(0, {}, ended=TrialEnded("complete", 1.0))]
    while len(trials) < number:
        values = study.propose_trial(CONFIG.sweep, PARAMETERS, trials).values
        loss = abs(values["training.learning_rate"] - 0.01)
        trials.append(
            TrialHistory(len(trials), values, ended=TrialEnded("complete", loss, [CurvePoint(1000, loss, loss)]))
        )
    return trials


def test_what_comes_next_depends_on_the_records_alone() -> None:
    trials = known(14)
    one, two = (study.propose_trial(CONFIG.sweep, PARAMETERS, trials) for _ in range(2))
    assert one == two and one != study.propose_trial(CONFIG.sweep, PARAMETERS, trials[:-1])
    assert study.propose_trial(CONFIG.sweep, PARAMETERS, []).values == {}
    for values in (trial.values for trial in trials[1:]):
        assert 1e-4 <= values["training.learning_rate"] <= 0.1 and values["model.arguments.hidden"] in ([8], [16, 16])
        assert isinstance(values["training.batch_size"], int) and 8 <= values["training.batch_size"] <= 64
    assert len({trial.values["training.learning_rate"] for trial in trials[1:]}) == 13


def test_another_seed_draws_other_settings() -> None:
    other = SweepConfig(space=SPACE, seed=1)
    given = [TrialHistory(0, {}, ended=TrialEnded("complete", 1.0))]
    assert study.propose_trial(other, PARAMETERS, given) != study.propose_trial(CONFIG.sweep, PARAMETERS, given)


def test_the_setting_that_decides_is_the_important_one() -> None:
    found = study.setting_importance(PARAMETERS, known(40))
    assert next(iter(found)) == "training.learning_rate" and found["training.learning_rate"] > 0.8
    assert sum(found.values()) == pytest.approx(1)
    assert study.setting_importance(PARAMETERS, known(5)) == {}
