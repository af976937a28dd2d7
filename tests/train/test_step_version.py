"""Steps give the stored losses for every kind of model; if these change, ``STEP_VERSION`` is raised."""

import json
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.trainings import SMALL_TRANSFORMER, train, write_table, write_tokens
from slipstream.pipeline.train import request
from slipstream.pipeline.train.config import STEP_VERSION
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.results.training import read_history
from slipstream.shared.artifacts.versions import module_digests
from slipstream.shared.models import transformer
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor
from tests.support import toys
from tests.support.adapted_runs import SIZES
from tests.support.bases import LENGTH, VOCABULARY, make_base
from tests.support.proving import first_few

STORED = Path(__file__).with_name("step_losses.json")
STEPS, ROWS = 12, 8
KINDS: dict[str, tuple[ModelConfig, dict[str, Any]]] = {
    "mlp": (ModelConfig("mlp", {"hidden": [16]}), {}),
    "mlp, clipped": (ModelConfig("mlp", {"hidden": [16]}), {"clip_norm": 0.1}),
    "mlp, averaged weights": (ModelConfig("mlp", {"hidden": [16]}), {"ema": 0.9}),
    "mlp, sgd": (ModelConfig("mlp", {"hidden": [16]}), {"optimizer": "sgd", "nesterov": True, "learning_rate": 0.1}),
    "mlp, accumulation": (ModelConfig("mlp", {"hidden": [16]}), {"accumulation": 2}),
    "mlp, regression": (ModelConfig("mlp", {"hidden": [16]}), {}),
    "resnet": (ModelConfig("resnet", {"widths": [4, 8]}), {}),
    "transformer": (ModelConfig("transformer", SMALL_TRANSFORMER), {}),
    "transformer, weight decay": (ModelConfig("transformer", SMALL_TRANSFORMER), {"weight_decay": 0.3}),
    "adapters": (ModelConfig(lora=LoraConfig(rank=3, alpha=6.0)), {"learning_rate": 0.1}),
}
#: The modules whose arithmetic makes a step, and their digest.
STEP_MODULES = (
    "slipstream.pipeline.train.loop.step",
    "slipstream.pipeline.train.loop.objective",
    "slipstream.pipeline.train.loop.fused_loss",
    "slipstream.pipeline.train.loop.loss_kernels",
    "slipstream.pipeline.train.loop.optimizer",
    "slipstream.pipeline.train.loop.state",
    "slipstream.shared.models.arithmetic",
    "slipstream.shared.models.transformer",
    "slipstream.shared.models.tables_and_images",
    "slipstream.shared.models.adapters.layers",
    "slipstream.shared.models.initial.drawn",
)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("prepared")
    write_table(place / "table", "classification")
    write_table(place / "values", "regression")
    toys.images(place / "images")
    write_tokens(place / "tokens", STEPS * ROWS)
    write_tokens(place / "base tokens", STEPS * ROWS, LENGTH, VOCABULARY)
    make_base(place / "base", "qwen2", **SIZES)
    return {path.name: path for path in place.iterdir()}


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let trainings compute in float64 all through, from numbers that are the same on every machine.

    Vectorised float32 functions differ by a last bit between processors, so the initial weights and the tables of
    rotary positions are made here, the latter close to those of the model.
    """
    begin, fill = request.Lineage.begin, ReplicatedModel.fill

    def in_double(*given: Any) -> Predictor:
        predictor = begin(*given)
        predictor.double()
        if not any(parameter.is_meta for parameter in predictor.parameters()):
            draw(predictor.network)
        predictor.network.register_forward_pre_hook(
            lambda _, inputs: tuple(each.double() if each.is_floating_point() else each for each in inputs)
        )
        return predictor

    def filled(model: ReplicatedModel, values: Any, *, own: bool) -> None:
        fill(model, values, own=own)
        if own:
            draw(model.model.network)

    def exact_tables(config: Any, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        half = config.head_size // 2
        rates = [config.rope_theta ** (-2 * pair / config.head_size) for pair in range(half)]
        angles = [[position * rate for rate in rates + rates] for position in range(length)]
        made = [
            torch.tensor([[[of(angle) for angle in angles_of]] for angles_of in angles], dtype=dtype)
            for of in (math.cos, math.sin)
        ]
        for found, exact in zip(transformer.rotary_tables(config, length, device, dtype), made, strict=True):
            assert torch.allclose(found, exact, rtol=0, atol=1e-5), "rotary positions: raise STEP_VERSION"
        return made[0], made[1]

    monkeypatch.setattr(request.Lineage, "begin", in_double)
    monkeypatch.setattr(ReplicatedModel, "fill", filled)
    monkeypatch.setattr(transformer, "kept_tables", cache(exact_tables))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def draw(network: nn.Module) -> None:
    """Fill all parameters that are not constants with uniform numbers."""
    generator = np.random.default_rng(0)
    for parameter in network.parameters():
        if parameter.min() < parameter.max():
            parameter.copy_(torch.from_numpy(generator.uniform(-0.2, 0.2, parameter.shape)))


def losses(kind: str, prepared: dict[str, Path], directory: Path) -> list[float]:
    """Return the training loss of every step and the validation loss at the end."""
    model, settings = KINDS[kind]
    data = "values" if "regression" in kind else "table"
    if kind == "adapters":
        data, model = "base tokens", ModelConfig(base=str(prepared["base"]), lora=model.lora)
    elif model.name in ("resnet", "transformer"):
        data = {"resnet": "images", "transformer": "tokens"}[model.name]
    rows = {"table": 50, "values": 50, "images": 50}.get(data, ROWS)
    settings = {"epochs": 1, "batch_size": rows, "learning_rate": 1e-2, "precision": "fp32", **settings}
    train(directory, prepared[data], model, **settings)
    history = read_history(directory)
    assert [point.step for point in history.steps] == list(range(1, STEPS + 1))
    return [*(point.loss for point in history.steps), history.evaluations[-1].loss]


@pytest.mark.skipif("STORE" not in os.environ, reason="stores what the code computes now, if STORE is set")
def test_store(prepared: dict[str, Path], tmp_path: Path, in_float64: None) -> None:
    found = {kind: losses(kind, prepared, tmp_path / str(number)) for number, kind in enumerate(KINDS)}
    record = {"version": STEP_VERSION, "losses": found, "modules": step_digests()}
    STORED.write_text(json.dumps(record, indent=1) + "\n")


@pytest.mark.parametrize("kind", first_few(KINDS, 4))
def test_a_step_computes_what_it_did(kind: str, prepared: dict[str, Path], tmp_path: Path, in_float64: None) -> None:
    stored = json.loads(STORED.read_text())
    assert stored["version"] == STEP_VERSION, f"STEP_VERSION was raised: store the new losses in {STORED.name}"
    found = torch.tensor(losses(kind, prepared, tmp_path / "model"), dtype=torch.float64)
    expected = torch.tensor(stored["losses"][kind], dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-9, atol=0), (
        f"a step computes something else: raise STEP_VERSION, or show that nothing changed; "
        f"apart by {float(((found - expected) / expected).abs().max()):.1e}"
    )
    assert found[STEPS - 1] < found[0], "the model does not learn"


def test_an_edit_of_the_modules_that_make_a_step_is_noticed() -> None:
    found, stored = step_digests(), json.loads(STORED.read_text())["modules"]
    changed = [name for name in STEP_MODULES if found[name] != stored.get(name)]
    assert not changed, (
        f"{', '.join(changed)} changed: raise STEP_VERSION if a step now computes something else, and store the new "
        f"digests in {STORED.name}: STORE=1 pytest {Path(__file__).name}"
    )


def step_digests() -> dict[str, str]:
    digests = module_digests(STEP_MODULES)
    return {name: digests[name] for name in STEP_MODULES}
