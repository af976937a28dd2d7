"""What will go wrong, before it does: with a package, with a cluster, with a node.

    python -m workflows.doctor PACKAGE.tgz [--limits cluster.toml] [--trained DIRECTORY]
    python -m workflows.doctor --node [--store URI] [--endpoint URL]

As a workflow, ``check_nodes`` looks at as many nodes as training has, each from a pod placed as training's.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which take seconds and need a profile
    from tasks.doctor.command import main

    main()

import functools

from flytekit import map_task, workflow

from tasks.doctor.task import NodeCheck, check_node
from tasks.hardware.profile import current_profile

PODS = list(range(current_profile().placement("train").nodes))


@workflow
def check_nodes(store: str = "", endpoint: str = "") -> list[NodeCheck]:
    """Look at the nodes of training; the tables are in the decks."""
    return map_task(functools.partial(check_node, store=store, endpoint=endpoint))(pod=PODS)
