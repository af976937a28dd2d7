"""Fine-tuning as a whole: what it begins with, what it leaves, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.artifacts.prepared.data import PreparedData
from slipstream.errors import UserError
from slipstream.models.base.fingerprint import BaseRecord, fingerprint_base
from slipstream.models.base.tensors import ONE_FILE, Base
from slipstream.models.config import ModelConfig
from slipstream.models.trained import TrainedModel
from slipstream.settings import to_dict
from slipstream.train.checks import check_training
from slipstream.train.config import TrainingConfig
from slipstream.train.parallel.config import ParallelConfig
from slipstream.train.setup import same_base
from tests.support.bases import LENGTH, VOCABULARY, make_base, some_tokens, theirs
from tests.support.corpora import prepare_language, write_stories
from tests.support.training import refusal, trained

ONE_EPOCH = TrainingConfig(epochs=1, batch_size=32, learning_rate=1e-3)
#: No step changes a weight.
UNCHANGED = replace(ONE_EPOCH, learning_rate=1e-30, weight_decay=0.0)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base", dtype=torch.bfloat16, max_shard_size="20KB")


@pytest.fixture(scope="module")
def data(base: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("data")
    return prepare_language(place / "prepared", write_stories(place / "stories"), tokenizer=str(base), length=LENGTH)


def test_data_has_the_ids_of_the_model_beside_its_tokenizer(data: PreparedData, base: Path, tmp_path: Path) -> None:
    assert data.signature.outputs == VOCABULARY, "more than the tokenizer has"
    tokenizer = make_base(tmp_path / "base", vocab_size=200)
    stories = write_stories(tmp_path / "stories")
    fewer = prepare_language(tmp_path / "fewer", stories, tokenizer=str(tokenizer), length=LENGTH)
    assert fewer.signature.outputs == 259
    with pytest.raises(UserError, match=r"model\.base: .*: has 200 token ids, and this data 259|has 200 token ids"):
        check_training(fewer.artifact.directory, ModelConfig(base=str(tokenizer)), ONE_EPOCH, 1, 1)
    (tokenizer / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"data\.tokenizer: .*/config\.json cannot be read as JSON"):
        prepare_language(tmp_path / "none", stories, tokenizer=str(tokenizer), length=LENGTH)


@pytest.mark.parametrize(("world", "parallel"), [(1, {}), (2, {"shard": "weights"})])
def test_training_begins_with_the_base_and_leaves_a_model_of_its_own(
    world: int, parallel: dict[str, Any], data: PreparedData, base: Path, tmp_path: Path
) -> None:
    training = replace(UNCHANGED, parallel=ParallelConfig(**parallel))
    directory = trained(data.artifact.directory, tmp_path / "run", world, training, ModelConfig(base=str(base)))
    model = TrainedModel.open(directory)
    assert model.architecture.base == BaseRecord(str(base), fingerprint_base(str(base)))
    assert model.config.base == "" and model.config.name == "transformer"
    with torch.no_grad():
        torch.testing.assert_close(model.load("last")(some_tokens()), theirs(base, some_tokens()), rtol=0, atol=1e-5)
    stored = Base.open(str(base))
    for name, parameter in model.load("best").network.named_parameters():
        whole = torch.empty(parameter.shape)
        stored.fill(whole, name, (0, 0))
        assert torch.equal(parameter, whole), name


def test_another_base_is_another_training(data: PreparedData, tmp_path: Path) -> None:
    """The second attempt finds the checkpoints of the first, whose base is where it was, but for one bit."""
    base = make_base(tmp_path / "base")
    model, training = ModelConfig(base=str(base)), replace(ONE_EPOCH, checkpoint_every=10)
    attempt = partial(trained, data.artifact.directory, tmp_path / "run", 1, training)
    attempt(model)
    before = fingerprint_base(str(base))
    content = bytearray((base / ONE_FILE).read_bytes())
    content[-1] ^= 1
    (base / ONE_FILE).write_bytes(content)
    attempt(model, directory=tmp_path / "run" / "second")
    line = (tmp_path / "run" / "second.refused0").read_text()
    now = fingerprint_base(str(base))
    assert now != before and f'was made with base "{before}", this run has "{now}"' in line and "\n" not in line
    # Where it lies is nothing to it.
    content[-1] ^= 1
    (base / ONE_FILE).write_bytes(content)
    base.rename(tmp_path / "moved")
    moved = ModelConfig(base=str(tmp_path / "moved"))
    attempt(moved, directory=tmp_path / "run" / "third")
    assert "resumes from step 20" in (tmp_path / "run" / "third.log0").read_text()
    assert TrainedModel.open(tmp_path / "run" / "third").architecture.base == BaseRecord(moved.base, before)


def test_a_bad_base_is_refused_before_any_process_starts(data: PreparedData, base: Path, tmp_path: Path) -> None:
    directory = data.artifact.directory
    check_training(directory, ModelConfig(base=str(base)), ONE_EPOCH, 1, 1)
    assert to_dict(ModelConfig(base=str(base)))["arguments"] == {}
    cut = make_base(tmp_path / "cut")
    (cut / ONE_FILE).write_bytes((cut / ONE_FILE).read_bytes()[:-4])
    with pytest.raises(UserError, match=r"model\.base: .*/cut/model\.safetensors: is cut or damaged: .* 4 bytes after"):
        check_training(directory, ModelConfig(base=str(cut)), ONE_EPOCH, 1, 1)
    short = make_base(tmp_path / "short", max_position_embeddings=LENGTH - 1)
    with pytest.raises(UserError, match=r"has positions for 23 tokens, and a row has 24"):
        check_training(directory, ModelConfig(base=str(short)), ONE_EPOCH, 1, 1)


def test_without_a_check_the_processes_refuse_it_together(data: PreparedData, tmp_path: Path) -> None:
    cut = make_base(tmp_path / "cut")
    (cut / ONE_FILE).write_bytes((cut / ONE_FILE).read_bytes()[:-4])
    training = replace(ONE_EPOCH, parallel=ParallelConfig(shard="weights"))
    trained(data.artifact.directory, tmp_path / "run", 2, training, ModelConfig(base=str(cut)))
    assert all("is cut or damaged" in refusal(tmp_path / "run", rank) for rank in range(2))


def test_machines_have_the_same_base() -> None:
    assert same_base("base", ["a", "", "a", ""]) == BaseRecord("base", "a")
    with pytest.raises(UserError, match=r"model\.base: base: machines have 2 different bases there"):
        same_base("base", ["a", "", "b", ""])
