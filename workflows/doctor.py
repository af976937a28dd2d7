"""What will go wrong with the nodes of training, before it does; ``slipstream doctor`` looks at a package and at this
machine."""

from __future__ import annotations

import functools

from flytekit import map_task, workflow

from slipstream.profiles.profile import current_profile
from tasks.doctor import NodeCheck, check_node

PODS = list(range(current_profile().placement("train").nodes))


@workflow
def check_nodes(store: str = "", endpoint: str = "") -> list[NodeCheck]:
    """Look at as many nodes as training has, each from a pod placed as training's; the tables are in the decks."""
    return map_task(functools.partial(check_node, store=store, endpoint=endpoint))(pod=PODS)
