from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.trainings import write_table


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "table"
    write_table(directory, "classification")
    return directory
