"""Small transformers with adapters that add something."""

import torch
from torch import Tensor, nn

from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.adapters.network import add_adapters, quantise_frozen
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.transformer import Transformer

LENGTH, TOKENS = 16, 96
SIGNATURE = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=TOKENS)
#: Whole blocks of 64 at every layer's inputs; outputs that neither 2 nor 3 processes divide alike.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}
LORA = LoraConfig(rank=4, alpha=6.0)


def plain_network(**sizes: object) -> Transformer:
    """Without adapters, with weights that are drawn."""
    network = build_model(ModelConfig("transformer", {**SIZES, **sizes}), SIGNATURE, seed=1).network.eval()
    assert isinstance(network, Transformer)
    return network


def draw_adapters(network: nn.Module, seed: int = 2) -> None:
    """Give both factors of all adapters numbers that matter."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if is_adapter(name):
                parameter.normal_(0, 0.2, generator=generator)


def adapted_network(lora: LoraConfig = LORA, *, nf4: bool = False, **sizes: object) -> Transformer:
    network = plain_network(**sizes)
    add_adapters(network, lora)
    if nf4:
        quantise_frozen(network)
    draw_adapters(network)
    return network.eval()


def tokens(rows: int = 3) -> Tensor:
    return torch.randint(TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(rows))


def adapters_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in network.state_dict().items() if is_adapter(name)}
