"""Initial values of a model with adapters, in chunks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from slipstream.shared.models.adapters import network as module
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.adapters.network import AdaptedValues
from slipstream.shared.models.adapters.nf4 import quantise_weight
from slipstream.shared.models.base.directory import BaseDirectory
from slipstream.shared.models.base.tensors import BaseValues, OpenedBase
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.initial.drawn import fill_parameters
from tests.support.adapted_runs import SIZES
from tests.support.bases import SIGNATURE, make_base, some_tokens, theirs

LORA = LoraConfig(rank=4)


@dataclass
class OneWeight:
    """A base of one weight, and the rows of it that were asked for."""

    weight: Tensor
    asked: list[range] = field(default_factory=list)

    def fill(self, part: Tensor, name: str, size: Sequence[int], offsets: Sequence[int]) -> None:
        assert name == "q_proj.weight" and tuple(size) == self.weight.shape and offsets[1] == 0
        self.asked.append(range(offsets[0], offsets[0] + len(part)))
        part.copy_(self.weight[offsets[0] : offsets[0] + len(part)])


@pytest.mark.parametrize("places", [1, 2, 3, 12])
def test_parts_are_those_of_the_whole_and_every_row_is_read_once(places: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 3 * 128)
    base = OneWeight(torch.randn(10, 128, generator=torch.Generator().manual_seed(0)))
    whole = quantise_weight(base.weight)
    values, sizes = AdaptedValues(base, 0), [tuple(part.shape) for part in whole]
    for place in range(places):
        step = -(-10 // places)  # as FSDP2 divides rows: later processes may have none
        rows = slice(min(10, place * step), min(10, (place + 1) * step))
        for name, of_whole, size in zip(("q_proj.codes", "q_proj.scales"), whole, sizes, strict=True):
            part = torch.full_like(of_whole[rows], 77)
            values.fill(part, name, size, (rows.start, 0))
            assert torch.equal(part, of_whole[rows])
    assert [row for rows in base.asked for row in rows] == list(range(10))
    assert all(len(rows) <= 3 for rows in base.asked)


@pytest.mark.parametrize("quantised", ["none", "nf4"])
def test_of_a_base_every_byte_is_read_once(quantised: Literal["none", "nf4"], tmp_path: Path) -> None:
    directory = make_base(tmp_path / "base", dtype=torch.bfloat16, **SIZES)
    config = ModelConfig(base=str(directory), lora=LORA, quantise=quantised)
    model = build_model(config, SIGNATURE, 0, empty=True).network
    base = OpenedBase.open(BaseDirectory.list(str(directory)))
    base.check(model, tied=False)
    fill_parameters(model.to_empty(device="cpu"), AdaptedValues(BaseValues(base), 0))
    assert base.bytes_read == sum(2 * torch.Size(stored.shape).numel() for stored in base.tensors.values())
    if quantised == "none":
        torch.testing.assert_close(model(some_tokens()), theirs(directory, some_tokens()), rtol=0, atol=1e-5)


def test_adapters_are_drawn_by_seed_and_name_and_add_nothing(tmp_path: Path) -> None:
    directory = make_base(tmp_path / "base", **SIZES)
    config = ModelConfig(base=str(directory), lora=LORA)
    one, same, other = (build_model(config, SIGNATURE, seed).network for seed in (1, 1, 2))
    torch.testing.assert_close(one(some_tokens()), theirs(directory, some_tokens()), rtol=0, atol=1e-5)
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, same.get_parameter(name))
        assert torch.equal(parameter, other.get_parameter(name)) == (not name.endswith("lora_A.weight")), name
        if name.endswith("lora_A.weight"):
            # A linear layer's initial values lie below 1 / sqrt(inputs), which gives this standard deviation.
            expected = (3 * parameter.shape[1]) ** -0.5
            assert parameter.std().item() == pytest.approx(expected, rel=0.2) and is_adapter(name)


def test_what_each_pass_dequantises_does_not_count_for_the_rows_of_a_batch(tmp_path: Path) -> None:
    config = ModelConfig(base=str(make_base(tmp_path / "base", **SIZES)), lora=LORA)
    plain = build_model(config, SIGNATURE, 0, empty=True).row_bytes
    quantised = build_model(ModelConfig(base=config.base, lora=LORA, quantise="nf4"), SIGNATURE, 0, empty=True)
    assert quantised.row_bytes == plain > 0
    assert sum(parameter.dtype is torch.uint8 for parameter in quantised.parameters()) == 7 * 4
