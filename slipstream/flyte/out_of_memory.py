"""Errors that name the kernel's out-of-memory kill as the cause, and the setting to increase.

A kill at the pod's own limit would recur, so it is not retried. If the node had no memory left, the pod is retried,
since another node may have more.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.extend import IgnoreOutputs

from slipstream.shared.errors import UserError
from slipstream.shared.machine.out_of_memory import memory_counters, what_was_killed
from slipstream.shared.profiles.profile import current_profile

#: Environment variable with the stage of a pod; unset in local runs.
STAGE = "SLIPSTREAM_STAGE"


@contextmanager
def named_out_of_memory() -> Iterator[None]:
    """Replace an error of the block if processes were killed for lack of memory during it.

    Raises ``UserError`` or, in a pod below its own limit, ``FlyteRecoverableException``.
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
