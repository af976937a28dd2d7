"""Networks with adapters: trained parameters, results, and merged weights."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import LoraLinear, is_adapter
from slipstream.shared.models.adapters.network import (
    add_adapters,
    layers_with_adapters,
    merge_adapters,
    merged_tensors,
    numbers_in,
    numbers_trained,
    plain_shapes,
    quantise_frozen,
)
from slipstream.shared.models.adapters.nf4 import dequantise_weight
from slipstream.shared.models.config import LINEAR_LAYERS, LoraConfig
from tests.support.adapters import LORA, adapted_network, draw_adapters, plain_network, tokens
from tests.support.wording import refuses

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2, tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3"},
}
each_family = pytest.mark.parametrize("sizes", FAMILIES.values(), ids=FAMILIES)


@each_family
def test_only_adapters_are_trained_and_have_pefts_names(sizes: dict[str, Any]) -> None:
    network, plain = adapted_network(**sizes), plain_network(**sizes)
    trained = {name: tuple(p.shape) for name, p in network.named_parameters() if p.requires_grad}
    expected = dict[str, tuple[int, ...]]()
    for name, module in plain.named_modules():
        if name.rpartition(".")[2] in LINEAR_LAYERS:
            assert isinstance(module, torch.nn.Linear)
            expected[f"{name}.lora_A.weight"] = LORA.rank, module.in_features
            expected[f"{name}.lora_B.weight"] = module.out_features, LORA.rank
    assert trained == expected and all(map(is_adapter, trained))
    frozen = {name: p for name, p in network.named_parameters() if name not in trained}
    assert frozen.keys() == dict(plain.named_parameters()).keys()
    assert numbers_trained(network) == sum(torch.Size(size).numel() for size in expected.values())


def test_targets_are_the_layers_that_get_one() -> None:
    network = adapted_network(LoraConfig(2, targets=["q_proj", "down_proj"]))
    layers = [name for name, module in network.named_modules() if isinstance(module, LoraLinear)]
    assert layers == [f"model.layers.{n}.{name}" for n in range(2) for name in ("self_attn.q_proj", "mlp.down_proj")]


def test_a_target_that_is_no_layer_is_refused() -> None:
    network: Any = plain_network()
    for block in network.model.layers.values():
        block.self_attn.o_proj = torch.nn.Identity()
    with refuses(UserError, match=r"model\.lora\.targets:"):
        add_adapters(network, LORA)


def test_rows_that_are_no_whole_blocks_are_refused_in_four_bits() -> None:
    network = plain_network(intermediate_size=200)
    add_adapters(network, LORA)
    with refuses(UserError):
        quantise_frozen(network)


@each_family
def test_an_adapter_that_was_not_trained_adds_nothing(sizes: dict[str, Any]) -> None:
    network = plain_network(**sizes)
    before = network(tokens())
    add_adapters(network, LORA)
    for name, parameter in network.named_parameters():
        if name.endswith("lora_B.weight"):
            torch.nn.init.zeros_(parameter)
    assert torch.equal(network(tokens()), before)


@pytest.mark.parametrize("nf4", [False, True], ids=["plain", "nf4"])
@each_family
def test_merged_weights_give_the_same_logits(sizes: dict[str, Any], nf4: bool) -> None:
    network = adapted_network(nf4=nf4, **sizes)
    logits, shapes = network(tokens()), dict(plain_shapes(network))
    tensors = dict(merged_tensors(network))
    plain = plain_network(**sizes)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert (plain(tokens()) - logits).abs().max() > 0.1
    plain.load_state_dict(tensors)
    assert (plain(tokens()) - logits).abs().max() < 1e-5
    merge_adapters(network)
    assert not [module for module in network.modules() if isinstance(module, LoraLinear)]
    assert torch.equal(network(tokens()), plain(tokens()))
    assert list(network.state_dict()) == list(plain.state_dict()) and network.state_dict().keys() == shapes.keys()


def test_merged_weights_come_one_at_a_time() -> None:
    network = adapted_network(nf4=True)
    made, most = list[weakref.ref[Tensor]](), 0
    for name, tensor in merged_tensors(network):
        if name.endswith("_proj.weight"):
            made.append(weakref.ref(tensor))
        del tensor
        most = max(most, sum(one() is not None for one in made))
    assert len(made) == 14 and most <= 1


def test_numbers_in_four_bits_count_as_such() -> None:
    assert numbers_in(adapted_network(nf4=True)) == numbers_in(adapted_network()) > numbers_in(plain_network())


def test_four_bits_hold_only_the_layers_with_adapters() -> None:
    network = adapted_network(LoraConfig(2, targets=["q_proj"]), nf4=True)
    types = {name: p.dtype for name, p in network.named_parameters() if "layers.0" in name}
    q = "model.layers.0.self_attn.q_proj"
    assert types.pop(f"{q}.codes") is torch.uint8 and types.pop(f"{q}.scales") is torch.int32
    assert set(types.values()) == {torch.float32}


def test_gradients_beside_four_bits_are_those_beside_the_dequantised_weights() -> None:
    quantised, plain = adapted_network(nf4=True), adapted_network()
    weights = dict(layers_with_adapters(plain))
    for name, layer in layers_with_adapters(quantised):
        weights[name].weight.data = dequantise_weight(layer.codes, layer.scales, torch.float32)
    for network in (quantised, plain):
        network(tokens()).square().mean().backward()
    for name, parameter in plain.named_parameters():
        found = quantised.get_parameter(name).grad if is_adapter(name) else None
        assert (found is None) == (parameter.grad is None) == (not is_adapter(name))
        if found is not None and parameter.grad is not None:
            torch.testing.assert_close(found, parameter.grad, rtol=1e-5, atol=1e-7)


def test_autocast_leaves_four_bits_alone() -> None:
    network = adapted_network(nf4=True)
    with torch.autocast("cpu", torch.bfloat16):
        rough = network(tokens())
    assert (rough.float() - network(tokens())).abs().max() < 0.2
    rough.float().sum().backward()
    assert all(p.grad.dtype is torch.float32 for p in network.parameters() if p.requires_grad and p.grad is not None)


def test_dropout_leaves_out_inputs_of_adapters_alone() -> None:
    network: Any = plain_network()
    layer = LoraLinear(network.model.layers["0"].mlp.up_proj, LoraConfig(4, dropout=0.5))
    draw_adapters(torch.nn.ModuleDict({"layer": layer}))
    x, sums = torch.randn(1, 64), torch.zeros(192)
    layer.train()
    torch.manual_seed(0)
    first = layer(x)
    for _ in range(2000):
        sums += layer(x).detach()[0]
    torch.manual_seed(0)
    assert torch.equal(layer(x), first)
    layer.eval()
    assert not torch.equal(first, layer(x))
    assert (sums / 2000 - layer(x)[0]).abs().max() < 0.15 * layer(x).abs().max()
