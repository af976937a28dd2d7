"""``model.arguments``: unknown, missing and refused arguments of a factory are named."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.toys import images
from tests.support.wording import refuses

MINE = "tests.models.test_arguments:"


def narrow(signature: Any, width: int, *, bias: bool = True) -> nn.Module:
    return nn.Linear(signature.inputs[0].shape[0], width, bias=bias)


def open_to_all(signature: Any, **arguments: Any) -> nn.Module:
    raise KeyError(*arguments)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("mlp", {"hiden": [8]}),
        ("auto", {"signature": 1}),
        (f"{MINE}narrow", {"with": 3, "width": 8}),
        (f"{MINE}narrow", {}),
        (f"{MINE}open_to_all", {"any": 1}),
        ("mlp", {"hidden": "wide"}),
        ("auto", {"widths": [4, 8]}),
    ],
)
def test_the_argument_is_named_and_not_the_model(name: str, arguments: dict[str, Any], tmp_path: Path) -> None:
    with refuses(UserError) as refusal:
        build_model(ModelConfig(name, arguments), write_table(tmp_path / "data", "classification").signature, seed=0)
    assert "\n" not in refusal.value.message


@pytest.mark.parametrize(("name", "fitting"), [("resnet", "mlp"), ("transformer", "mlp"), ("mlp", "resnet")])
def test_a_built_in_model_for_other_data_is_refused(name: str, fitting: str, tmp_path: Path) -> None:
    data = images(tmp_path / "data") if fitting == "resnet" else write_table(tmp_path / "data", "classification")
    with refuses(UserError, match=r"model\.name:"):
        build_model(ModelConfig(name), data.signature, seed=0)


def test_built_in_networks_and_factories_take_what_they_name(tmp_path: Path) -> None:
    signature = images(tmp_path / "data").signature
    assert build_model(ModelConfig("resnet", {"widths": [4, 8]}), signature, seed=0)
