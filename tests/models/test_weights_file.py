"""Weights written tensor by tensor equal the files of safetensors."""

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from slipstream.shared.models.trained import TYPES, Weights

MIXED = {
    "b.weight": torch.arange(12.0).reshape(3, 4),
    "a.weight": torch.arange(6.0).reshape(2, 3).T,
    "steps": torch.tensor(7),
    'ümlaut "quoted"': torch.arange(5, dtype=torch.int8),
    "empty": torch.zeros(0, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "mask": torch.tensor([True, False]),
    "double": torch.tensor([1.5], dtype=torch.float64),
}


@pytest.mark.parametrize("tensors", [MIXED, {}, {"x": torch.tensor(1.0)}], ids=["mixed", "none", "one"])
def test_the_bytes_are_those_of_safetensors(tensors: dict[str, Tensor]) -> None:
    expected = save({name: tensor.contiguous() for name, tensor in tensors.items()})
    assert b"".join(Weights.of(tensors).chunks()) == expected


def test_every_type_comes_back() -> None:
    tensors = {str(dtype): torch.ones(3).to(dtype) for dtype in TYPES}
    found = load(b"".join(Weights.of(tensors).chunks()))
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))
