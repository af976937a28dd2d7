"""Checks of the cluster's nodes before a training; ``slipstream doctor`` checks a package and this machine."""

from __future__ import annotations

import functools

from flytekit import map_task

from slipstream.flyte.metadata import profile_workflow
from slipstream.shared.profiles.profile import current_profile
from tasks.doctor import NodeCheck, check_node, show_nodes

PODS = list(range(current_profile().placement("train").nodes))


@profile_workflow
def check_nodes(store: str = "", endpoint: str = "") -> list[NodeCheck]:
    """Check as many nodes as training uses, each from a pod like training's; one deck has all tables.

    Args:
        store: a directory or URI to write to and read from
        endpoint: an HTTP(S) address whose clock is compared with the nodes'
    """
    return show_nodes(checks=map_task(functools.partial(check_node, store=store, endpoint=endpoint))(pod=PODS))
