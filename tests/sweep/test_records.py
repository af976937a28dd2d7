"""Records of trials: damaged and changed ones neither count nor block."""

import json
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.engine import sweep_identity
from slipstream.pipeline.sweep.records import (
    CurvePoint,
    ExecutionStarted,
    Record,
    RungReported,
    SweepIdentity,
    TrialDied,
    TrialEnded,
    TrialHistory,
    TrialProposed,
    decode_sweep_record,
    encode_record,
)
from slipstream.pipeline.sweep.space import untyped_parameters
from slipstream.pipeline.sweep.store import SweepStore, best_trial, early_end_reason
from slipstream.shared.errors import UserError
from slipstream.shared.storage import storage_for
from tests.support.proving import first_few
from tests.support.wording import refuses, same_wording

RECORDS: list[Record] = [
    TrialProposed({"training.learning_rate": 1e-3, "model.arguments.hidden": [8, 16]}),
    RungReported(2222, 0.25, stops=True),
    TrialDied(20, "SIGKILL"),
    TrialEnded("complete", 0.125, [CurvePoint(1000, 0.5, 0.5), CurvePoint(2000, 0.125, 0.125)], 1.5, "ab" * 32),
    TrialEnded("failed", reason="out of memory"),
]
PARAMETERS = untyped_parameters({"training.epochs": {"low": 0, "high": 99}})
IDENTITY = SweepIdentity("data", {"name": "mlp"}, {"epochs": 3}, {"training.epochs": {"low": 1, "high": 3}}, 0)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was_and_no_part_of_it_counts(record: Record) -> None:
    content = encode_record(record).rstrip()  # without its last line break it says the same
    assert decode_sweep_record(content) == record
    assert not [end for end in range(len(content)) if decode_sweep_record(content[:end]) is not None]


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        *zip(RECORDS, ("proposed", "reported", "died", "ended", "ended"), strict=True),
        (IDENTITY, "identity"),
        (ExecutionStarted("f1", 1.5), "started"),
    ],
)
def test_stored_kinds_do_not_depend_on_class_names(record: Record, kind: str) -> None:
    assert json.loads(encode_record(record))["kind"] == kind


def test_a_record_of_an_earlier_version_is_read() -> None:
    content = b"""{"kind": "reported", "nonce": "00", "record": {"best": 0.25, "progress": 2222, "stops": true},
    "sha256": "d5684f574d26c57c6051c7243dfd304c39e061df1ec0d39ac14e3412d57bd688"}"""
    assert decode_sweep_record(content) == RungReported(2222, 0.25, stops=True)


def test_a_flipped_bit_is_seen_wherever_it_is() -> None:
    content = encode_record(RECORDS[3])
    believed = []
    for place in range(len(content)):
        for bit in range(8):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            if decode_sweep_record(bytes(changed)) is not None:
                believed.append((place, bit))
    assert not believed


def complete(loss: float) -> TrialEnded:
    return TrialEnded("complete", loss, weights="ab" * 32)


def begin_six(store: SweepStore) -> None:
    """The settings as given, and five trials of the space."""
    store.propose(lambda _: TrialProposed({}))
    for number in range(1, 6):
        store.propose(partial(proposed, number))


def proposed(number: int, known: object) -> TrialProposed:
    return TrialProposed({"training.epochs": number})


@pytest.mark.parametrize("kept", [0, 1, 40, -2])
def test_a_record_that_is_cut_is_passed_over(tmp_path: Path, kept: int) -> None:
    """The settings of one trial and the end of another are cut, as a disk may leave them: the one trial is as if it
    had not begun, the other has not ended, and both can go on."""
    store = SweepStore(str(tmp_path), PARAMETERS)
    for number in range(3):
        assert store.propose(partial(proposed, number)) == TrialHistory(number, {"training.epochs": number})
        store.append(number, complete(1.0 + number))
    for name in ("0001/0001.json", "0002/0002.json"):
        file = tmp_path / "records" / name
        file.write_bytes(file.read_bytes()[:kept])
    again = SweepStore(str(tmp_path), PARAMETERS)
    assert [(trial.number, trial.ended is not None) for trial in again.trials()] == [(0, True), (2, False)]
    again.append(2, complete(5.0))
    begun = again.propose(lambda trials: TrialProposed({"training.epochs": len(trials)}))
    assert begun and begun.number == 3
    found = {trial.number: trial for trial in SweepStore(str(tmp_path), PARAMETERS).trials()}
    assert found[2].ended == complete(5.0) and found[3].values == {"training.epochs": 2}


def test_what_a_store_begins_with_may_be_cut_too(tmp_path: Path) -> None:
    SweepStore(str(tmp_path), PARAMETERS).open(IDENTITY)
    file = tmp_path / "records/sweep/0001.json"
    file.write_bytes(file.read_bytes()[:-2])
    SweepStore(str(tmp_path), PARAMETERS).open(IDENTITY)
    assert SweepStore(str(tmp_path), PARAMETERS).identity() == IDENTITY


def test_of_two_that_say_the_same_the_first_counts(tmp_path: Path) -> None:
    """A worker that was thought dead ends a trial that its successor has ended."""
    first, second = SweepStore(str(tmp_path), PARAMETERS), SweepStore(str(tmp_path), PARAMETERS)
    first.propose(lambda _: TrialProposed({}))
    second.trials()
    first.append(0, complete(0.5))
    second.append(0, TrialEnded("pruned", 0.7))
    assert [trial.ended for trial in SweepStore(str(tmp_path), PARAMETERS).trials()] == [complete(0.5)]


def propose_many(store: SweepStore, number: int, mine: list[int]) -> None:
    while len(mine) < number:
        found = store.propose(lambda trials: TrialProposed({"training.epochs": len(trials)}))
        if found is not None:
            mine.append(found.number)


@pytest.mark.parametrize("where", first_few(["disk", "s3"]))
def test_workers_that_propose_at_once_share_no_number(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = str(tmp_path)
    if where == "s3":
        request.getfixturevalue("store")
        address = f"s3://bucket/{tmp_path.name}"
    mine: list[list[int]] = [[] for _ in range(4)]
    threads = [threading.Thread(target=propose_many, args=(SweepStore(address, PARAMETERS), 5, each)) for each in mine]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(number for each in mine for number in each)
    assert numbers == list(range(20))
    assert [trial.number for trial in SweepStore(address, PARAMETERS).trials()] == numbers


@pytest.mark.parametrize(
    "changed",
    [{"data": "others"}, {"space": {}}, {"seed": 1}, {"model": {"name": "resnet"}}, {"training": {"epochs": 4}}],
)
def test_another_sweep_in_the_same_store_is_refused(tmp_path: Path, changed: dict[str, object]) -> None:
    SweepStore(str(tmp_path), PARAMETERS).open(IDENTITY)
    SweepStore(str(tmp_path), PARAMETERS).open(IDENTITY)
    with refuses(UserError):
        SweepStore(str(tmp_path), PARAMETERS).open(SweepIdentity(**{**vars(IDENTITY), **changed}))


def test_a_sweep_from_before_a_setting_goes_on_where_it_has_the_default(tmp_path: Path) -> None:
    run = RunConfig.from_dict({"sweep": {"space": IDENTITY.space}})
    now = sweep_identity(run, "data")
    younger = ("base", "lora", "quantise")
    model = {name: value for name, value in now.model.items() if name not in younger}
    training = {name: value for name, value in now.training.items() if name != "ema"}
    gradients = {name: value for name, value in now.training["gradients"].items() if name != "hook"}
    training |= {"gradients": gradients, "compile": False}  # the latter decided once
    SweepStore(str(tmp_path), PARAMETERS).open(replace(now, model=model, training=training))
    SweepStore(str(tmp_path), PARAMETERS).open(now)
    with refuses(UserError):
        SweepStore(str(tmp_path), PARAMETERS).open(replace(now, model={**now.model, "quantise": "nf4"}))


def test_five_failures_at_the_start_are_no_accident(tmp_path: Path) -> None:
    store = SweepStore(str(tmp_path), PARAMETERS)
    begin_six(store)
    for number in range(5):
        assert not early_end_reason(store.trials())
        store.append(number, TrialEnded("failed", reason=f"reason {number}"))
    same_wording(early_end_reason(store.trials()))
    store.append(5, TrialEnded("pruned", 1.0))
    assert not early_end_reason(store.trials()) and best_trial(store.trials()) is None


@pytest.mark.parametrize("given", [0, 3, 7])
def test_others_may_fail_while_the_settings_as_given_are_trained(given: int, tmp_path: Path) -> None:
    store = SweepStore(str(tmp_path), PARAMETERS)
    for number in range(8):
        store.propose(partial(proposed, number) if number != given else lambda _: TrialProposed({}))
        if number != given:
            store.append(number, TrialEnded("failed", reason=f"reason {number}"))
    assert not early_end_reason(store.trials())
    store.append(given, TrialEnded("failed", reason="as given"))
    same_wording(early_end_reason(store.trials()))


def test_minutes_are_counted_from_the_first_start_of_an_execution(tmp_path: Path) -> None:
    store = SweepStore(str(tmp_path), PARAMETERS)
    assert store.started("one", 100.0) == 100.0
    assert SweepStore(str(tmp_path), PARAMETERS).started("one", 200.0) == 100.0
    assert store.started("two", 300.0) == 300.0


def test_what_a_trial_has_left_is_deleted_but_for_its_records(tmp_path: Path) -> None:
    store = SweepStore(str(tmp_path), PARAMETERS)
    store.propose(lambda _: TrialProposed({}))
    storage = storage_for(store.checkpoints(0))
    storage.put("step-000000000020.a0001/manifest.json", b"{}")
    storage.put("step-000000000020.a0001/tensors.bin", b"1")
    store.drop_checkpoints(0)
    assert not storage.list() and len(store.trials()) == 1
