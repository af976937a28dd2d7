"""Any sequence of disturbances: a training resumes from its last finished save, restores nothing late, and ends with
the weights of an undisturbed one."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import TrainingJob, result_digests
from slipstream.pipeline.train.checkpoint import lease
from tests.support.faulty_s3 import CREDENTIALS, FaultyS3
from tests.support.sequences import LEASE, Sequence

#: 100 sequences in all: ``OF_A_TEST`` per test, with the checkpoint directory on a disk or on S3.
OF_A_TEST = 5
PROOF = [("disk", part) for part in range(16)] + [("s3", part) for part in range(4)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LEASE.items():
        monkeypatch.setattr(lease, name, value)
    monkeypatch.setattr(lease, "POLL_S", 0.02)


def check(sequence: Sequence, undisturbed: Callable[[int], dict[str, str]]) -> None:
    sequence.run()
    last = dataclasses.replace(
        sequence.job, place=sequence.job.place / f"attempt-{sequence.attempts}", home=sequence.address
    )
    assert result_digests(last) == undisturbed(last.world), f"seed {sequence.seed}: {sequence.happened}"


def run(
    where: str, seeds: range, prepared: Path, undisturbed: Callable[[int], dict[str, str]], store: FaultyS3, tmp: Path
) -> Counter[str]:
    happened: Counter[str] = Counter()
    environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": store.url}
    for seed in seeds:
        place = tmp / str(seed)
        base = f"s3://bucket/{tmp.name}/{seed}" if where == "s3" else str(place / "raw")
        job = TrainingJob(prepared, place, 1 + seed % 2, "", environment=environment)
        sequence = Sequence(job, base, seed)
        check(sequence, undisturbed)
        happened.update(sequence.happened)
    return happened


@pytest.mark.prove
@pytest.mark.parametrize(("where", "part"), PROOF)
def test_100_sequences(
    where: str, part: int, prepared: Path, undisturbed: Callable[[int], dict[str, str]], store: FaultyS3, tmp_path: Path
) -> None:
    first = 1000 * (where == "s3") + OF_A_TEST * part
    happened = run(where, range(first, first + OF_A_TEST), prepared, undisturbed, store, tmp_path)
    print(f"\n{dict(happened)}")
    assert happened.total() >= 2 * OF_A_TEST
