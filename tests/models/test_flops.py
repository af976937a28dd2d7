"""FLOPs of the built-in models from their shapes equal those that torch's counter counts."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.pipeline.train.loop.probe import flop_counter, probe_model, training_flops
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.adapters.network import add_adapters, quantise_frozen
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import Predictor, build_model, zero_inputs
from slipstream.shared.models.tables_and_images import MLP
from tests.support.proving import diagonal, first_few

CPU = torch.device("cpu")
LENGTH = 16
TOKENS = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=40)
DOCUMENTS = Signature(
    (TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=40, document_end=0
)
NUMBERS = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
TABLE = Signature(
    (
        TensorSpec("numeric", "float32", (5,)),
        TensorSpec("categorical", "int32", (2,)),
        TensorSpec("tokens", "int32", (1, 7)),
    ),
    "regression",
    "y",
    cardinalities=(4, 9),
    buckets=50,
)
IMAGES = Signature(
    (TensorSpec("image", "uint8", (3, 13, 10)),),
    "classification",
    "y",
    ("a", "b"),
    image_mean=(1.0, 2.0, 3.0),
    image_std=(1.0, 1.0, 1.0),
)
SIZES = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4}
SHARED = {**SIZES, "num_key_value_heads": 2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = [ATTENTION, ("q_proj", "v_proj"), ("o_proj",), ("down_proj",), (*ATTENTION, "up_proj", "gate_proj")]

CASES: dict[str, tuple[Signature, ModelConfig]] = {
    "transformer": (TOKENS, ModelConfig("transformer", SIZES)),
    "shared heads": (TOKENS, ModelConfig("transformer", SHARED)),
    "documents": (DOCUMENTS, ModelConfig("transformer", SHARED)),
    "tied, normalised heads": (
        TOKENS,
        ModelConfig("transformer", {**SHARED, "tie_word_embeddings": True, "model_type": "qwen3", "head_dim": 32}),
    ),
    "biases": (TOKENS, ModelConfig("transformer", {**SHARED, "attention_bias": True, "mlp_bias": True})),
    "numbers": (NUMBERS, ModelConfig("mlp", {"frequencies": 0, "hidden": [12, 7]})),
    "periodic": (NUMBERS, ModelConfig("mlp", {"hidden": [12], "dropout": 0.1})),
    "table": (TABLE, ModelConfig("mlp", {"hidden": [12, 7]})),
    "linear": (TABLE, ModelConfig("mlp", {"hidden": []})),
    "resnet": (IMAGES, ModelConfig("resnet", {"widths": [4, 8, 8], "depth": 2})),
    "batch norm": (IMAGES, ModelConfig("resnet", {"widths": [4], "norm": "batch"})),
}


def counted(model: Predictor) -> float:
    """Return the FLOPs of a row by torch's counter."""
    with flop_counter() as counter:
        model(*zero_inputs(model.signature, 2)).sum().backward()
    return counter.get_total_flops() / 2


def without_base(signature: Signature, arguments: dict[str, Any], targets: tuple[str, ...], quantise: str) -> Predictor:
    """Build a transformer with adapters whose frozen weights are random."""
    config = ModelConfig("transformer", arguments)
    model = build_model(config, signature, 0)
    add_adapters(model.network, LoraConfig.from_dict({"rank": 4, "targets": targets}))
    if quantise:
        quantise_frozen(model.network)
    return model


@pytest.mark.parametrize("case", CASES)
def test_formulas_equal_torchs_counter(case: str) -> None:
    signature, config = CASES[case]
    model = build_model(config, signature, 0)
    assert training_flops(model.network, signature) == counted(model) > 0


@pytest.mark.parametrize(
    ("quantise", "targets"),
    diagonal(
        ["", "nf4"],
        TARGETS,
    ),
)
def test_formulas_equal_torchs_counter_with_adapters(targets: tuple[str, ...], quantise: str) -> None:
    """Frozen weights get no gradients, nor do activations before the first adapter."""
    model = without_base(TOKENS, {**SHARED, "intermediate_size": 128}, targets, quantise)
    assert training_flops(model.network, TOKENS) == counted(model) > 0


@pytest.mark.parametrize("trained", first_few(["frequencies", "embed", "norm", "o_proj", "conv1"], 2))
def test_formulas_equal_torchs_counter_where_most_is_frozen(trained: str) -> None:
    for signature, config in CASES.values():
        model = build_model(config, signature, 0)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name or "head" in name or "model.norm" in name)
        assert training_flops(model.network, signature) == counted(model) > 0, config


def test_training_takes_the_formula_and_needs_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(CASES["shared heads"][1], TOKENS, 0)
    expected = counted(model)
    monkeypatch.setattr("slipstream.pipeline.train.loop.probe.sdpa_flop_count", None)
    assert probe_model(model, CPU).flops_per_row == expected


class Doubled(MLP):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs) + super().forward(*inputs)


def test_a_users_subclass_is_counted() -> None:
    model = Predictor(NUMBERS, Doubled(NUMBERS))
    assert training_flops(model.network, NUMBERS) is None
    assert probe_model(model, CPU).flops_per_row == counted(model) == 2 * counted(Predictor(NUMBERS, MLP(NUMBERS)))


class SharedHeads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 64)
        self.keys = nn.Linear(64, heads * 16)
        self.output = nn.Linear(64, 40)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key = (each.unflatten(-1, (-1, 16)).transpose(1, 2) for each in (x, self.keys(x)))
        mixed = functional.scaled_dot_product_attention(query, key, key, is_causal=True, enable_gqa=True)
        return self.output(mixed.transpose(1, 2).flatten(2))


def test_shared_heads_of_a_users_model_are_counted_repeated() -> None:
    whole, shared = (Predictor(TOKENS, SharedHeads(heads)) for heads in (4, 2))
    keys = 6 * LENGTH * 64 * 32
    assert probe_model(shared, CPU).flops_per_row == probe_model(whole, CPU).flops_per_row - keys
