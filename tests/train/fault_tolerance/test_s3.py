"""Runs with checkpoints on S3, and an S3 that misbehaves."""

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.shared.storage import conditional, download_all, storage_for
from tests.support.faulty_s3 import CREDENTIALS, SECRET, FaultyS3

Undisturbed = Callable[[int], dict[str, str]]


@pytest.fixture
def job(prepared: Path, store: FaultyS3, tmp_path: Path) -> TrainingJob:
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}
    return TrainingJob(prepared, tmp_path, 2, f"s3://bucket/{tmp_path.name}/home", environment=environment)


@pytest.mark.prove
def test_a_run_survives_every_kind_of_bad_answer(job: TrainingJob, store: FaultyS3, undisturbed: Undisturbed) -> None:
    # The first three meet one request, and the next one after "lost" finds its own bytes; more would outlast the peers.
    store.inject("PUT", "500", "reset", "lost", "pass", "503", "corrupt", "503", "reset")
    assert run_attempt(job, InjectedFault("step", rank=0, at=14)).fired == 1
    store.inject("GET", "truncate", "503", "reset", "truncate", "500", "lost")
    store.inject("PUT", "503", "lost")
    assert run_attempt(job).finished
    assert len(store.fired) == 16
    assert not store.plan
    assert "resumes from step" in (job.place / "log-0").read_text()
    assert result_digests(job) == undisturbed(2)
    download_all(job.home, job.place / "stored")
    assert not [path for path in job.place.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_store_that_ignores_conditions_is_refused_before_the_first_step(
    job: TrainingJob, store: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two attempts would both have the number 1 there."""
    monkeypatch.setattr(conditional, "HONOURING", set())
    store.ignores_conditions = True
    ended = run_attempt(job)
    assert not ended.finished and len(store.fired) == 2 and "/claims/0001" in store.fired[0][1]
    for rank in range(2):
        said = (job.place / f"log-{rank}").read_text()
        assert "s3://bucket: the store replaced an existing object although the write was conditional" in said
        assert "epoch 1" not in said
    assert storage_for(job.home).list() == []


@pytest.mark.parametrize(
    "fault",
    [InjectedFault("upload", rank=1, at=2), InjectedFault("manifest", at=2), InjectedFault("latest", at=2)],
    ids=lambda fault: fault.where,
)
@pytest.mark.prove
def test_killed_while_it_uploads_it_ends_the_same(
    fault: InjectedFault, job: TrainingJob, undisturbed: Undisturbed
) -> None:
    assert run_attempt(job, fault).fired == 1
    assert run_attempt(job).finished
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
def test_a_changed_byte_on_s3_is_passed_over(job: TrainingJob, undisturbed: Undisturbed, tmp_path: Path) -> None:
    assert run_attempt(job, InjectedFault("step", rank=0, at=14)).fired == 1
    storage = storage_for(job.home)
    key = next(key for key in reversed(storage.list("step-")) if key.endswith("tensors-00001.bin"))
    data = bytearray(storage.get(key, tmp_path / "down").read_bytes())
    data[len(data) // 3] ^= 4
    storage.put(key, bytes(data))
    assert run_attempt(job).finished
    assert "was changed after it was written" in (job.place / "log-0").read_text()
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_bad_answers_and_kills(
    seed: int, job: TrainingJob, store: FaultyS3, undisturbed: Undisturbed
) -> None:
    draw, killed = random.Random(seed), 0
    for at in (8, 9, 10):
        store.inject("PUT", *draw.choices(["500", "503", "reset", "lost", "corrupt"], k=4))
        store.inject("GET", *draw.choices(["500", "503", "reset", "lost", "truncate"], k=4))
        killed += run_attempt(job, InjectedFault("step", rank=draw.randrange(2), at=at)).fired
    assert run_attempt(job).finished
    assert (killed, len(store.fired)) == (3, 24) and not store.plan
    assert result_digests(job) == undisturbed(2)


@pytest.mark.prove
@pytest.mark.parametrize("seconds", [3, 30])
def test_a_store_that_is_away_for_a_while_is_waited_for(
    seconds: int, job: TrainingJob, store: FaultyS3, undisturbed: Undisturbed
) -> None:
    refused = store.refused

    def go_away() -> None:
        while not any("PUT" in line and "manifest" in line for line in list(store.requests)):
            time.sleep(0.01)
        store.down_until = time.monotonic() + seconds

    threading.Thread(target=go_away, daemon=True).start()
    assert run_attempt(dataclasses.replace(job, patience_s=80)).finished
    assert store.refused > refused
    assert result_digests(job) == undisturbed(2)
