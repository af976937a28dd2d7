"""A rehearsal of the cluster: the packaged container command and environment of the training task, run as pods."""

import json
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from slipstream.operations.proofs.rehearsal.kills import STRIKES
from slipstream.operations.proofs.rehearsal.operator import watch_job
from slipstream.operations.proofs.rehearsal.pods import PodProcess, largest_of_session
from tests.support.job_pods import never, run_job
from tests.support.training_pods import BUG, Cluster, pods_of_job, python_path, until_saved, worker_of


@pytest.fixture(scope="module")
def world(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that two undisturbed pods train. Its upload is slow: the pod without rank 0 is done long before."""
    cluster.server.slow = {"/world-n0-0/": 0.5}
    pods = pods_of_job(cluster, "world")
    verdict = run_job(pods, lambda: cluster.verdict("world"))
    outputs = [pod.finish() for pod in pods]
    assert verdict.succeeded, outputs
    assert [pod.exit_code for pod in pods] == [0, 0], outputs
    assert all("streams s3://" in output for output in outputs), outputs
    return cluster.trained("world", tmp_path_factory.mktemp("world"))


def test_two_pods_of_a_pytorchjob_form_one_world(cluster: Cluster, world: Path) -> None:
    assert cluster.template(2).type == "pytorch"
    history = json.loads((world / "history.json").read_text())
    assert history["world"]["size"] == 2
    assert history["steps_total"] == 6 * 600 // 50
    # Each rank took its own half of every batch: another world size gives the same global batches.
    assert history["best"]["accuracy"] > 0.9
    # One process group of two took checkpoints; two groups of one would each have claimed an attempt.
    assert {Path(key).name for key in cluster.home("world") if "/claims/" in key} == {"0001"}


@pytest.mark.prove
@pytest.mark.parametrize("victim", [0, 1])  # one of them also keeps the rendezvous
def test_one_of_two_pods_is_killed_and_the_second_attempt_ends_the_same(
    victim: int, cluster: Cluster, world: Path, tmp_path: Path
) -> None:
    name = f"pair{victim}"
    pods = pods_of_job(cluster, name)
    until_saved(cluster, pods[0], name)
    pods[victim].kill()
    survivor = pods[1 - victim]
    output = survivor.finish()
    # What a cluster does: it takes the job for failed, whatever the other pod says, and starts both again.
    assert survivor.exit_code is not None and not [
        key for key in cluster.bucket.keys(f"{name}/0/") if key.endswith("outputs.pb")
    ], output
    if f"{name}/0/error.pb" in cluster.bucket.keys(f"{name}/0/"):
        error = cluster.error(name)
        assert error.kind == error.RECOVERABLE, output

    pods = pods_of_job(cluster, name, attempt=1)
    outputs = [pod.finish() for pod in pods]
    assert [pod.exit_code for pod in pods] == [0, 0], outputs
    assert any("resumes from step" in output for output in outputs), outputs
    resumed = cluster.trained(name, tmp_path, 1)
    assert f"{name}/raw/checkpoints/" in json.loads((resumed / "attempt.json").read_text())["resumed_from"]
    same_model(world, resumed)


@pytest.mark.prove
def test_the_second_attempt_goes_on_where_the_first_was_killed(cluster: Cluster, tmp_path: Path) -> None:
    whole = cluster.pod(1, "whole")
    output = whole.finish()
    assert whole.exit_code == 0, output

    first = cluster.pod(1, "again")
    until_saved(cluster, first, "again")
    first.kill()
    first.finish()
    assert first.exit_code == -signal.SIGKILL and not cluster.bucket.keys("again/0/")

    second = cluster.pod(1, "again", attempt=1)
    output = second.finish()
    assert second.exit_code == 0, output
    resumed = cluster.trained("again", tmp_path / "resumed", 1)
    attempt = json.loads((resumed / "attempt.json").read_text())
    assert "again/raw/checkpoints/" in attempt["resumed_from"]
    assert attempt["steps"] < 72 and f"resumes from step {72 - attempt['steps']}" in output
    same_model(cluster.trained("whole", tmp_path / "whole"), resumed)


@pytest.mark.prove
def test_a_profile_with_another_group_goes_on_with_an_unfinished_training(
    cluster: Cluster, world: Path, tmp_path: Path
) -> None:
    """What is finished is cached apart, by processes and nodes; what is unfinished is one training."""
    registered = {cluster.template(nodes).metadata.discovery_version for nodes in (1, 2)}
    assert len(registered) == 2
    single = cluster.pod(1, "single")
    until_saved(cluster, single, "single")
    single.kill()
    single.finish()
    pods = pods_of_job(cluster, "joined", beside="single")
    outputs = [pod.finish() for pod in pods]
    assert [pod.exit_code for pod in pods] == [0, 0], outputs
    assert any("resumes from step" in output for output in outputs), outputs
    resumed = cluster.trained("joined", tmp_path)
    assert "alone/raw/checkpoints/" in json.loads((resumed / "attempt.json").read_text())["resumed_from"]
    history = json.loads((resumed / "history.json").read_text())
    assert history["steps_total"] == json.loads((world / "history.json").read_text())["steps_total"]
    before, after = (load_file(each / "last.safetensors") for each in (world, resumed))
    assert all(np.allclose(before[name], after[name], rtol=1e-4, atol=1e-5) for name in before)


@pytest.mark.prove
def test_no_number_of_preemptions_and_no_execution_begins_at_step_0(cluster: Cluster, tmp_path: Path) -> None:
    def step_of(output: str) -> int:
        found = re.search(r"resumes from step (\d+)", output)
        assert found, output
        return int(found[1])

    whole = cluster.pod(1, "spot-whole")
    whole.finish()

    first = cluster.pod(1, "spot")
    until_saved(cluster, first, "spot")
    first.kill()
    for attempt in (1, 2):  # deleted while they start: they leave nothing
        pod = cluster.pod(1, "spot", attempt=attempt, beside="spot")
        time.sleep(1)
        pod.kill()
        pod.finish()
    # Its predecessor left nothing; it goes on where the first one was, and is lost at once.
    fourth = cluster.pod(1, "spot", attempt=3, beside="spot")
    while "resumes from step" not in fourth.said():
        assert fourth.running, fourth.said()
        time.sleep(0.02)
    fourth.kill()
    assert step_of(fourth.finish()) >= 10
    recovered = cluster.pod(1, "spot-recovered", beside="spot")
    output = recovered.finish()
    assert recovered.exit_code == 0 and step_of(output) >= 10, output
    assert "held by attempt 3 of spot" in output, "a lost execution is not told from one at work"
    same_model(cluster.trained("spot-whole", tmp_path / "whole"), cluster.trained("spot-recovered", tmp_path / "made"))

    # What is finished is swept, is not trained again if Flyte did not learn of it, and is trained again in another one.
    assert {key.rpartition("/")[2] for key in cluster.home("spot")} == {"0003", "finished.json", "0003.json"}
    again = cluster.pod(1, "spot-recovered", attempt=1, beside="spot")
    output = again.finish()
    assert again.exit_code == 0 and "its result is taken from" in output and "validation loss" not in output, output
    same_model(tmp_path / "made", cluster.trained("spot-recovered", tmp_path / "again", 1))
    afresh = cluster.pod(1, "spot-afresh", beside="spot")
    output = afresh.finish()
    assert afresh.exit_code == 0 and "retraining" in output and "resumes from step" not in output, output
    same_model(tmp_path / "whole", cluster.trained("spot-afresh", tmp_path / "afresh"))


@pytest.mark.prove
def test_the_next_attempt_waits_for_the_last_save_of_a_pod_in_its_grace_period(cluster: Cluster) -> None:
    """Flyte starts it 1.5 s after a plain pod was deleted, while the old pod still saves."""
    cluster.server.slow = {}
    first = cluster.pod(1, "grace", inputs="endless")
    until_saved(cluster, first, "grace")
    # So that the last save takes longer than the start of another pod: a checkpoint has five files, one after another.
    cluster.server.slow = {"/step-": 2.0}
    first.delete()
    time.sleep(1.5)
    second = cluster.pod(1, "grace", attempt=1, inputs="endless")
    try:
        while "resumes from step" not in (output := second.said()):
            assert second.running, output
            time.sleep(0.05)
    finally:
        second.kill()
        cluster.server.slow = {}
    first.finish()
    (record,) = [key for key in cluster.home("grace") if key.endswith("/ledger/0001.json")]
    page = json.loads(cluster.bucket.read(record))
    assert page["ended"].startswith(f"stopped at step {page['last_step']}, saved"), page
    assert "waits for the last checkpoint of attempt 0 of grace" in output, output
    assert f"resumes from step {page['last_step']} " in output, (page, output)


@pytest.mark.prove
def test_a_job_with_a_deleted_worker_saves_beside_its_next_attempt_which_goes_on_from_there(cluster: Cluster) -> None:
    """The operator fails the job at once, propeller deletes it, and all of it lives on for its grace period."""
    name = "lives-on"
    cluster.server.slow = {}
    first = pods_of_job(cluster, name, inputs="endless")
    until_saved(cluster, first[0], name)
    cluster.server.slow = {"/step-": 2.0}
    second: list[PodProcess] = []
    try:
        first[1].delete()
        verdict = watch_job(first, never, "CLEANPOD_POLICY_ALL", threading.Event())
        assert verdict and verdict.payer == "user" and verdict.recoverable
        assert all(pod.running and pod.deleted for pod in first), [pod.said() for pod in first]
        second = pods_of_job(cluster, name, attempt=1, inputs="endless")
        while "resumes from step" not in (output := second[0].said() + second[1].said()):
            assert all(pod.running for pod in second), output
            time.sleep(0.05)
    finally:
        for pod in second:
            pod.kill()
        cluster.server.slow = {}
    said = [pod.finish() for pod in first]
    (record,) = [key for key in cluster.home(name) if key.endswith("/ledger/0001.json")]
    page = json.loads(cluster.bucket.read(record))
    assert page["ended"].startswith(f"stopped at step {page['last_step']}, saved"), (page, said)
    assert max(pod.started for pod in second) < min(pod.ended for pod in first), "the attempts do not overlap"
    assert f"resumes from step {page['last_step']} " in output, (page, output)


def same_model(uninterrupted: Path, resumed: Path) -> None:
    """Killed or not, the weights are the same to the bit, and so is the history."""
    for weights in ("best.safetensors", "last.safetensors"):
        left, right = load_file(uninterrupted / weights), load_file(resumed / weights)
        assert left.keys() == right.keys()
        for name in left:
            np.testing.assert_array_equal(left[name], right[name])
    assert (resumed / "history.json").read_bytes() == (uninterrupted / "history.json").read_bytes()


@pytest.mark.prove
def test_a_worker_lost_to_a_signal_is_worth_another_attempt(cluster: Cluster) -> None:
    pod = cluster.pod(1, "lost", inputs="endless")
    until_saved(cluster, pod, "lost")
    os.kill(worker_of(pod), signal.SIGKILL)
    output = pod.finish()
    error = cluster.error("lost")
    assert error.kind == error.RECOVERABLE, output
    assert "rank 0 was lost to SIGKILL" in error.message


@pytest.mark.prove
def test_a_rank_of_a_job_that_no_counter_says_was_out_of_memory_is_worth_another_attempt(cluster: Cluster) -> None:
    """The kubelet calls its pod OOMKilled, with exit code 0; of a job Flyte reads what the pods left."""
    pods = pods_of_job(cluster, "rank", inputs="endless")
    until_saved(cluster, pods[0], "rank")
    assert largest_of_session(pods[1].pid) == worker_of(pods[1])
    STRIKES["OOMKilled 0"](pods[1])
    verdict = run_job(pods, lambda: cluster.verdict("rank"))
    said = [pod.finish() for pod in pods]
    assert (verdict.payer, verdict.recoverable) == ("user", True), said
    assert [pod.exit_code for pod in pods] == [0, 0] and "lost to SIGKILL" in said[1], said


@pytest.mark.prove
def test_a_pod_that_is_told_to_end_saves_and_is_worth_another_attempt(cluster: Cluster) -> None:
    pod = cluster.pod(1, "told", inputs="endless")
    until_saved(cluster, pod, "told")
    pod.terminate()
    output = pod.finish()
    assert not [key for key in cluster.bucket.keys("told/0/") if key.endswith("outputs.pb")], "an empty success"
    verdict = cluster.verdict("told")
    assert (verdict.payer, verdict.recoverable) == ("system", True), output
    (key,) = [key for key in cluster.home("told") if "/ledger/" in key]
    page = json.loads(cluster.bucket.read(key))
    assert page["ended"].startswith(f"stopped at step {page['last_step']}, saved"), page
    assert page["saved_step"] == page["last_step"], "work was lost though there was time to save it"


@pytest.mark.prove
def test_what_another_attempt_cannot_help_is_not_retried(cluster: Cluster, tmp_path: Path) -> None:
    variables: dict[str, Any] = {**python_path(tmp_path, BUG)}
    pod = cluster.pod(1, "bug", inputs="inputs", **variables)
    output = pod.finish()
    error = cluster.error("bug")
    assert error.kind == error.NON_RECOVERABLE, output
    assert error.message.startswith("ZeroDivisionError: a bug in the step\n\nTrace:\n")
    assert output.splitlines()[-1].endswith("error: ZeroDivisionError: a bug in the step"), output


@pytest.mark.prove
@pytest.mark.parametrize(
    ("nodes", "variables", "message"),
    [
        (2, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, "PET_NNODES=1, but profile 'pods2' says 2"),
        pytest.param(2, {}, "outside a PyTorchJob", marks=pytest.mark.prove),
        pytest.param(
            1,
            {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "4"},
            "PET_NPROC_PER_NODE=4, but profile 'pods1' says 1",
            marks=pytest.mark.prove,
        ),
    ],
)
def test_a_pod_that_disagrees_with_its_profile_refuses_to_start(
    cluster: Cluster, nodes: int, variables: dict[str, Any], message: str
) -> None:
    name = f"refused-{nodes}-{len(variables)}"
    pod = cluster.pod(nodes, name, **variables)
    pod.finish()
    error = cluster.error(name)
    assert message in error.message
    assert error.kind == error.NON_RECOVERABLE
    assert not [key for key in cluster.bucket.keys(name) if not key.endswith("error.pb") and "deck" not in key]
