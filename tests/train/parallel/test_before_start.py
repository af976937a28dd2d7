"""Impossible trainings end in one line before any of their processes starts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flytekit.types.directory import FlyteDirectory

from slipstream.flyte import elastic, stage
from slipstream.flyte.elastic import DistributedTask
from slipstream.operations.proofs.gpu.layouts import SIZES, token_rows
from slipstream.pipeline.train import checks
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.errors import UserError
from slipstream.shared.models.arithmetic import choose_precision
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.profiles.profile import Profile, load_profile
from tasks.train import train
from tests.support.fake_nvml import see_four_gpus
from tests.support.proving import first_few
from tests.support.training import table_of_numbers
from tests.support.wording import refuses

TRANSFORMER = ModelConfig("transformer", SIZES)
MLP, BATCH_NORM = ModelConfig(), ModelConfig("tests.support.nets:batch_norm")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("data")
    rows = token_rows(120).numpy()
    write_token_rows(place / "tokens", {"train": rows[:100], "validation": rows[100:]}, vocabulary=256)
    write_token_rows(place / "odd", {"train": rows[:100], "validation": rows[100:]}, vocabulary=255)
    return {"odd": place / "odd", "tokens": place / "tokens", "table": table_of_numbers(place / "table", 200)}


class Started(Exception):
    """The processes were started."""


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise Started

    monkeypatch.setattr(DistributedTask, "_run_group", start)
    monkeypatch.chdir(tmp_path)


def on_processes(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Place the training in ``number`` processes of this machine."""
    place = replace(load_profile("local").placement("train"), nodes=1, processes=number)
    monkeypatch.setattr(Profile, "placement", lambda self, stage: place)


def begin(data: Path, model: ModelConfig, training: dict[str, Any], **inputs: Any) -> None:
    config = TrainingConfig.from_dict(training)
    train.execute(prepared=FlyteDirectory(str(data)), model=model, training=config, code="", **inputs)


BATCH = {"batch_size": 12}
#: The data, the network, the settings, how many processes, and the one line.
MISTAKES: dict[str, tuple[str, ModelConfig, dict[str, Any], int, str]] = {
    "sizes": ("tokens", TRANSFORMER, {"parallel": {"tensor": 3}}, 4, "tensor 3 does not divide the 4 processes"),
    "heads": (
        "tokens",
        TRANSFORMER,
        {"parallel": {"tensor": 3}},
        3,
        "training.parallel.tensor: 3 does not divide the model's num_attention_heads, 4",
    ),
    "key/value heads": (
        "tokens",
        TRANSFORMER,
        {"parallel": {"tensor": 4}},
        4,
        "training.parallel.tensor: 4 does not divide the model's num_key_value_heads, 2",
    ),
    "feed-forward": (
        "tokens",
        ModelConfig("transformer", {**SIZES, "intermediate_size": 25}),
        {"parallel": {"tensor": 2}},
        2,
        "training.parallel.tensor: 2 does not divide the model's intermediate_size, 25",
    ),
    "hidden size": (
        "tokens",
        ModelConfig("transformer", {**SIZES, "hidden_size": 18, "head_dim": 4, "num_key_value_heads": 4}),
        {"parallel": {"tensor": 4}},
        4,
        "training.parallel.tensor: 4 does not divide the model's hidden_size, 18",
    ),
    "vocabulary": (
        "odd",
        TRANSFORMER,
        {"parallel": {"tensor": 2}},
        2,
        "training.parallel.tensor: 2 does not divide the model's vocab_size, 255",
    ),
    "a scalar": (
        "table",
        ModelConfig("tests.support.nets:with_scalars"),
        {"parallel": {"shard": "weights"}},
        1,
        "'layers.0.scale' is a single number without dimensions",
    ),
    "shared": (
        "table",
        ModelConfig("tests.support.nets:with_shared"),
        {"parallel": {"shard": "optimizer"}},
        2,
        "'layers.2.inner.0.weight' belongs to several of its blocks",
    ),
    "nccl": ("table", MLP, {"backend": "nccl"}, 2, "training.backend: nccl needs a GPU"),
    "hook": ("table", MLP, {"gradients": {"hook": "bf16"}}, 2, "over gloo: only NCCL has the bf16 hook"),
    "stages": (
        "tokens",
        TRANSFORMER,
        {"parallel": {"pipeline": 5}, "accumulation": 5},
        5,
        "training.parallel.pipeline: 5 stages for 4 blocks",
    ),
    "micro-batches": (
        "tokens",
        TRANSFORMER,
        {"parallel": {"pipeline": 4}, "accumulation": 3},
        4,
        "training.accumulation: 3 micro-batches for a pipeline of 4 stages",
    ),
    "no plan": ("table", MLP, {"parallel": {"tensor": 2}}, 2, "training.parallel.tensor: this model states no plan"),
    "batch normalisation": (
        "table",
        BATCH_NORM,
        {"parallel": {"shard": "weights"}},
        2,
        "training.parallel: this model has batch normalisation",
    ),
    "fp16": (
        "table",
        MLP,
        {"parallel": {"shard": "weights"}, "precision": "fp16"},
        2,
        "training.precision: fp16 is not allowed with training.parallel",
    ),
    "above the share": (
        "table",
        MLP,
        {"accumulation": 13},
        2,  # for so small a model one is faster
        "training.accumulation: 13 micro-batches for a rank's batch of 12 rows (batches of 12, 1 data-parallel ranks)",
    ),
    "compiled": ("table", BATCH_NORM, {"compile": True}, 1, "training.compile: this model has batch"),
}


@pytest.mark.parametrize("name", first_few(MISTAKES, 8))
def test_it_is_one_line(name: str, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    kind, model, training, processes, message = MISTAKES[name]
    monkeypatch.setattr(checks, "check_compiler", lambda gpu: None)
    on_processes(monkeypatch, processes)
    with pytest.raises(UserError) as error:
        begin(data[kind], model, {**BATCH, **training})
    assert message in error.value.message and "\n" not in error.value.message


@pytest.mark.parametrize(
    ("kind", "model", "training", "processes"),
    [
        ("table", MLP, {"accumulation": 6}, 2),
        ("table", BATCH_NORM, {}, 2),
        ("table", MLP, {"parallel": {"shard": "weights"}}, 2),
        ("tokens", TRANSFORMER, {"parallel": {"tensor": 2}}, 2),
        ("tokens", TRANSFORMER, {"parallel": {"pipeline": 4}, "accumulation": 4}, 4),
    ],
)
def test_what_can_work_is_started(
    data: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    model: ModelConfig,
    training: dict[str, Any],
    processes: int,
) -> None:
    on_processes(monkeypatch, processes)
    with pytest.raises(Started):
        begin(data[kind], model, {**BATCH, **training})


@pytest.mark.parametrize("model", [MLP, BATCH_NORM], ids=["built in", "a factory"])
def test_a_model_that_is_too_large_for_its_export(
    model: ModelConfig, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    on_processes(monkeypatch, 1)
    table = open_prepared(data["table"])
    built = build_model(model.for_rows(table.training_rows, table.signature), table.signature, seed=0)
    count = sum(weight.numel() for weight in built.network.parameters())
    with pytest.raises(UserError) as error:
        begin(data["table"], model, BATCH, most_parameters=count - 1)
    expected = f"export.most_parameters: {count - 1:,} is too small for {model.name}, which has {count:,} parameters"
    assert error.value.message.startswith(expected)
    with pytest.raises(Started):
        begin(data["table"], model, BATCH, most_parameters=count)


def test_a_transformer_leaves_without_onnx(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    on_processes(monkeypatch, 1)
    with pytest.raises(Started):
        begin(data["tokens"], TRANSFORMER, BATCH, most_parameters=1)


def test_the_limit_of_the_export_is_part_of_no_key(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of Flyte's cache, nor of the store on one machine, nor of the checkpoint directory."""
    on_processes(monkeypatch, 1)
    keys: list[str] = []

    def key(name: str, inputs: dict[str, Any], *_: Any) -> str:
        keys.append(str(sorted(inputs)))
        return name

    with monkeypatch.context() as patched:
        patched.setattr(stage, "result_key", key)
        patched.setattr(elastic, "checkpoint_address", key)
        for most in (10**6, 10**7):
            with pytest.raises(Started):
                begin(data["table"], MLP, BATCH, most_parameters=most)
    assert len(keys) == 4 and not any("most_parameters" in key for key in keys), keys
    assert train.metadata.cache_ignore_input_vars == ("most_parameters",)


def test_more_processes_than_gpus(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch, "0")
    on_processes(monkeypatch, 2)
    with refuses(UserError):
        begin(data["table"], MLP, {})


@pytest.mark.parametrize(("gpus", "backend"), [(2, "gloo"), (2, "auto"), (0, "gloo")])
def test_a_pipeline_between_gpus_over_gloo(
    gpus: int, backend: str, data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(checks, "bf16_gpus", lambda: True)
    training = {"backend": backend, "parallel": {"pipeline": 2}}
    on_processes(monkeypatch, 2)
    refused = gpus > 0 and backend == "gloo"
    # Otherwise it is the model that has no stages.
    with refuses(UserError, match="training.backend:" if refused else "training.parallel.pipeline:"):
        begin(data["table"], MLP, {**BATCH, **training})


def test_bf16_on_a_gpu_without_it(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "visible_gpus", lambda: 1)
    monkeypatch.setattr(checks, "bf16_gpus", lambda: False)
    on_processes(monkeypatch, 1)
    with refuses(UserError, match="training.precision:"):
        begin(data["table"], MLP, {"precision": "bf16"})
    with pytest.raises(Started):
        begin(data["table"], MLP, {"precision": "auto"})


@pytest.mark.parametrize(
    ("wanted", "gpu", "bf16", "found"),
    [
        ("auto", True, True, "bf16"),
        ("auto", True, False, "fp16"),
        ("auto", False, False, "fp32"),
        ("bf16", True, True, "bf16"),
        ("bf16", False, False, "bf16"),
        ("fp16", True, False, "fp16"),
    ],
)
def test_what_is_computed_in(wanted: str, gpu: bool, bf16: bool, found: str) -> None:
    assert choose_precision(wanted, gpu=gpu, bf16=bf16) == found


def test_compile_without_a_compiler(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    on_processes(monkeypatch, 1)
    monkeypatch.setenv("CXX", "/nowhere/g++ -O2")
    with refuses(UserError, match="training.compile:"):
        begin(data["table"], MLP, {"compile": True})
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"(g\+\+|clang\+\+).* CXX"):
        begin(data["table"], MLP, {"compile": True})


def test_compile_for_a_gpu_takes_triton_and_a_c_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: None)
    with refuses(UserError):
        checks.check_compiler(gpu=True)
    monkeypatch.setattr(checks.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CC", raising=False)
    with refuses(UserError):
        checks.check_compiler(gpu=True)


def test_fp8_is_not_a_precision() -> None:
    with refuses(UserError, match="training.precision:"):
        TrainingConfig.from_dict({"precision": "fp8"})
