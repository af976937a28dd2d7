"""Fine-tuning as a whole: starting weights, results and refusals."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.config import RunConfig
from slipstream.flyte.stage import describe_inputs
from slipstream.pipeline.sweep.engine import sweep_identity
from slipstream.pipeline.train.checkpoint.unfinished import UnfinishedTraining
from slipstream.pipeline.train.checks import check_training
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.setup import same_origin
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import CONFIG, LONGEST_JSON, WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.language.tokenizer import vocabulary_beside
from slipstream.shared.models.base.directory import BaseDirectory, BaseRecord
from slipstream.shared.models.base.tensors import OpenedBase
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.settings import to_dict
from tasks.config import config_sections
from tests.support.bases import LENGTH, VOCABULARY, fingerprint_base, make_base, some_tokens, theirs, write_tokenizer
from tests.support.corpora import prepare_language, write_stories
from tests.support.training import rank_body, refusal, trained
from tests.support.wording import refuses, same_wording

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
    with refuses(UserError):
        prepare_language(tmp_path / "fewer", stories, tokenizer=str(tokenizer), length=LENGTH)
    other = prepare_language(tmp_path / "other", stories, length=LENGTH)
    with refuses(UserError, match=r"model\.base:"):
        check_training(other.artifact.directory, ModelConfig(base=str(tokenizer)), ONE_EPOCH, 1, 1)
    (tokenizer / "config.json").write_text("{")
    with refuses(UserError, match=r"data\.tokenizer:"):
        prepare_language(tmp_path / "none", stories, tokenizer=str(tokenizer), length=LENGTH)


def test_another_tokenizer_with_other_ids_is_refused_before_any_data_is_read(base: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    write_tokenizer(alone)

    def sections(tokenizer: Path | str) -> object:
        data = {"task": "language", "length": LENGTH, "tokenizer": str(tokenizer)}
        return config_sections(RunConfig.from_dict({"model": {"base": str(base)}, "data": data}))

    with refuses(UserError, match=r"^data\.tokenizer:"):
        sections(alone)
    (alone / CONFIG).write_text(json.dumps({"vocab_size": VOCABULARY}))
    for tokenizer in (alone, base, "bytes"):
        sections(tokenizer)


def test_what_a_config_beside_a_tokenizer_may_not_be(tmp_path: Path) -> None:
    assert vocabulary_beside(str(tmp_path)) == 0
    for content, ids in (("{}", 0), ('{"vocab_size": 12}', 12), ("[]", 0)):
        (tmp_path / CONFIG).write_text(content)
        assert vocabulary_beside(str(tmp_path)) == ids
    for value in ("true", '"12"', "1.5", "-1", "16777217"):
        (tmp_path / CONFIG).write_text(f'{{"vocab_size": {value}}}')
        with refuses(UserError, match=r"/config\.json:"):
            vocabulary_beside(str(tmp_path))
    with (tmp_path / CONFIG).open("wb") as file:  # which takes no room, and would take that of its size in memory
        file.truncate(LONGEST_JSON + 1)
    with refuses(UserError):
        vocabulary_beside(str(tmp_path))


def test_adapters_beside_which_something_is_compressed_are_refused_at_once(tmp_path: Path) -> None:
    model = {"base": str(make_base(tmp_path / "base")), "lora": {"rank": 2}}
    config = RunConfig.from_dict({"model": model, "compression": {"method": "prune"}})
    with refuses(UserError, match=r"^compression\.method:"):
        config_sections(config)
    assert config_sections(config, "prune").most_parameters == 0, "of another model"
    assert config_sections(replace(config, model=replace(config.model, lora=LoraConfig()))).most_parameters == 0


def test_where_a_base_lies_is_nothing_to_the_home_of_its_training() -> None:
    inputs = {"model": ModelConfig(base="here"), "training": ONE_EPOCH, "code": "digest"}

    def key(**changed: object) -> dict[str, object]:
        return describe_inputs(UnfinishedTraining().lasting({**inputs, **changed}))

    assert key() == key(model=ModelConfig(base="there"))
    assert key() != key(code="another")
    assert key(code="") != key(code="", model=ModelConfig(base="there")), "else nothing tells bases apart"


@pytest.mark.parametrize(
    ("world", "parallel"), [pytest.param(1, {}, marks=pytest.mark.prove), (2, {"shard": "weights"})]
)
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
    stored = OpenedBase.open(BaseDirectory.list(str(base)))
    for name, parameter in model.load("best").network.named_parameters():
        whole = torch.empty(parameter.shape)
        stored.fill(whole, name, (0, 0))
        assert torch.equal(parameter, whole), name


def count_openings(counted: Path) -> None:
    """Write a line to the file ``counted`` for every listing of a base in this process."""
    listing = BaseDirectory.list

    def listed(*arguments: Any) -> BaseDirectory:
        with counted.open("a") as file:
            file.write("opened\n")
        return listing(*arguments)

    BaseDirectory.list = listed  # type: ignore[assignment, method-assign]


def counting_rank(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    count_openings(settings["directory"].with_name(f"openings{rank}"))
    rank_body(rank, world, port, settings, environment)


@pytest.mark.prove
def test_a_process_opens_a_base_once(
    data: PreparedData, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseDirectory, "list", BaseDirectory.list)  # and restored at the end
    count_openings(tmp_path / "here")
    asked = {"task": "language", "length": LENGTH, "tokenizer": str(base)}
    config_sections(RunConfig.from_dict({"model": {"base": str(base)}, "data": asked}))
    check_training(data.artifact.directory, ModelConfig(base=str(base)), ONE_EPOCH, 1, 1)
    training = replace(ONE_EPOCH, parallel=ParallelConfig(shard="weights"))
    trained(data.artifact.directory, tmp_path / "run", 2, training, ModelConfig(base=str(base)), body=counting_rank)
    openings = [(tmp_path / file).read_text().count("opened") for file in ("here", "run/openings0", "run/openings1")]
    assert openings == [2, 1, 1], "by the settings, by the check of the task, and by every rank"


@pytest.mark.prove
def test_another_base_is_another_training(data: PreparedData, tmp_path: Path) -> None:
    """The second attempt finds the checkpoints of the first, whose base is where it was, but for one bit."""
    base = make_base(tmp_path / "base")
    model, training = ModelConfig(base=str(base)), replace(ONE_EPOCH, checkpoint_every=10)
    attempt = partial(trained, data.artifact.directory, tmp_path / "run", 1, training)
    attempt(model)
    before = fingerprint_base(str(base))
    content = bytearray((base / WHOLE).read_bytes())
    content[-1] ^= 1
    (base / WHOLE).write_bytes(content)
    attempt(model, directory=tmp_path / "run" / "second")
    line = (tmp_path / "run" / "second.refused0").read_text()
    now = fingerprint_base(str(base))
    assert now != before and "\n" not in line
    same_wording(line)
    # Where it lies is nothing to it.
    content[-1] ^= 1
    (base / WHOLE).write_bytes(content)
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
    (cut / WHOLE).write_bytes((cut / WHOLE).read_bytes()[:-4])
    with refuses(UserError, match=r"model\.base:"):
        check_training(directory, ModelConfig(base=str(cut)), ONE_EPOCH, 1, 1)
    short = make_base(tmp_path / "short", max_position_embeddings=LENGTH - 1)
    with refuses(UserError):
        check_training(directory, ModelConfig(base=str(short)), ONE_EPOCH, 1, 1)


@pytest.mark.prove
def test_without_a_check_the_processes_refuse_it_together(data: PreparedData, tmp_path: Path) -> None:
    cut = make_base(tmp_path / "cut")
    (cut / WHOLE).write_bytes((cut / WHOLE).read_bytes()[:-4])
    training = replace(ONE_EPOCH, parallel=ParallelConfig(shard="weights"))
    trained(data.artifact.directory, tmp_path / "run", 2, training, ModelConfig(base=str(cut)))
    assert all("is cut or damaged" in refusal(tmp_path / "run", rank) for rank in range(2))


def test_machines_have_the_same_base() -> None:
    assert same_origin("base", ["a", "", "a", ""]) == "a"
    with refuses(UserError, match=r"model\.base:"):
        same_origin("base", ["a", "", "b", ""])


def test_what_identifies_work_on_a_cluster_and_a_sweep_has_its_digest(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    config = RunConfig.from_dict({"model": {"base": str(base)}})
    found = config_sections(config).model_code, sweep_identity(config, "data").model["base"]
    assert found == (fingerprint_base(str(base)),) * 2
    (base / "config.json").write_text((base / "config.json").read_text() + " ")
    assert config_sections(config).model_code == fingerprint_base(str(base)) != found[0]
    assert config_sections(RunConfig()).model_code == ""
