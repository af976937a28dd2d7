"""Errors that name the kernel's out-of-memory kill behind a failure, and the setting to raise.

With the same memory it would happen again, so the user has to act and there is no retry. If the node had no memory
left, another attempt may run on a node with more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs

from slipstream.errors import UserError
from slipstream.machine.out_of_memory import memory_counters, what_was_killed
from slipstream.profiles.profile import current_profile

#: Environment variable with the stage of a pod; unset on one machine.
STAGE = "SLIPSTREAM_STAGE"


@contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Replace errors of the block if processes were killed for lack of memory.

    Raises ``UserError`` or, in a pod whose own limit was not met, ``FlyteRecoverableException``.
    """
    before = memory_counters()
    try:
        yield
    except IgnoreOutputs:
        raise  # the work is done, or its error is already recorded
    except Exception as error:
        now = memory_counters()
        if not (killed := what_was_killed(before, now)):
            raise
        stage = os.environ.get(STAGE)
        if stage is None:
            raise UserError(f"{killed}; give the container or machine more memory, or use fewer processes") from error
        if not now.at_limit:
            raise FlyteRecoverableException(f"{stage}: {killed}") from error
        field = f"stages.{stage}.memory in the profile {current_profile().name!r}"
        raise UserError(f"{stage}: {killed}; raise {field}") from error
