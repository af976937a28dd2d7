"""A failure behind which the kernel killed a process for want of memory is named so, with what to raise.

On the same memory it would happen again: it is the user's to mend and is not repeated. If it was the node that had none
left, another attempt may find one that has.
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

#: The stage that a pod works for; unset on one machine.
STAGE = "SLIPSTREAM_STAGE"


@contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Whatever the block raises: if processes were killed meanwhile, that is why. Raises ``UserError`` or, in a pod
    whose own limit was not met, ``FlyteRecoverableException``."""
    before = memory_counters()
    try:
        yield
    except IgnoreOutputs:
        raise  # what was done is done, or told elsewhere
    except Exception as error:
        now = memory_counters()
        if not (killed := what_was_killed(before, now)):
            raise
        stage = os.environ.get(STAGE)
        if stage is None:
            raise UserError(f"{killed}; give the container or machine more, or the run fewer processes") from error
        if not now.at_limit:
            raise FlyteRecoverableException(f"{stage}: {killed}") from error
        field = f"stages.{stage}.memory in the profile {current_profile().name!r}"
        raise UserError(f"{stage}: {killed}; raise {field}") from error
