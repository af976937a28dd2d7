"""Pruning: groups of units, the choice of the units to keep, and a result like any other trained model."""

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun, propose_model, unit_importance, units_to_keep
from slipstream.pipeline.compress.groups import PruningGroup, find_groups, unite_prunings
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.pruning import compose_prunings, prune_model
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from tests.support.training import trained
from tests.support.wording import refuses

NUMBERS = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
MIXED = dataclasses.replace(
    NUMBERS, inputs=(*NUMBERS.inputs, TensorSpec("categorical", "int32", (2,))), cardinalities=(4, 9)
)
IMAGES = Signature(
    (TensorSpec("image", "uint8", (1, 8, 8)),),
    "classification",
    "y",
    ("a", "b", "c"),
    image_mean=(9.0,),
    image_std=(5.0,),
)


class Flattened(nn.Module):
    """Convolutions whose channels are flattened for a linear layer, in either order."""

    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8 * 16, 3)
        self.channels_last = channels_last

    def forward(self, image: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.second(torch.relu(self.first(image)))))
        x = nn.functional.max_pool2d(x, 2)
        return self.head((x.permute(0, 2, 3, 1) if self.channels_last else x).flatten(1))


class Stubborn(nn.Module):
    """Names a size in its forward pass, so that the second layer cannot become smaller; two layers share weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 3)
        self.tied = nn.Linear(3, 3)
        self.also = nn.Linear(3, 3)
        self.also.weight = self.tied.weight

    def forward(self, numeric: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.first(numeric)))).view(-1, 2, 3).flatten(1)
        return self.also(torch.relu(self.tied(self.head(x))))


def predictor(signature: Signature, network: nn.Module | ModelConfig) -> Predictor:
    torch.manual_seed(3)
    made = build_model(network, signature, 0) if isinstance(network, ModelConfig) else Predictor(signature, network)
    return made.eval()


def sizes(groups: list[PruningGroup]) -> dict[str, tuple[int, int]]:
    return {group.name: (group.units, group.blocks) for group in groups}


def test_all_hidden_units_of_the_built_in_networks_are_found() -> None:
    mlp = predictor(MIXED, ModelConfig("mlp", {"hidden": [16, 8]}))
    assert sizes(find_groups(mlp)) == {"layers.0": (16, 1), "layers.3": (8, 1)}
    channels = {(16, 8): 2, (32, 8): 2, (64, 8): 2}
    found = list(sizes(find_groups(predictor(IMAGES, ModelConfig("resnet")))).values())
    assert {size: found.count(size) for size in found} == channels
    batch = find_groups(predictor(IMAGES, ModelConfig("resnet", {"norm": "batch"})))
    assert sorted(group.units for group in batch) == [16, 16, 32, 32, 64, 64]
    assert all(group.blocks == 1 for group in batch)


@pytest.mark.parametrize("channels_last", [False, True])
def test_flattened_channels_are_followed(channels_last: bool) -> None:
    model = predictor(IMAGES, Flattened(channels_last))
    groups = find_groups(model)
    assert sizes(groups)["first"] == (6, 1)
    # Torch-Pruning takes flattened channels for the outer ones: where they are the inner ones, the group is not
    # believed.
    assert ("second" in sizes(groups)) != channels_last


def test_removed_units_that_had_no_effect_change_no_output() -> None:
    """Units whose outgoing weights are zero are the least important; without them the outputs are the same."""
    model = predictor(NUMBERS, nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    layers: Any = model.network
    with torch.no_grad():
        layers[2].weight[:, [1, 4, 5, 7]] = 0
        layers[4].weight[:, [0, 2, 3]] = 0
    rows = np.zeros(200, NUMBERS.record)
    generator = np.random.default_rng(0)
    rows["numeric"], rows[TARGET] = generator.normal(size=(200, 5)), generator.integers(0, 3, 200)

    class Data:
        def sample(self, _: str, most: int) -> np.ndarray:
            return rows[:most]

    groups = find_groups(model)
    found = unit_importance(model, groups, Data())  # type: ignore[arg-type]
    kept = unite_prunings([g.retained(units_to_keep(g, of, 0.5)) for g, of in zip(groups, found, strict=True)])
    assert kept["0"] == {"out": [0, 2, 3, 6]} and kept["2"] == {"out": [1, 4, 5], "in": [0, 2, 3, 6]}
    inputs = torch.randn(9, 5)
    with torch.no_grad():
        before = model(inputs)
        prune_model(model.network, kept)
        torch.testing.assert_close(model(inputs), before)
    assert [layer.weight.shape for layer in layers[::2]] == [(4, 5), (3, 4), (3, 3)]


def test_group_normalisation_keeps_equally_many_of_each_block() -> None:
    group = PruningGroup(8, 4, ())
    of = torch.tensor([9.0, 8.0, 1.0, 2.0, 0.0, 1.0, 5.0, 4.0])
    assert units_to_keep(group, of, 0.5) == [0, 3, 5, 6]
    assert units_to_keep(group, of, 0.99) == [0, 3, 5, 6], "at least one of each"


def test_what_cannot_be_exchanged_or_made_smaller_stays() -> None:
    assert sizes(find_groups(predictor(NUMBERS, Stubborn()))) == {"first": (8, 1)}
    with refuses(UserError, match="compression.method:"):
        find_groups(predictor(NUMBERS, nn.Linear(5, 3)))


def test_what_two_cuts_kept_is_what_one_would() -> None:
    first, second = {"0": {"out": [1, 3, 5, 7]}, "2": {"in": [1, 3, 5, 7]}}, {"0": {"out": [0, 2]}, "2": {"in": [0, 2]}}
    twice, once = (nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
    once.load_state_dict(twice.state_dict())
    prune_model(twice, first)
    prune_model(twice, second)
    prune_model(once, compose_prunings(first, second))
    assert all(torch.equal(a, b) for a, b in zip(twice.parameters(), once.parameters(), strict=True))
    with pytest.raises(ValueError, match="has 2 units"):
        prune_model(once, {"0": {"out": [2]}})
    with refuses(ValueError):
        prune_model(once, {"x": {"out": [0]}})


def work_on(model: Path, prepared: Path, method: str = "prune", **settings: object) -> CompressionRun:
    config = CompressionConfig(method=method, **settings)  # type: ignore[arg-type]
    return CompressionRun(TrainedModel.open(model), PreparedData.open(prepared), config)


@pytest.mark.prove
def test_a_pruned_model_trains_on_is_pruned_again_and_exported(tmp_path: Path) -> None:
    from slipstream.pipeline.export.config import ExportConfig
    from slipstream.pipeline.export.engine import export
    from slipstream.shared.artifacts.results.export import read_export

    prepared = tmp_path / "prepared"
    write_table(prepared, "classification")
    short = TrainingConfig(epochs=2, batch_size=64, patience=0)
    whole = trained(prepared, tmp_path / "whole", 1, short, ModelConfig(arguments={"hidden": [16, 8]}))
    for name, widths in (("half", [8, 4]), ("quarter", [4, 2])):
        start = tmp_path / f"start-{name}"
        propose_model(start, work_on(whole, prepared, share=0.5), [], {})
        smaller = trained(prepared, tmp_path / name, 2, short, start=start, teacher=whole)
        layers = [module for module in TrainedModel.open(smaller).load().modules() if isinstance(module, nn.Linear)]
        assert [layer.out_features for layer in layers] == [*widths, 2]
        assert all(after.in_features == before.out_features for before, after in pairwise(layers))
        whole = smaller
    model = TrainedModel.open(whole)
    assert list(model.architecture.retained) and model.history.parameters == sum(
        p.numel() for p in model.load().parameters()
    )
    export(tmp_path / "exported", model, PreparedData.open(prepared), ExportConfig(seconds=0.5), {})
    assert read_export(tmp_path / "exported").chosen


def test_a_network_that_is_not_the_pruned_one_is_refused(tmp_path: Path) -> None:
    config = ModelConfig("mlp", {"hidden": [16]})
    kept = {"layers.0": {"out": [0, 99]}}
    weights = build_model(config, NUMBERS, seed=0).state_dict()
    write_trained(tmp_path / "x", Architecture(config, NUMBERS, kept), weights, weights, {})
    with refuses(UserError):
        TrainedModel.open(tmp_path / "x").load()
