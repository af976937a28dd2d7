"""A base set whose manifest vouches for other content than prepare writes is refused in one line."""

import shutil
from pathlib import Path

import pytest

from slipstream.pipeline.prepare.base_set import BaseSet
from slipstream.shared.errors import UserError
from tests.support.damaged_records import damages
from tests.support.proving import first_few
from tests.support.raw_tables import mixed_table
from tests.support.tables import vouch_for


@pytest.fixture(scope="module")
def base_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_table(tmp_path_factory.mktemp("base-set"), "classification", rows=60)


@pytest.mark.parametrize("name", first_few(["schema.json", "statistics.json"]))
def test_a_base_set_of_other_content_is_one_line(base_set: Path, name: str, tmp_path: Path) -> None:
    assert BaseSet.open(str(base_set)).schema.target
    good = (base_set / name).read_bytes()
    copy = shutil.copytree(base_set, tmp_path / "copy")
    refused = 0
    for what, content, never in [*damages(good)][::7]:
        vouch_for(copy, name, content)
        try:
            BaseSet.open(str(copy))
            assert not never, f"{what} was taken"
        except UserError as error:
            assert error.message.startswith("data.") and "\n" not in error.message, what
            refused += 1
    assert refused > 20
