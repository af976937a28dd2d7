"""A single process trains without DDP: the same bits as with it, and a checkpoint made with it resumes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from slipstream.operations.proofs.gpu.checks.telemetry import one_thread
from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER, train, write_table, write_tokens
from slipstream.pipeline.train.loop import train_loop
from slipstream.pipeline.train.parallel import replicas
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.shared.artifacts.results.training import read_history
from slipstream.shared.models.config import ModelConfig
from tests.support import toys

STEPS, DIES_AT = 12, 8
MLP = ModelConfig("mlp", {"hidden": [16], "dropout": 0.2})
KINDS: dict[str, tuple[str, ModelConfig, dict[str, Any]]] = {
    "mlp, clipped, with dropout": ("table", MLP, {"clip_norm": 0.1}),
    "resnet with batch normalisation": ("images", ModelConfig("resnet", {"widths": [4, 8], "norm": "batch"}), {}),
    "transformer, accumulation": ("tokens", ModelConfig("transformer", SMALL_TRANSFORMER), {"accumulation": 3}),
    "transformer, bf16, recomputed": (
        "tokens",
        ModelConfig("transformer", SMALL_TRANSFORMER),
        {"precision": "bf16", "recompute": "full", "ema": 0.9},
    ),
    "buckets without views": ("table", MLP, {"gradients": GradientsConfig(gradient_as_bucket_view=False)}),
    "fp16 hook": ("table", MLP, {"gradients": GradientsConfig(hook="fp16")}),
    "powersgd": ("table", MLP, {"gradients": GradientsConfig(hook="powersgd")}),
}
#: `make prove` has the others: larger networks, and bf16, which a CPU emulates.
QUICK = ("mlp, clipped, with dropout",)
#: Hooks change the numbers of one process too, so these keep DDP.
HOOKED = ("fp16 hook", "powersgd")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("prepared")
    write_table(place / "table", "classification")
    toys.images(place / "images")
    write_tokens(place / "tokens", STEPS * 8)
    return place


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """On busy processors threads would wait for each other; and no group is left."""
    with one_thread():
        yield
    if dist.is_initialized():
        dist.destroy_process_group()


@contextmanager
def counted(*, ddp: bool) -> Iterator[dict[str, int]]:
    """``ddp``: every process has DDP, as before. Counts the steps, and the models that DDP wraps."""
    found = {"steps": 0, "wrapped": 0}
    wrap, step = replicas.wrap_in_ddp, train_loop.train_step

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*given: Any, **more: Any) -> Any:
            found[name] += 1
            return call(*given, **more)

        return called

    with (
        mock.patch.object(replicas, "wrap_in_ddp", noted("wrapped", wrap)),
        mock.patch.object(train_loop, "train_step", noted("steps", step)),
        mock.patch.object(replicas, "uses_ddp", (lambda *_: True) if ddp else replicas.uses_ddp),
    ):
        yield found


def trained(kind: str, prepared: Path, directory: Path) -> None:
    data, model, settings = KINDS[kind]
    rows = 8 if data == "tokens" else 50
    train(directory, prepared / data, model, **{"epochs": 1, "batch_size": rows, "checkpoint_every": 3, **settings})


def outcome(directory: Path) -> tuple[list[float], dict[str, Tensor]]:
    weights = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert weights
    return [point.loss for point in read_history(directory).steps], weights


def check_equal(one: Path, other: Path) -> None:
    (losses, weights), (others, other_weights) = outcome(one), outcome(other)
    assert losses == others and len(losses) == STEPS
    assert weights.keys() == other_weights.keys()
    assert all(torch.equal(tensor, other_weights[name]) for name, tensor in weights.items())


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in QUICK else pytest.mark.prove) for kind in KINDS]
)
def test_the_bits_are_those_with_ddp_and_its_checkpoints_resume(kind: str, prepared: Path, tmp_path: Path) -> None:
    with counted(ddp=True) as found:
        trained(kind, prepared, tmp_path / "with")
    assert found == {"steps": STEPS, "wrapped": 1}
    with counted(ddp=False) as found:
        trained(kind, prepared, tmp_path / "without")
    assert found == {"steps": STEPS, "wrapped": int(kind in HOOKED)}
    check_equal(tmp_path / "with", tmp_path / "without")

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with counted(ddp=True) as found, pytest.raises(KeyboardInterrupt):
        step = train_loop.train_step
        dies = lambda *given, **more: (die if found["steps"] == DIES_AT else step)(*given, **more)  # noqa: E731
        with mock.patch.object(train_loop, "train_step", dies):
            trained(kind, prepared, tmp_path / "killed")
    assert found == {"steps": DIES_AT, "wrapped": 1} and not (tmp_path / "killed/manifest.json").exists()
    with counted(ddp=False) as found:
        trained(kind, prepared, tmp_path / "killed")
    assert 0 < found["steps"] < STEPS, "it resumed"
    assert found["wrapped"] == int(kind in HOOKED)
    check_equal(tmp_path / "with", tmp_path / "killed")
