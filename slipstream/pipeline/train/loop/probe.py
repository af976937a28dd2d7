"""Probe of a model by one training pass, before training starts, and its FLOPs per row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from slipstream.pipeline.train.checkpoint.state import capture_random_state, restore_random_state
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.distributed.user_errors import ErrorMeaning, error_meaning, torch_user_error
from slipstream.shared.errors import UserError
from slipstream.shared.models import tables_and_images, transformer
from slipstream.shared.models.adapters.layers import LoraLinear
from slipstream.shared.models.adapters.network import numbers_in, numbers_trained
from slipstream.shared.models.factory import Predictor, zero_inputs
from slipstream.shared.models.tables_and_images import MLP, ResNet
from slipstream.shared.models.transformer import Transformer

#: Attention kernels with a FLOP formula here: torch's counter omits the CPU kernel, and counts the recomputation in the
#: backward passes of the others.
ATTENTION = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
#: Number of rows of the probe: batch normalisation needs two for a variance.
ROWS = 2


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: object, **__: object) -> int:
    """Return the FLOPs of attention from tensor shapes, with key and value heads repeated to match the query.

    torch 2.11 cannot count shared heads.
    """
    heads = query[1]
    return sdpa_flop_count(query, (key[0], heads, *key[2:]), (value[0], heads, *value[2:]))


def attention_backward_flops(_: object, *arguments: Sequence[int], **__: object) -> int:
    return 2 * attention_flops(*arguments[:3])


def flop_counter() -> FlopCounterMode:
    """Return a context that counts the FLOPs of matmuls, convolutions and attention.

    ``get_total_flops()`` returns the sum.
    """
    kernels = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in ATTENTION}
    backwards = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in ATTENTION}
    formulas: dict[object, Callable[..., int]] = dict.fromkeys(kernels.values(), attention_flops) | dict.fromkeys(
        backwards.values(), attention_backward_flops
    )
    return FlopCounterMode(display=False, custom_mapping=formulas)


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model that decide how it is trained."""

    #: Names of trained parameters that receive no gradient.
    unused: tuple[str, ...] = ()
    #: Names of all buffers of modules that change a buffer in a forward pass, such as running statistics.
    changing: tuple[str, ...] = ()
    #: True if the rows of a micro-batch influence each other, as in batch normalisation; then no row may be padding.
    has_batch_statistics: bool = False
    #: Floating-point operations of forward and backward pass per row, from the shapes of a built-in model
    #: (:mod:`slipstream.pipeline.train.loop.probe`), else by :func:`flop_counter`.
    flops_per_row: float = 0.0
    #: Number of elements in all parameters; shared parameters count once.
    parameters: int = 0
    #: Number of elements in trained parameters.
    trained: int = 0


def probe_model(model: Predictor, device: torch.device) -> ModelTraits:
    """Run one forward and backward pass on zeros in training mode, and restore the model.

    Raises ``UserError`` if the model fails.
    """
    with unchanged_after(model):
        before = {name: (buffer._version, buffer.clone()) for name, buffer in model.named_buffers()}
        counter, flops = flop_counter(), training_flops(model.network, model.signature)
        try:
            with counter if flops is None else nullcontext():
                model(*zero_inputs(model.signature, ROWS, device)).sum().backward()
        except Exception as error:
            if error_meaning(error) is ErrorMeaning.BROKEN:
                raise
            raise torch_user_error(error) or UserError(
                f"model.name: cannot be trained on this data: {type(error).__name__}: {error}; it was given {ROWS} rows"
            ) from error
        unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        # The version counter misses batch normalisation's mean, and zeros need not change its value.
        changed = {
            name.rpartition(".")[0]
            for name, buffer in model.named_buffers()
            if buffer._version != before[name][0] or not torch.equal(buffer, before[name][1])
        }
        changing = [name for name, _ in model.named_buffers() if name.rpartition(".")[0] in changed]
    normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
    has_batch_statistics = bool(changing) or normalised
    return ModelTraits(
        tuple(unused),
        tuple(changing),
        has_batch_statistics,
        flops_per_row=counter.get_total_flops() / ROWS if flops is None else float(flops),
        parameters=numbers_in(model),
        trained=numbers_trained(model),
    )


@contextmanager
def unchanged_after(model: Predictor) -> Iterator[None]:
    """Restore random generators and the model's buffers after the block, and clear its gradients."""
    random = capture_random_state()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        yield
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(buffers[name])
        restore_random_state(random)


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """Switch batch normalisation to its running statistics, because one row has no variance."""
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for layer in layers:
        layer.train(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.train(True)


# Like torch's ``FlopCounterMode`` this counts matmuls, convolutions and attention: every matmul once in the forward
# pass, once for the gradient of its weight if that is trained, and once for the gradient of its input if an earlier
# parameter is trained. Attention counts the full square, although a causal kernel computes half of it (Chowdhery et al.
# 2022, "PaLM", appendix B).
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
