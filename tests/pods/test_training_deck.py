"""The deck of training in pods: shown during training, lists earlier attempts, and does not slow training down."""

import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.rehearsal.pods import PodProcess
from tests.support.training_pods import BUG, Cluster, python_path, until_saved

#: Shorter periods, in the agent and in its workers.
SOON = """
from slipstream.flyte.watching import live_deck
from slipstream.pipeline.train import so_far
from slipstream.pipeline.train.fault_tolerance import goodput
live_deck.PERIOD_S, so_far.PERIOD_S, goodput.PERIOD_S = 0.5, 0.2, 0.2
"""


def deck(cluster: Cluster, name: str, attempt: int = 0) -> str:
    """The deck where Flyte's console finds it; empty if there is none."""
    key = f"{name}/{attempt}/deck.html"
    return cluster.bucket.read(key).decode() if cluster.bucket.keys(key) else ""


def until_shown(cluster: Cluster, pod: PodProcess, name: str, attempt: int, words: str) -> str:
    deadline = time.monotonic() + 120
    while words not in deck(cluster, name, attempt):
        assert pod.running and time.monotonic() < deadline, pod.said()
        time.sleep(0.1)
    return deck(cluster, name, attempt)


@pytest.mark.prove
def test_a_finished_training_has_a_deck(cluster: Cluster) -> None:
    pod = cluster.pod(1, "deck")
    log = pod.finish()
    page = deck(cluster, "deck")
    for words in ("Step 72 of 72", "Training and validation loss over the epochs", "Learning rate over", ">finished<"):
        assert words in page, log
    assert "Unclosed" not in log and "deck" not in log


@pytest.mark.prove
def test_it_is_published_as_training_goes_and_tells_of_earlier_attempts(cluster: Cluster, tmp_path: Path) -> None:
    soon: dict[str, Any] = python_path(tmp_path, SOON, before="slipstream.pipeline.train.run")
    pod = cluster.pod(1, "decks", inputs="endless", **soon)
    first = until_shown(cluster, pod, "decks", 0, "Training and validation loss over the epochs")
    assert ">in progress<" in first
    until_saved(cluster, pod, "decks")
    pod.terminate()
    pod.finish()
    pod = cluster.pod(1, "decks", attempt=1, inputs="endless", **soon)
    second = until_shown(cluster, pod, "decks", 1, ">in progress<")
    pod.terminate()
    pod.finish()
    assert second.count('class="note"') == 2 and "SIGTERM" in second


@pytest.mark.prove
def test_of_a_failed_training_it_says_why(cluster: Cluster, tmp_path: Path) -> None:
    variables: dict[str, Any] = python_path(tmp_path, BUG)
    pod = cluster.pod(1, "deck-of-a-bug", **variables)
    pod.finish()
    assert "ZeroDivisionError: a bug in the step" in deck(cluster, "deck-of-a-bug")
