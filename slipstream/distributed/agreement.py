"""One rank's user error, raised on all ranks of the process group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from slipstream.errors import UserError


class AgreedUserError(UserError):
    """A ``UserError`` that all ranks of the process group raise at the same place, so that all shut down cleanly."""


@contextmanager
def same_error_on_all_ranks() -> Iterator[None]:
    """Run the block on every rank. If it raised ``UserError`` on some, raise the lowest such rank's on all ranks.

    Costs one small collective. Without it the failed rank would leave the others waiting in their next collective.
    """
    import torch.distributed as dist

    mine: str | None = None
    try:
        yield
    except UserError as error:
        mine = error.message
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, mine)
    first = next((message for message in messages if message is not None), None)
    if first is not None:
        raise AgreedUserError(first)
