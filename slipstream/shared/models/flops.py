"""FLOPs of a training pass of the built-in models, from the shapes of their layers.

Like torch's ``FlopCounterMode`` this counts matmuls, convolutions and attention: every matmul once in the forward pass,
once for the gradient of its weight if that is trained, and once for the gradient of its input if an earlier parameter
is trained. Attention counts the full square, although a causal kernel computes half of it (Chowdhery et al. 2022,
"PaLM", appendix B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.models import tables_and_images, transformer
from slipstream.shared.models.adapters.layers import LoraLinear
from slipstream.shared.models.tables_and_images import MLP, ResNet
from slipstream.shared.models.transformer import Transformer


def is_trained(*modules: nn.Module | None) -> bool:
    return any(p.requires_grad for module in modules if module is not None for p in module.parameters())


class RowFlops:
    """Sum of the FLOPs of a row's forward and backward pass.

    Every method adds a layer. ``follows`` is True if the layer's input depends on a trained parameter; the result is
    True if its output does.
    """

    def __init__(self) -> None:
        self.flops = 0

    def product(self, multiplications: int, follows: bool, trains: bool) -> bool:
        self.flops += 2 * multiplications * (1 + follows + trains)
        return follows or trains

    def linear(self, layer: nn.Module, positions: int, follows: bool) -> bool:
        """Add a linear layer, and its adapter if any, applied to ``positions`` vectors."""
        assert isinstance(layer, nn.Linear | LoraLinear)
        size = positions * layer.in_features * layer.out_features
        if isinstance(layer, nn.Linear):
            return self.product(size, follows, layer.weight.requires_grad) or is_trained(layer)
        self.product(size, follows, False)
        return self.linear(layer.lora_B, positions, self.linear(layer.lora_A, positions, follows))

    def convolution(self, layer: nn.Conv2d, image: tuple[int, int], follows: bool) -> tuple[tuple[int, int], bool]:
        """Add a convolution with "same" padding, and return the size of its output, too."""
        height, width = (-(-size // stride) for size, stride in zip(image, layer.stride, strict=True))
        return (height, width), self.product(height * width * layer.weight.numel(), follows, is_trained(layer))

    def attention(self, length: int, width: int, follows: bool) -> bool:
        """Add attention of all heads, with ``width`` numbers per token in total.

        Its two matmuls have no weights; the backward pass computes gradients of both inputs.
        """
        self.flops += 4 * length * length * width * (3 if follows else 1)
        return follows


def transformer_flops(model: Transformer, _: Signature) -> int:
    passes, decoder, length = RowFlops(), model.model, model.length
    follows = is_trained(decoder.embed_tokens)
    for block in decoder.layers.values():
        assert isinstance(block, transformer.DecoderBlock)
        attention, mlp = block.self_attn, block.mlp
        normed = follows or is_trained(block.input_layernorm)
        projections = (
            (attention.q_proj, attention.q_norm),
            (attention.k_proj, attention.k_norm),
            (attention.v_proj, None),
        )
        heads = [passes.linear(layer, length, normed) or is_trained(norm) for layer, norm in projections]
        mixed = passes.attention(length, attention.q_proj.out_features, any(heads))
        follows = passes.linear(attention.o_proj, length, mixed) or follows
        normed = follows or is_trained(block.post_attention_layernorm)
        gated = [passes.linear(layer, length, normed) for layer in (mlp.gate_proj, mlp.up_proj)]
        follows = passes.linear(mlp.down_proj, length, any(gated)) or follows
    follows = follows or is_trained(decoder.norm)
    output = decoder.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    assert output is not None
    passes.product(length * model.config.vocab_size * model.config.hidden_size, follows, is_trained(output))
    return passes.flops


def add_layers(passes: RowFlops, layers: Iterable[nn.Module], follows: bool) -> bool:
    """Add the linear layers among ``layers``, which are applied in sequence to one vector."""
    for layer in layers:
        is_linear = isinstance(layer, nn.Linear | LoraLinear)
        follows = passes.linear(layer, 1, follows) if is_linear else follows or is_trained(layer)
    return follows


def mlp_flops(model: MLP, _: Signature) -> int:
    passes = RowFlops()
    follows = is_trained(model.embeddings, model.bag)
    if periodic := model.periodic:
        waves = periodic.frequencies.requires_grad
        mixed = passes.product(periodic.weight.numel(), waves, periodic.weight.requires_grad)
        follows = mixed or periodic.bias.requires_grad or follows
    add_layers(passes, [*model.layers, model.head], follows)
    return passes.flops


def resnet_flops(model: ResNet, signature: Signature) -> int:
    passes = RowFlops()
    _, height, width = signature.inputs[0].shape
    image, follows = passes.convolution(model.stem, (height, width), False)
    follows = follows or is_trained(model.norm)
    for block in model.blocks:
        assert isinstance(block, tables_and_images.ResidualBlock)
        smaller, first = passes.convolution(block.conv1, image, follows)
        _, second = passes.convolution(block.conv2, smaller, first or is_trained(block.norm1))
        if isinstance(block.shortcut, nn.Conv2d):
            _, follows = passes.convolution(block.shortcut, image, follows)
        image, follows = smaller, follows or second or is_trained(block.norm2)
    add_layers(passes, [model.head], follows)
    return passes.flops


FORMULAS: Mapping[type[nn.Module], Callable[[Any, Signature], int]] = {
    Transformer: transformer_flops,
    MLP: mlp_flops,
    ResNet: resnet_flops,
}


def training_flops(network: nn.Module, signature: Signature) -> int | None:
    """Return the FLOPs of a row's forward and backward pass through an undivided model; None unless it is built in."""
    # A subclass may compute something else.
    formula = FORMULAS.get(type(network))
    return formula(network, signature) if formula else None
