from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.toys import table


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "table"
    table(directory, "classification")
    return directory
