"""Forged and damaged records of a sweep: they change no settings and block no worker."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import RunConfig
from slipstream.pipeline.sweep import study
from slipstream.pipeline.sweep.records import (
    Record,
    RungReported,
    TrialEnded,
    TrialHistory,
    TrialProposed,
    assemble_trials,
    encode_record,
    unchanged_trial,
)
from slipstream.pipeline.sweep.space import searched_parameters, values_objection
from tests.support import REPOSITORY
from tests.support.sweep_runs import CONFIG, SweepRun
from tests.support.wording import same_wording

RATE, HIDDEN, BATCH = "training.learning_rate", "model.arguments.hidden", "training.batch_size"
SPACE: dict[str, Any] = {
    RATE: {"low": 1e-4, "high": 1e-1, "log": True},
    BATCH: {"low": 8, "high": 64},
    HIDDEN: {"choices": [[8], [16, 16], 1, True, {"b": 1, "a": 2}]},
}
SEARCHED = RunConfig.from_dict({"sweep": {"space": SPACE}})
PARAMETERS = searched_parameters(SEARCHED)
RIGHT = {RATE: 0.01, BATCH: 8, HIDDEN: [8]}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        (RIGHT, ""),
        ({**RIGHT, RATE: 1e-4, BATCH: 64, HIDDEN: {"a": 2, "b": 1}}, ""),
        ({**RIGHT, "model.name": "evil:make"}, "sets model.name, which sweep.space does not have"),
        ({"model.name": "evil:make"}, "sets model.name, which sweep.space does not have"),
        ({**RIGHT, "": 1, "training": {}}, "sets , training, which sweep.space does not have"),
        ({RATE: 0.01, BATCH: 8}, "does not set model.arguments.hidden, which sweep.space has"),
        ({**RIGHT, RATE: 0.2}, "sets training.learning_rate to 0.2, which cannot be drawn from sweep.space"),
        ({**RIGHT, RATE: 0}, "sets training.learning_rate to 0, which"),
        ({**RIGHT, RATE: "0.01"}, "sets training.learning_rate to '0.01', which"),
        ({**RIGHT, RATE: None}, "sets training.learning_rate to None, which"),
        ({**RIGHT, RATE: 10**400}, "sets training.learning_rate to 1"),
        ({**RIGHT, BATCH: 8.0}, "sets training.batch_size to 8.0, which"),
        ({**RIGHT, BATCH: 7}, "sets training.batch_size to 7, which"),
        ({**RIGHT, BATCH: True}, "sets training.batch_size to True, which"),
        ({**RIGHT, HIDDEN: [8.0]}, "sets model.arguments.hidden to [8.0], which"),
        ({**RIGHT, HIDDEN: 1.0}, "sets model.arguments.hidden to 1.0, which"),
        ({**RIGHT, HIDDEN: False}, "sets model.arguments.hidden to False, which"),
    ],
)
def test_exactly_the_settings_of_the_space_are_set_to_what_it_has(values: dict[str, Any], why: str) -> None:
    said = values_objection(values, PARAMETERS)
    assert said.startswith(why) and bool(said) == bool(why)


@settings(deadline=None)
@given(sampler=st.sampled_from(["tpe", "random"]), seed=st.integers(0, 2**32), number=st.integers(1, 12))
def test_whatever_is_proposed_counts(sampler: str, seed: int, number: int) -> None:
    sweep = RunConfig.from_dict({"sweep": {"space": SPACE, "sampler": sampler, "seed": seed}}).sweep
    trials = [TrialHistory(0, {})]
    for each in range(1, number + 1):
        values = study.propose_trial(sweep, PARAMETERS, trials).values
        assert not values_objection(values, PARAMETERS)
        trials.append(TrialHistory(each, values, ended=TrialEnded("complete", 1 / each, weights="ab")))


@pytest.mark.parametrize(
    ("end", "counts"),
    [
        (TrialEnded("complete", 0.5, weights="ab" * 32), True),
        (TrialEnded("complete", 0.5), False),
        (TrialEnded("complete", weights="ab" * 32), False),
        (TrialEnded("pruned", 0.5), True),
        (TrialEnded("pruned"), False),
        (TrialEnded("failed", reason="its code has a bug"), True),
        (TrialEnded("failed", 0.5), False),
    ],
)
def test_an_end_needs_the_fields_of_its_state(end: TrialEnded, *, counts: bool) -> None:
    (trial,), _ = assemble_trials({0: [TrialProposed({}), end]}, PARAMETERS)
    assert trial.ended == (end if counts else None)
    later = TrialEnded("pruned", 0.7)
    (trial,), _ = assemble_trials({0: [TrialProposed({}), end, later]}, PARAMETERS)
    assert trial.ended == (end if counts else later)


def test_the_first_that_sets_nothing_is_the_configuration_as_given() -> None:
    found: dict[int, list[Record]] = {
        0: [],  # damaged
        2: [TrialProposed({"model.name": "evil:make"}), TrialProposed(RIGHT)],
        3: [RungReported(1000, 0.5, stops=False), TrialProposed(RIGHT)],
        5: [TrialProposed({})],
        6: [TrialProposed({}), TrialEnded("pruned", 0.5)],
    }
    trials, ignored = assemble_trials(found, PARAMETERS)
    assert [(trial.number, trial.values) for trial in trials] == [(3, RIGHT), (5, {})]
    assert list(ignored) == [2, 6]
    same_wording(ignored[6])
    as_given = unchanged_trial(trials)
    assert as_given and as_given.number == 5
    assert study.propose_trial(SEARCHED.sweep, PARAMETERS, trials).values and not unchanged_trial(trials[:1])
    assert study.propose_trial(SEARCHED.sweep, PARAMETERS, trials[:1]).values == {}
    # It is trained to its end, whatever the others came to.
    others = [TrialHistory(number, RIGHT, (RungReported(3000, 0.1, stops=False),)) for number in range(5)]
    report = RungReported(3000, 9.0, stops=False)
    assert not study.stops_at_rung(SEARCHED.sweep, [2222], [*others, as_given], as_given, report)
    # A trial that has number 0 is one like any other.
    worse = TrialHistory(0, RIGHT)
    assert study.stops_at_rung(SEARCHED.sweep, [2222], [as_given, *others[1:], worse], worse, report)


@pytest.mark.prove
def test_one_worker_among_all_of_them(tmp_path: Path, prepared: Path) -> None:
    """Bad records of every kind are ignored.

    The record of the given settings is cut. Others set a factory, too few settings, or values that cannot be drawn. A
    valid record ended without a loss. A valid record under a number that is taken does not count.
    """
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    right = {RATE: 0.01, HIDDEN: [8]}
    forged: dict[str, bytes] = {
        "0000/0001": encode_record(TrialProposed({}))[:-9],
        "0001/0001": encode_record(TrialProposed({**right, "model.name": "evil:make"})),
        "0001/0002": encode_record(TrialProposed(right)),
        "0001/0003": encode_record(TrialEnded("complete", -1e9, weights="ab" * 32)),
        "0002/0001": encode_record(TrialProposed({RATE: 0.01})),
        "0003/0001": encode_record(TrialProposed({**right, HIDDEN: [10**6]})),
        "0004/0001": encode_record(TrialProposed(right)),
        "0004/0002": encode_record(TrialEnded("complete", weights="ab" * 32)),
    }
    for name, content in forged.items():
        file = tmp_path / f"store/records/{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    run = SweepRun(tmp_path, prepared, RunConfig.from_dict({**CONFIG, "sweep": {**CONFIG["sweep"], "trials": 3}}))
    run.environment["PYTHONPATH"] = f"{REPOSITORY}:{tmp_path}"
    run.start("one")
    trials = run.finish()
    assert [(trial.number, trial.values == {}) for trial in trials] == [(4, False), (5, True), (6, False)]
    assert all(trial.ended and trial.ended.state in ("complete", "pruned") for trial in trials), run.said()
    assert trials[0].values == right and (tmp_path / "store/trials/0005/model/manifest.json").exists()
    assert sorted(path.name for path in (tmp_path / "store/trials").iterdir()) == ["0004", "0005", "0006"]
    said = run.said()
    for number, why in ((1, "model.name, which"), (2, "does not set"), (3, "cannot be drawn")):
        assert said.count(f"records/{number:04d}/: ") == 1 and why in said, said
    assert not (tmp_path / "ran").exists()
