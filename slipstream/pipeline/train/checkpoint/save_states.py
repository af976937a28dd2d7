"""States of the saves in the background, as a table that :class:`.BackgroundSave` follows."""

from __future__ import annotations

from enum import Enum


class SaveState(Enum):
    """Unpublished work, equal on all ranks."""

    IDLE = "nothing"
    #: Its outcome may be known, but is not taken yet.
    SAVING = "a save"
    QUEUED = "a save, and a newer snapshot that waits for it"
    WAITING = "a snapshot that waits, after a save ended"


class SaveEvent(Enum):
    """Event that all ranks see at the same point."""

    SNAPSHOT = "a snapshot was taken, and no save is in progress"
    LATE_SNAPSHOT = "a snapshot was taken while a save is in progress"
    FREE = "no save is in progress"
    SAVED = "the save was published"
    UNAVAILABLE = "the store did not answer the save"
    FAILED = "the save was refused, or failed"


class SaveAction(Enum):
    """Reaction to an event."""

    NONE = "nothing"
    PUBLISH_SNAPSHOT = "publish the new snapshot, and forget a waiting one"
    KEEP_SNAPSHOT = "let the new snapshot wait, and forget a waiting one"
    PUBLISH_WAITING = "publish the waiting snapshot"
    DROP = "forget the save that ended"
    RETRY = "let the snapshot of the save that ended wait"


#: Next state and action for every event. The outcome of a save (SAVED, UNAVAILABLE, FAILED) is taken before a snapshot
#: that is not late, and before FREE.
TRANSITIONS: dict[tuple[SaveState, SaveEvent], tuple[SaveState, SaveAction]] = {
    (SaveState.IDLE, SaveEvent.SNAPSHOT): (SaveState.SAVING, SaveAction.PUBLISH_SNAPSHOT),
    (SaveState.IDLE, SaveEvent.FREE): (SaveState.IDLE, SaveAction.NONE),
    (SaveState.SAVING, SaveEvent.LATE_SNAPSHOT): (SaveState.QUEUED, SaveAction.KEEP_SNAPSHOT),
    (SaveState.SAVING, SaveEvent.SAVED): (SaveState.IDLE, SaveAction.DROP),
    (SaveState.SAVING, SaveEvent.UNAVAILABLE): (SaveState.WAITING, SaveAction.RETRY),
    (SaveState.SAVING, SaveEvent.FAILED): (SaveState.IDLE, SaveAction.DROP),
    (SaveState.QUEUED, SaveEvent.LATE_SNAPSHOT): (SaveState.QUEUED, SaveAction.KEEP_SNAPSHOT),
    (SaveState.QUEUED, SaveEvent.SAVED): (SaveState.WAITING, SaveAction.DROP),
    (SaveState.QUEUED, SaveEvent.UNAVAILABLE): (SaveState.WAITING, SaveAction.DROP),
    (SaveState.QUEUED, SaveEvent.FAILED): (SaveState.WAITING, SaveAction.DROP),
    (SaveState.WAITING, SaveEvent.SNAPSHOT): (SaveState.SAVING, SaveAction.PUBLISH_SNAPSHOT),
    (SaveState.WAITING, SaveEvent.FREE): (SaveState.SAVING, SaveAction.PUBLISH_WAITING),
}
