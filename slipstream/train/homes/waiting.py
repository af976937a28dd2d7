"""Waiting for those who were in a home before: another execution that trains the same, or the attempt before this."""

from __future__ import annotations

import time

from slipstream.artifacts.homes import Holder
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.storage import storage_for
from slipstream.train.homes.home import Finished, Home
from slipstream.train.homes.layout import Name
from slipstream.train.homes.lease import Sign, Watch

POLL_S = 1.0
#: A predecessor on this machine's disk is seen to have gone at once.
POLL_IN_HASTE_S = 0.1

LOG = logger("checkpoint")


def wait_for_others(address: str, holder: Holder, when_held: str) -> bool:
    """Wait until no other execution works in the home at ``address``; returns whether there was one.

    What comes before ``holder`` in the same execution is not waited for: its end is certain, and it is fenced off when
    ``holder`` claims the home. Raises ``UserError`` if ``when_held`` is "refuse" and the other one is alive.
    """
    home = Home(storage_for(address))
    watch, waited = Watch(home), False
    while (found := watch.look()) and not home.finished():
        attempt, sign = found
        other = home.holder_of(attempt)
        if holder.succeeds(other):
            break
        if when_held == "refuse" and watch.alive:
            raise UserError(
                f"{address}: {other} is at work on this training (saved step {sign.step}); wait for it, end it, or set "
                "training.when_held to wait"
            )
        if not waited:
            LOG.warning(
                "%s: held by %s (saved step %d): waits until it has ended, or shows no sign of life for %.0f s",
                address,
                other,
                sign.step,
                Sign().silence_s,
            )
        waited = True
        time.sleep(POLL_S)
    return waited


def wait_for_announced(home: Home, attempt: int, seconds: float) -> None:
    """Wait until the attempt before ``attempt``, which has claimed the home, has finished the save that it announced or
    is about to, as its machine has a notice: at most ``seconds``, and no longer than it shows signs of life."""
    watch, deadline, said = Watch(home), time.monotonic() + seconds, False
    while (found := watch.look(before=attempt)) and time.monotonic() < deadline:
        before, sign = found
        pending = sign.announced and Name.parse(sign.announced) not in home.checkpoints()
        if not pending and not sign.leaving:
            return
        if not said:
            LOG.info("waits for the last save of %s, %.0f s at most", home.holder_of(before), seconds)
        said = True
        time.sleep(POLL_IN_HASTE_S if home.is_local else POLL_S)


def result_of(address: str, holder: Holder, *, waited: bool) -> Finished | None:
    """The end of the training at ``address``, if ``holder`` may take its result.

    It may if an earlier attempt of the same execution finished it, whose result Flyte did not learn of, or if it
    finished while ``holder`` has waited. Otherwise Flyte ran the training though it was finished: its cache is to be
    overwritten or has lost the result, so the training begins afresh.
    """
    home = Home(storage_for(address))
    finished = home.finished()
    if finished is None or waited or holder.succeeds(finished.holder):
        return finished
    LOG.warning("%s: finished by %s; this execution was asked for it again: begins afresh", address, finished.holder)
    home.reopen()
    return None
