"""Every transition of the saves in the background."""

from concurrent.futures import Future
from itertools import product
from types import SimpleNamespace
from typing import Any, cast

import pytest

from slipstream.pipeline.train.checkpoint.background import BackgroundSave, CheckpointSave
from slipstream.pipeline.train.checkpoint.home import CheckpointName
from slipstream.pipeline.train.checkpoint.save_states import TRANSITIONS, SaveEvent, SaveState
from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.shared.distributed.process_group import Peers
from slipstream.shared.errors import UserError
from slipstream.shared.storage import StorageUnavailable

IDLE, SAVING, QUEUED, WAITING = SaveState
SNAPSHOT, LATE_SNAPSHOT, FREE, SAVED, UNAVAILABLE, FAILED = SaveEvent
#: Step of the save in progress and of the snapshot that waits, in every state; 0 for none. New snapshots are of step 9.
SLOTS = {IDLE: (0, 0), SAVING: (5, 0), QUEUED: (5, 7), WAITING: (0, 7)}
#: The same after every possible event.
AFTER = {
    (IDLE, SNAPSHOT): (9, 0),
    (IDLE, FREE): (0, 0),
    (SAVING, LATE_SNAPSHOT): (5, 9),
    (SAVING, SAVED): (0, 0),
    (SAVING, UNAVAILABLE): (0, 5),
    (SAVING, FAILED): (0, 0),
    (QUEUED, LATE_SNAPSHOT): (5, 9),
    (QUEUED, SAVED): (0, 7),
    (QUEUED, UNAVAILABLE): (0, 7),
    (QUEUED, FAILED): (0, 7),
    (WAITING, SNAPSHOT): (9, 0),
    (WAITING, FREE): (7, 0),
}
OUTCOMES = {UNAVAILABLE: StorageUnavailable("away"), FAILED: UserError("full")}


def ended(step: int, event: SaveEvent) -> CheckpointSave:
    outcome = Future[CheckpointName]()
    if event in OUTCOMES:
        outcome.set_exception(OUTCOMES[event])
    elif event is SAVED:
        outcome.set_result(CheckpointName(step, 1))
    return CheckpointSave(step, taken=float(step), outcome=outcome)


def background_in(state: SaveState, event: SaveEvent) -> BackgroundSave:
    """A scheduler in ``state`` whose save has ended as ``event`` says; it publishes nothing."""
    publisher: Any = SimpleNamespace(storage=SimpleNamespace(base="home"), peers=Peers(0, 1, None))
    background = BackgroundSave(publisher, DeviceClock())
    background._copier.shutdown()
    background._copier = cast(Any, SimpleNamespace(submit=lambda *_, **__: None, shutdown=lambda wait: None))
    active, waiting = SLOTS[state]
    background.state = state
    background._active = ended(active, event) if active else None
    background._waiting = CheckpointSave(waiting, taken=float(waiting)) if waiting else None
    return background


def steps_of(background: BackgroundSave) -> tuple[int, int]:
    active, waiting = (each.step if each else 0 for each in (background._active, background._waiting))
    return active, waiting


@pytest.mark.parametrize(("state", "event"), product(SaveState, SaveEvent))
def test_every_event_in_every_state(state: SaveState, event: SaveEvent) -> None:
    background = background_in(state, event)
    if (state, event) not in AFTER:
        with pytest.raises(KeyError):
            background.advance(event, CheckpointSave(9, taken=9.0))
        assert steps_of(background) == SLOTS[state]
        return
    if event in (SNAPSHOT, LATE_SNAPSHOT):
        background.begin(9, lambda: cast(Any, None), late=event is LATE_SNAPSHOT)
    elif event is FREE:
        background.resume(20, busy=False)
    else:
        background._take_outcome()
    assert steps_of(background) == AFTER[state, event]
    empty = tuple(bool(step) for step in steps_of(background))
    assert empty == tuple(bool(step) for step in SLOTS[background.state]), "the state says which slots are taken"
    assert background.waiting == any(empty)


def test_the_table_has_these_transitions_only() -> None:
    assert TRANSITIONS.keys() == AFTER.keys()
    reached = {IDLE}
    while more := {after for (state, _), (after, _) in TRANSITIONS.items() if state in reached} - reached:
        reached |= more
    assert reached == set(SaveState)


def test_a_save_that_failed_by_a_bug_is_forgotten_and_raised() -> None:
    background = background_in(QUEUED, FREE)
    assert background._active is not None
    background._active.outcome.set_exception(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        background._take_outcome()
    assert background.state is WAITING and steps_of(background) == (0, 7)
