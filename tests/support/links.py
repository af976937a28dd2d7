"""Links of known rate for tests, which are skipped where there can be none."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from harness import links
from harness.links import Links, NotAllowed


@contextmanager
def linked(world: int, mbit: float = 0) -> Iterator[Links]:
    """As the benchmarks' :func:`harness.links.linked`. Skips the test, with the reason, where namespaces or ``tc`` are
    not there or not allowed."""
    with ExitStack() as kept:
        try:
            its = kept.enter_context(links.linked(world, mbit))
        except NotAllowed as reason:
            pytest.skip(f"no links of known rate on this machine: {reason}")
        yield its
