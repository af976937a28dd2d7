"""Small models train in one process on a CPU, unless the user set the layout or the number of processes."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte.elastic import DistributedTask
from slipstream.pipeline.train.checks import SMALL, suits_one_process
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.profiles.profile import Profile, parse_profile
from tasks.train import processes_for
from tests.support.training import table_of_numbers

OPEN = parse_profile("p", {"stages": {"train": {"processes": 0}}})


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("table") / "data", 20)


def processes(
    prepared: Path, training: TrainingConfig, profile: Profile = OPEN, model: ModelConfig | None = None
) -> int:
    """The processes that the agent starts for a training."""
    inputs = {"prepared": FlyteDirectory(str(prepared)), "model": model or ModelConfig(), "training": training}
    config = SimpleNamespace(profile=profile, stage="train", processes=processes_for)
    agent: Any = SimpleNamespace(task_config=config)
    return DistributedTask._placed(agent, inputs, profile.placement("train")).processes


def test_the_limit_is_parameters_times_rows_of_a_step(table: Path) -> None:
    network = build_model(ModelConfig(), PreparedData.open(table).signature, 0)
    most = SMALL // sum(each.numel() for each in network.parameters())
    assert processes(table, TrainingConfig(batch_size=most)) == 1
    assert processes(table, TrainingConfig(batch_size=most + 1)) == 2
    assert processes(table, TrainingConfig()) == 1, "automatic batches are resolved"


def test_a_row_of_text_counts_with_every_token(tmp_path: Path) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model, training = ModelConfig("transformer", shape), TrainingConfig(batch_size=64)
    found = {}
    for length in (8, 256):
        rows = np.zeros((4, length + 1), np.int64)
        write_token_rows(tmp_path / str(length), dict.fromkeys(("train", "validation", "test"), rows), 256)
        found[length] = processes(tmp_path / str(length), training, model=model)
    assert found == {8: 1, 256: 2}


def test_a_number_or_a_layout_from_the_users_stays(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2, 3):
        given = parse_profile("p", {"stages": {"train": {"processes": number}}})
        assert processes(table, TrainingConfig(), given) == number
    layouts = {"parallel": {"shard": "optimizer"}}, {"gradients": {"hook": "fp16"}}, {"network_profile": "latest"}
    for changed in layouts:
        assert processes(table, TrainingConfig.from_dict(changed)) == 2, changed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    gpus = Profile("p", OPEN.default, {"train": replace(OPEN.asked("train"), gpu="4")})
    assert processes(table, TrainingConfig(), gpus) == 4


def test_a_model_that_cannot_be_built_without_values_keeps_its_processes(table: Path) -> None:
    assert not suits_one_process(table, ModelConfig("absent:factory"), TrainingConfig())
