"""Ranks decide together: a mistake that one rank finds becomes the same refusal on all of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tasks.errors import UserError


class AgreedRefusal(UserError):
    """A user's mistake that every rank of the process group has heard of, so that all can leave in good order."""


@contextmanager
def together() -> Iterator[None]:
    """Run the block on every rank; if it raised ``UserError`` on any, raise the first such rank's on all.

    Costs one small collective. Without it the rank that refuses leaves its peers waiting in theirs.
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
        raise AgreedRefusal(first)
