"""Shared key and value heads reach a fused kernel on every GPU."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._dynamo.variables.torch import constant_fold_functions
from torch.nn import functional

from slipstream.shared.models import transformer
from slipstream.shared.models.transformer import Attention, kernel_shares_heads, rotary_tables
from slipstream.shared.models.transformer_config import TransformerConfig

LENGTH = 12
SIZES = {"vocab_size": 8, "hidden_size": 32, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
CONFIG = TransformerConfig.from_dict({**SIZES, "num_key_value_heads": 2, "max_position_embeddings": LENGTH})
VOLTA, AMPERE, MI300X = 7, 8, 9


@pytest.mark.parametrize(
    ("capability", "autocast", "dtype", "shares"),
    [
        (AMPERE, None, torch.float32, False),
        (MI300X, None, torch.float32, False),
        (VOLTA, torch.float16, torch.float32, False),
        (VOLTA, None, torch.float16, False),
        (AMPERE, torch.bfloat16, torch.float32, True),
        (AMPERE, None, torch.float16, True),
        (MI300X, torch.bfloat16, torch.float32, True),
    ],
)
def test_on_a_gpu_heads_are_shared_in_16_bits_from_ampere_on(
    capability: int, autocast: torch.dtype | None, dtype: torch.dtype, shares: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(major=capability))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda" and autocast is not None)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: autocast)
    query = cast(Tensor, SimpleNamespace(device=torch.device("cuda"), dtype=dtype))
    assert kernel_shares_heads(query) == shares and not kernel_shares_heads(query, masked=True)


def test_on_a_cpu_heads_are_always_shared() -> None:
    assert kernel_shares_heads(torch.zeros(1))


@pytest.mark.parametrize("shares", [True, False])
def test_keys_are_expanded_where_no_fused_kernel_shares_them(shares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int, bool]] = []
    attend = functional.scaled_dot_product_attention

    def noted(query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
        asked.append((query.shape[1], key.shape[1], value.shape[1], more["enable_gqa"]))
        return attend(query, key, value, **more)

    torch.manual_seed(0)
    attention, x = Attention(CONFIG), torch.randn(2, LENGTH, 32)
    angles = rotary_tables(CONFIG, LENGTH, x.device, x.dtype)
    expected = attention(x, *angles)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", noted)
    monkeypatch.setattr(transformer, "kernel_shares_heads", lambda query, masked: shares)
    assert torch.allclose(attention(x, *angles), expected, atol=1e-6)
    assert asked == [(4, 2, 2, True) if shares else (4, 4, 4, False)]


def test_what_is_asked_of_the_device_is_a_constant_to_the_compiler() -> None:
    """Otherwise a compiled pass would be cut in two in every block."""
    asked = {torch.is_autocast_enabled, torch.get_autocast_dtype, torch.cuda.get_device_properties}
    assert asked <= set(constant_fold_functions)
