"""Training of adapters on a base: memory, saved state, results and refusals."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun
from slipstream.pipeline.train import run
from slipstream.pipeline.train.applied_tuning import AppliedTuning
from slipstream.pipeline.train.checks import check_training
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.fault_tolerance.notices import NoticeWatcher
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.network import merge_adapters, numbers_in, plain_shapes
from slipstream.shared.models.base.directory import BaseRecord
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.trained import TrainedModel, Weights, write_trained
from tests.support.adapted_runs import SIZES
from tests.support.bases import LENGTH, SIGNATURE, fingerprint_base, make_base, some_tokens, theirs
from tests.support.corpora import prepare_language, write_stories
from tests.support.training import trained
from tests.support.wording import refuses

LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.1)
TRAINING = TrainingConfig(epochs=1, batch_size=128, learning_rate=1e-2, checkpoint_every=3)
SHARDED = ParallelConfig(shard="weights")
INTERLEAVED = ParallelConfig(pipeline=2, schedule="interleaved", stages_per_rank=2)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("base") / "base", "qwen2", **SIZES, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def data(base: Path, tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    place = tmp_path_factory.mktemp("data")
    return prepare_language(place / "prepared", write_stories(place / "stories"), tokenizer=str(base), length=LENGTH)


def model_of(base: Path, **changes: Any) -> ModelConfig:
    return replace(ModelConfig(base=str(base), lora=LORA), **changes)


def adapters_of(model: ModelConfig) -> dict[str, torch.Tensor]:
    return build_model(model, SIGNATURE, 0, empty=True).own_state()


def tensor_bytes(home: Path) -> int:
    """Of the newest checkpoint's tensors."""
    newest = max(path.parent for path in home.rglob("manifest.json"))
    return sum(path.stat().st_size for path in newest.glob("tensors-*"))


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "training", "quantise"),
    [
        (2, replace(TRAINING, ema=0.9), "none"),
        pytest.param(2, replace(TRAINING, parallel=SHARDED, precision="bf16"), "nf4", marks=pytest.mark.prove),
        pytest.param(2, replace(TRAINING, precision="bf16"), "nf4", marks=pytest.mark.prove),
        pytest.param(2, TRAINING, "none", marks=pytest.mark.prove),
        pytest.param(3, replace(TRAINING, parallel=SHARDED), "none", marks=pytest.mark.prove),
        pytest.param(
            2, replace(TRAINING, batch_size=256, accumulation=4, parallel=INTERLEAVED), "nf4", marks=pytest.mark.prove
        ),
    ],
)
def test_what_is_kept_of_a_training_are_its_adapters(
    world: int, training: TrainingConfig, quantise: Any, data: PreparedData, base: Path, tmp_path: Path
) -> None:
    before, model = fingerprint_base(str(base)), model_of(base, quantise=quantise)
    directory = trained(data.artifact.directory, tmp_path / "run", world, training, model)
    adapters = adapters_of(model)
    numbers = sum(tensor.numel() for tensor in adapters.values())
    # Two factors for each of 7 layers of 4 blocks, of whose inputs and outputs all widths are known.
    assert numbers == 4 * LORA.rank * sum((64 + 64, 64 + 32, 64 + 32, 64 + 64, 64 + 128, 64 + 128, 128 + 64))
    for name in ("best", "last"):
        stored = load_file(directory / f"{name}.safetensors")
        assert {name: tensor.shape for name, tensor in stored.items()} == {n: t.shape for n, t in adapters.items()}
        before_tensors = len(next(Weights.of(adapters).chunks()))
        assert (directory / f"{name}.safetensors").stat().st_size == before_tensors + 4 * numbers
    # Weights, two moments and the best weights, averages if there are any, the optimiser's counters, the loss scale.
    copies, counters = 4 + bool(training.ema), len(adapters)
    assert tensor_bytes(tmp_path / "run" / "checkpoints") == 4 * (copies * numbers + counters)
    history = json.loads((directory / "history.json").read_text())
    whole = sum(
        torch.Size(shape).numel() for shape in plain_shapes(build_model(model, SIGNATURE, 0, empty=True)).values()
    )
    assert (history["trained"], history["parameters"]) == (numbers, whole + numbers)
    assert history["evaluations"][-1]["loss"] < history["steps"][0]["loss"]

    opened = TrainedModel.open(directory)
    assert opened.architecture.base == BaseRecord(str(base), before) and fingerprint_base(str(base)) == before
    assert (opened.config.base, opened.config.lora, opened.config.quantise) == (str(base), LORA, quantise)
    loaded = opened.load()
    assert loaded.adapted and numbers_in(loaded) == whole + numbers
    with torch.no_grad():
        logits = loaded(some_tokens())
        assert (logits - theirs(base, some_tokens())).abs().max() > 0.01
        merge_adapters(loaded.network)
        assert (loaded(some_tokens()) - logits).abs().max() < 1e-5 * logits.abs().max()


@pytest.fixture(scope="module")
def adapted(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The place of a trained model with adapters and of its base, which may be damaged in copies."""
    place = tmp_path_factory.mktemp("adapted")
    base = make_base(place / "base", "qwen2", **SIZES)
    trained(data.artifact.directory, place / "run", 1, replace(TRAINING, batch_size=512), model_of(base))
    return place


@pytest.mark.prove
def test_without_its_base_a_trained_model_is_refused_in_one_line(adapted: Path) -> None:
    base, model = adapted / "base", TrainedModel.open(adapted / "run" / "model")
    model.load()
    weights = base / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with refuses(UserError, match=r"model\.base:"):
        model.load()
    weights.write_bytes(content)
    base.rename(adapted / "moved")
    with refuses(UserError, match=r"model\.base:"):
        model.load()
    (adapted / "moved").rename(base)
    model.load()


@pytest.mark.prove
def test_a_model_with_adapters_is_not_compressed(adapted: Path, data: PreparedData) -> None:
    model = TrainedModel.open(adapted / "run" / "model")
    with refuses(UserError):
        CompressionRun(model, data, CompressionConfig()).check()


@pytest.mark.prove
def test_no_value_of_a_base_is_read_before_there_is_room_for_it(
    data: PreparedData, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(predictor: Predictor, *_: Any) -> None:
        assert all(parameter.is_meta for parameter in predictor.parameters()), "nothing has memory yet"
        assert {p.dtype for p in predictor.parameters() if not p.requires_grad} == {torch.bfloat16}, "held type"
        raise UserError("no room")

    monkeypatch.setattr(run, "check_memory", refuse)
    training = replace(TRAINING, precision="bf16")
    output, home = tmp_path / "model", str(tmp_path / "home")
    request = TrainingRequest(data.artifact.directory, model_of(base), training, output, home, {})
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group, watcher = RankContext(0, 1, torch.device("cpu"), "gloo"), NoticeWatcher([], grace_s=None)
    trainer = run.Trainer(request, group, None, AppliedTuning(), dist.HashStore(), watcher, time.perf_counter())
    try:
        resolved = trainer.resolve()
        with refuses(UserError):
            trainer.build(resolved)
        monkeypatch.setattr(run, "check_memory", lambda *_: None)
        setup = trainer.divide(trainer.place(trainer.build(resolved)))
        trainer.fill(setup, own=True)  # as without a checkpoint
    finally:
        dist.destroy_process_group()
    filled = setup.parallel.model.state_dict()
    for name, expected in build_model(model_of(base), SIGNATURE, training.seed).state_dict().items():
        assert torch.equal(filled[name], expected.to(filled[name].dtype)), name


@pytest.mark.prove
@pytest.mark.parametrize("what", ["lost", "of the base"])
def test_a_file_of_other_tensors_than_the_adapters_is_damaged(what: str, adapted: Path, tmp_path: Path) -> None:
    model = TrainedModel.open(adapted / "run" / "model")
    state = model.load().state_dict()
    weights = model.load().own_state()
    if what == "lost":
        del weights[min(weights)]
    else:
        weights["network.model.norm.weight"] = state["network.model.norm.weight"]
    write_trained(tmp_path / "other", model.architecture, weights, weights, {})
    with refuses(DamagedArtifact, match=r"best\.safetensors:"):
        TrainedModel.open(tmp_path / "other").load()


@pytest.mark.parametrize(
    ("model", "training", "line"),
    [
        (
            {},
            replace(TRAINING, parallel=ParallelConfig(tensor=2)),
            "training.parallel.tensor: the adapters of model.lora cannot be divided; expected 1, or "
            "training.parallel.shard or pipeline",
        ),
        (
            {"quantise": "nf4", "arguments": {}},
            TRAINING,
            "model.quantise: model.layers.0.mlp.down_proj takes 72 inputs, which is not a multiple of "
            "64; expected null, or remove down_proj from model.lora.targets",
        ),
    ],
    ids=["tensor", "blocks"],
)
def test_what_cannot_be_is_refused_before_any_process_starts(
    model: dict[str, Any], training: TrainingConfig, line: str, data: PreparedData, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", **{**SIZES, "intermediate_size": 72})
    with pytest.raises(UserError) as refused:
        check_training(data.artifact.directory, model_of(base, **model), training, 2, 1)
    assert refused.value.message == line
