"""A user's mistake that ranks tell each other of while they save or restore ends them together."""

from __future__ import annotations

from functools import partial

import pytest

from slipstream.artifacts.format import DamagedArtifact
from slipstream.distributed.process_group import Peers
from slipstream.distributed.user_errors import AgreedUserError
from slipstream.errors import Agreed, UserError
from slipstream.train.checkpoint.publish import run_and_gather

ALONE = Peers(0, 1, None)


def fail(error: Exception) -> None:
    raise error


def test_all_ranks_know_of_a_mistake_that_they_gathered() -> None:
    with pytest.raises(AgreedUserError, match=r"^home: may not be written$"):
        run_and_gather(ALONE, lambda: fail(UserError("home: may not be written")))
    # What is caught by its kind, or was nobody's mistake, stays what it is.
    for error in (DamagedArtifact("weights: a digest is wrong"), ZeroDivisionError("a bug")):
        with pytest.raises((DamagedArtifact, RuntimeError)) as failed:
            run_and_gather(ALONE, partial(fail, error))
        assert not isinstance(failed.value, Agreed)
