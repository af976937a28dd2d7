"""``training.batch_size: auto`` and the size of a table's model are decided by the rows before anything depends on
them."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from flytekit.types.directory import FlyteDirectory

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.engine import sweep_identity, sweep_search
from slipstream.pipeline.train.checkpoint.unfinished import UnfinishedTraining
from slipstream.pipeline.train.config import TrainingConfig, resume_settings
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.training import read_history
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import FOR_FEW_ROWS, ModelConfig
from slipstream.shared.models.trained import TrainedModel
from tests.support.proving import first_few
from tests.support.training import table_of_numbers, trained
from tests.support.wording import refuses


@pytest.mark.parametrize(
    ("rows", "size"),
    [(0, 16), (105, 16), (608, 16), (609, 32), (1216, 32), (1217, 64), (2433, 128), (4865, 256), (10**9, 256)],
)
def test_the_largest_power_of_two_with_twenty_steps_per_epoch(rows: int, size: int) -> None:
    assert TrainingConfig().for_rows(rows) == TrainingConfig(batch_size=size)
    given = TrainingConfig(batch_size=100)
    assert given.for_rows(rows) is given


@pytest.mark.parametrize(
    ("rows", "given", "expected"),
    [
        (499, {}, {"hidden": [64], "frequencies": 2}),
        (499, {"hidden": [8]}, {"hidden": [8], "frequencies": 2}),
        (500, {}, {}),
    ],
)
def test_a_small_table_gets_a_smaller_model_unless_the_user_says_otherwise(
    tmp_path: Path, rows: int, given: dict[str, object], expected: dict[str, object]
) -> None:
    model = ModelConfig(arguments=given)
    table = PreparedData.open(table_of_numbers(tmp_path / "data", 20)).signature
    assert model.for_rows(rows, table).arguments == expected
    image = replace(table, image_mean=(0.0,), image_std=(1.0,))
    assert model.for_rows(rows, image) == model
    own = ModelConfig(name="package.module:factory", arguments=given)
    assert own.for_rows(rows, table) == own


@pytest.mark.parametrize("size", [0, -1, 2**31, "large", 1.5, True])
def test_a_size_is_a_number_or_auto(size: object) -> None:
    with refuses(UserError, match=r"training\.batch_size"):
        TrainingConfig.from_dict({"batch_size": size})


def test_keys_have_the_number(tmp_path: Path) -> None:
    """An address in a store is read where the data are, so the key of a cached result there has "auto"."""
    data = table_of_numbers(tmp_path / "data", 700)
    inputs = {"prepared": FlyteDirectory(str(data)), "training": TrainingConfig(), "model": RunConfig().model}
    settled = UnfinishedTraining().settled(inputs)
    assert settled["training"] == TrainingConfig(batch_size=32)
    assert settled["model"] == ModelConfig()
    few = {**inputs, "prepared": FlyteDirectory(str(table_of_numbers(tmp_path / "few", 100)))}
    assert UnfinishedTraining().settled(few)["model"].arguments == FOR_FEW_ROWS
    assert UnfinishedTraining().lasting(settled)["training"] == resume_settings(TrainingConfig(batch_size=32))
    stored = {**inputs, "prepared": FlyteDirectory("s3://bucket/data")}
    assert UnfinishedTraining().settled(stored) == stored


@pytest.mark.parametrize("size", first_few([32, "auto"], 1))
def test_the_model_and_its_figures_have_the_number(tmp_path: Path, size: int | Literal["auto"]) -> None:
    data = table_of_numbers(tmp_path / "data", 700)
    assert read_history(trained(data, tmp_path / "run", 1, TrainingConfig(epochs=1, batch_size=size))).steps_total == 22


def test_a_model_for_few_rows_has_its_arguments(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 100)
    model = TrainedModel.open(trained(data, tmp_path / "run", 1, TrainingConfig(epochs=1), model=ModelConfig()))
    assert model.config.arguments == FOR_FEW_ROWS


@pytest.mark.parametrize("size", ["auto", 64])
def test_a_sweep_starts_from_the_number(tmp_path: Path, size: int | Literal["auto"]) -> None:
    data = PreparedData.open(table_of_numbers(tmp_path / "data", 700))
    searched = {"training.batch_size": {"low": 16, "high": 128, "log": True}}
    config = RunConfig.from_dict({"training": {"batch_size": size}, "sweep": {"space": searched}})
    search = sweep_search(config, data)
    assert search.config.training.batch_size == (32 if size == "auto" else 64)
    assert [each.whole for each in search.parameters] == [True]
    assert sweep_identity(search.config, "data").training["batch_size"] == search.config.training.batch_size
