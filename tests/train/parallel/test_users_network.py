"""A user's network with several inputs, its own plan and its own initial deviations."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import TARGET, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.initial.drawn import DrawnValues
from slipstream.shared.models.trained import TrainedModel
from tests.support.nets import Planned
from tests.support.training import trained
from tests.support.wording import refuses

SIGNATURE = Signature(
    (TensorSpec("numeric", "float32", (5,)), TensorSpec("codes", "int32", (3,))),
    "classification",
    "y",
    ("a", "b", "c", "d"),
)
PLANNED = "tests.support.nets:Planned"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("data") / "prepared"
    writer = ArtifactWriter(directory)
    draw = np.random.default_rng(0)
    for split, rows in (("train", 130), ("validation", 50), ("test", 20)):
        records = np.zeros(rows, SIGNATURE.record)
        records[TARGET] = draw.integers(0, 4, rows)
        records["numeric"] = draw.normal(size=(rows, 5)) + records[TARGET][:, None] / 2
        records["codes"] = draw.integers(0, 8, (rows, 3))
        records["codes"][:, 0] = records[TARGET]
        with writer.create(f"{split}-00000.rows", 64 * SIGNATURE.record.itemsize) as file:
            file.write(records.tobytes())
    write_record(writer, "signature.json", SIGNATURE)
    writer.finish("prepare", {})
    return directory


def run(prepared: Path, place: Path, world: int, parallel: dict[str, Any]) -> TrainedModel:
    training = {"epochs": 2, "batch_size": 24, "accumulation": 2, "clip_norm": 0.5, "learning_rate": 0.02}
    config = TrainingConfig.from_dict({**training, "parallel": parallel})
    return TrainedModel.open(trained(prepared, place, world, config, ModelConfig(PLANNED)), PLANNED)


@pytest.fixture(scope="module")
def one(prepared: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    return run(prepared, tmp_path_factory.mktemp("one"), 1, {})


@pytest.mark.prove
@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, {"pipeline": 2}),
        pytest.param(2, {"shard": "weights"}, marks=pytest.mark.prove),
        pytest.param(2, {"tensor": 2, "sequence": False}, marks=pytest.mark.prove),
        pytest.param(8, {"pipeline": 2, "shard": "gradients", "tensor": 2, "sequence": False}, marks=pytest.mark.prove),
    ],
)
def test_every_layout_trains_it_alike(
    prepared: Path, tmp_path: Path, one: TrainedModel, world: int, parallel: dict[str, Any]
) -> None:
    found = run(prepared, tmp_path / "run", world, parallel)
    weights, expected = (load_file(model.artifact.path("last.safetensors")) for model in (found, one))
    assert weights.keys() == expected.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=2e-5)
    losses = [[point.loss for point in model.history.steps] for model in (found, one)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][-1] < 0.7 * losses[0][0]
    assert found.history.parameters == one.history.parameters


IMAGES = Signature((TensorSpec("image", "uint8", (1, 8, 8)),), "classification", "y", ("a", "b"), (), (9.0,), (2.0,))


@pytest.mark.parametrize("empty", [False, True])
def test_pictures_may_be_its_input(empty: bool) -> None:
    """Mean and deviation of the pixels are values, though the network has none yet."""
    made = build_model(ModelConfig("tests.support.nets:PlannedForPictures"), IMAGES, 0, empty=empty)
    assert made.image_mean.item() == 9.0 and all(p.is_meta is empty for p in made.parameters())


def test_a_function_may_make_it() -> None:
    by_class, by_function = (
        build_model(ModelConfig(f"tests.support.nets:{name}"), SIGNATURE, 7) for name in ("Planned", "planned")
    )
    for (name, one), other in zip(by_class.named_parameters(), by_function.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert not by_function.get_parameter("network.first.bias").any()


@pytest.mark.parametrize("constant", ["buffer", "attribute"])
def test_a_constant_that_would_have_no_value_is_one_line(constant: str) -> None:
    """A network that states its deviations is built without memory, its constants, too."""
    with refuses(UserError):
        build_model(ModelConfig(PLANNED, {"constant": constant}), SIGNATURE, 0)


@pytest.mark.parametrize("size", [(), (6,), (6, 4), (6, 4, 3), (6, 2, 3, 3)])
def test_parameters_of_any_shape_are_filled_part_by_part(size: tuple[int, ...]) -> None:
    values = DrawnValues(Planned(SIGNATURE), 1)
    whole = torch.empty(size)
    values.fill(whole, "weight", size, (0,) * len(size))
    assert whole.numel() == 1 or whole.std() > 0.05
    if size:
        parts = [torch.empty(2, *size[1:]) for _ in range(3)]
        for number, part in enumerate(parts):
            values.fill(part, "weight", size, (2 * number, *(0 for _ in size[1:])))
        assert torch.equal(torch.cat(parts), whole)
