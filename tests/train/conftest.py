from collections.abc import Callable
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.attempts import TrainingJob, result_digests, run_attempt
from slipstream.operations.proofs.gpu.trainings import write_table


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "table"
    write_table(directory, "classification")
    return directory


@pytest.fixture(scope="session")
def undisturbed(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """What a run that nothing happens to ends with, by the number of its ranks."""
    known: dict[int, dict[str, str]] = {}

    def of(world: int) -> dict[str, str]:
        if world not in known:
            place = tmp_path_factory.mktemp("undisturbed")
            job = TrainingJob(prepared, place, world, str(place / "home"))
            assert run_attempt(job).finished
            known[world] = result_digests(job)
        return known[world]

    return of
