"""Whole pods of a PyTorchJob, ended like the operator ends them: no result and no cause is lost."""

import random
from pathlib import Path

import pytest

from slipstream.operations.proofs.rehearsal.pods import PodProcess
from tests.support.job_pods import run_job
from tests.support.training_pods import Cluster, pods_of_job, python_path, until_saved

#: One rank has too little memory, at a step and after a time of its own.
OUT_OF_MEMORY = """
import os, time, torch
from slipstream.pipeline.train.loop import step
real, steps = step.train_step, []
def train_step(*arguments):
    steps.append(1)
    if os.environ["RANK"] == "{rank}" and len(steps) == {step}:
        time.sleep({seconds})
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return real(*arguments)
step.train_step = train_step
"""

#: The agent of this pod is slow to do what follows the end of its workers.
SLOW_AGENT = """
import time
from slipstream.flyte import departure
real = departure.outlive_sigterm
def outlive_sigterm():
    real()
    time.sleep({seconds})
departure.outlive_sigterm = outlive_sigterm
"""


def slow_agent(directory: Path, seconds: float) -> dict[str, str]:
    return python_path(directory, SLOW_AGENT.format(seconds=seconds), before="slipstream.flyte.elastic")


def said(pods: list[PodProcess]) -> str:
    return "\n".join(pod.finish() for pod in pods)


@pytest.mark.prove
@pytest.mark.parametrize("last", [0, 1])
def test_a_slow_upload_is_finished_whoever_is_last(last: int, cluster: Cluster, tmp_path: Path) -> None:
    name = f"slow-{last}"
    cluster.server.slow = {f"/{name}-n0-0/": 10.0}
    variables = [slow_agent(tmp_path, 25.0) if number == last else {} for number in range(2)]
    pods = pods_of_job(cluster, name, variables=variables)
    verdict = run_job(pods, lambda: cluster.verdict(name))
    assert verdict.succeeded, said(pods)
    assert cluster.verdict(name) == verdict and [pod.exit_code for pod in pods] == [0, 0], said(pods)
    assert (cluster.trained(name, tmp_path / "model") / "best.safetensors").exists()


def out_of_memory(cluster: Cluster, name: str, tmp_path: Path, rank: int, draw: random.Random) -> None:
    cluster.server.slow = {f"/{name}/0/error": draw.choice([0.0, 2.0])}
    code = OUT_OF_MEMORY.format(rank=rank, step=draw.randint(1, 20), seconds=draw.uniform(0, 1))
    variables = python_path(tmp_path, code)
    pods = pods_of_job(cluster, name, processes=2, inputs="endless", variables=[variables, variables])
    verdict = run_job(pods, lambda: cluster.verdict(name))
    assert (verdict.payer, verdict.recoverable) == ("user", True), said(pods)
    assert f"rank {rank} ran out of memory at 1 micro-batch: goes on with 2" in verdict.cause, said(pods)
    # Pods that ended after propeller had read changed nothing.
    assert cluster.verdict(name) == verdict, said(pods)


@pytest.mark.prove
def test_out_of_memory_in_the_pod_without_rank_0_is_the_verdict(cluster: Cluster, tmp_path: Path) -> None:
    out_of_memory(cluster, "memory", tmp_path, 3, random.Random(3))


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(4))
def test_out_of_memory_is_the_verdict_in_every_order(seed: int, cluster: Cluster, tmp_path: Path) -> None:
    out_of_memory(cluster, f"memory-{seed}", tmp_path, seed % 4, random.Random(seed))


@pytest.mark.prove
@pytest.mark.parametrize("victim", [0, 1])
def test_a_preempted_job_spends_its_own_retries(victim: int, cluster: Cluster) -> None:
    name = f"preempted-{victim}"
    pods = pods_of_job(cluster, name, inputs="endless")
    until_saved(cluster, pods[victim], name)
    pods[victim].terminate()
    verdict = run_job(pods, lambda: cluster.verdict(name))
    assert (verdict.payer, verdict.recoverable) == ("user", True), said(pods)
    assert "SIGTERM" in verdict.cause and [pod.exit_code for pod in pods] == [0, 0], said(pods)
