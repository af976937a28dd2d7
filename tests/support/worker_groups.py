"""Fresh process groups on this machine for tests."""

from collections.abc import Callable
from typing import Any

from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup


def in_group(world: int, work: Callable[..., Any], *arguments: Any, timeout: float = 20) -> Any:
    """What ``work(child, *arguments)`` gives on rank 0 of a gloo group of ``world`` fresh processes."""
    return WorkerGroup.local(world, timeout).launch(work, *arguments)
