"""Pods whose memory is small for real: whichever process the kernel kills, the failure has one name and is final."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.cluster.operator import run_job
from tests.support.memory_groups import memory_group, put
from tests.support.training_pods import Cluster, pods_of_job, python_path

LIMIT = 1200 << 20
#: In the third step one rank takes more than its pod has.
HUNGRY = """
import os
from slipstream.train.loop import step
real, steps = step.train_step, []
def train_step(*arguments):
    steps.append(1)
    if os.environ["RANK"] == "{rank}" and len(steps) == 3:
        steps.append(b"x" * (4 << 30))
    return real(*arguments)
step.train_step = train_step
"""
LINE = re.compile(
    r"train: out of memory: the kernel killed 1 process at the limit of 1\.17 GiB \(peak 1\.17 GiB\); "
    r"raise stages\.train\.memory in the profile '\S+'"
)


@pytest.fixture
def groups(request: pytest.FixtureRequest) -> Iterator[list[Path]]:
    """One for each pod."""
    with ExitStack() as stack:
        yield [stack.enter_context(memory_group(LIMIT)) for _ in range(2)]


@pytest.mark.parametrize("rank", [0, pytest.param(3, marks=pytest.mark.prove)])
def test_a_rank_of_a_job(rank: int, cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    name, variables = f"hungry-{rank}", python_path(tmp_path, HUNGRY.format(rank=rank))
    pods = pods_of_job(cluster, name, processes=2, inputs="endless", variables=[variables, variables])
    for pod, group in zip(pods, groups, strict=True):
        put(pod.pid, group)
    verdict = run_job(pods, lambda: cluster.verdict(name))
    said = "\n".join(pod.finish() for pod in pods)
    assert verdict.payer == "user" and not verdict.recoverable, said
    assert LINE.search(verdict.cause), (verdict.cause, said)


def test_a_rank_of_a_pod_by_itself(cluster: Cluster, groups: list[Path], tmp_path: Path) -> None:
    pod = cluster.pod(1, "alone", inputs="endless", **python_path(tmp_path, HUNGRY.format(rank=0)))
    put(pod.pid, groups[0])
    said = pod.finish()
    verdict = cluster.verdict("alone")
    assert verdict.payer == "user" and not verdict.recoverable, said
    assert LINE.search(verdict.cause), (verdict.cause, said)
