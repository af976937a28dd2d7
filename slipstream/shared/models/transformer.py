"""Decoder-only transformer with Hugging Face's parameter names (Llama, Mistral, Qwen 2 and Qwen 3).

Weights can be exchanged without conversion. Blocks have causal attention and gated feed-forward layers (Touvron et al.
2023, "LLaMA"), and rotary positions (Su et al. 2021, "RoFormer"), plain or with Llama 3's scaling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from pydantic import JsonValue
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn import functional

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.errors import UserError
from slipstream.shared.models.arithmetic import autocast_type
from slipstream.shared.models.plan import ParallelPlan, Style
from slipstream.shared.models.token_rows import attention_mask
from slipstream.shared.models.transformer_config import TransformerConfig, from_hugging_face

#: Flash attention supports heads of at most this size; its fused kernels take multiples of this number.
LARGEST_HEAD, ALIGNED = 256, 8


def rotary_frequencies(config: TransformerConfig, device: torch.device) -> Tensor:
    """Return the rotary frequencies in radians per token, float32 ``[head size / 2]``."""
    exponents = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=device) / config.head_size
    plain = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling.rope_type == "default":
        return plain
    # Long waves are stretched by the factor, short waves are not; in between the two are interpolated (Llama 3.1).
    waves = scaling.original_max_position_embeddings / (2 * math.pi / plain)
    mix = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    mix = mix.clamp(0, 1)
    return (1 - mix) * plain / scaling.factor + mix * plain


def rotary_tables(
    config: TransformerConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles at positions 0 to ``length``, each ``[length, 1, head size]``."""
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), rotary_frequencies(config, device))
    angles = torch.cat([angles, angles], dim=-1).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@lru_cache(maxsize=8)
def kept_tables(
    config: TransformerConfig, length: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cached :func:`rotary_tables`; they are held outside of modules, so that none is copied or saved."""
    with torch.inference_mode(False):  # Inference tensors could not be used in training later.
        return rotary_tables(config, length, device, dtype)


def tables_for(config: TransformerConfig, length: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotary tables for hidden states ``x``, from the cache unless the pass is traced.

    A traced pass computes fake tensors, which must not be cached.
    """
    traced = torch.compiler.is_compiling() or x.is_meta or is_fake(x)
    return (rotary_tables if traced else kept_tables)(config, length, x.device, x.dtype)


def rotate_heads(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each pair of numbers ``(i, i + size / 2)`` of the heads ``[batch, length, heads, size]`` by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat([-second, first], dim=-1) * sine


class RmsNorm(nn.RMSNorm):
    """Root mean square normalisation (Zhang and Sennrich 2019) that keeps the input's dtype.

    With a float32 weight autocast would return float32, and every following matmul would round it again.
    """

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(x.dtype)


def kernel_shares_heads(query: Tensor, *, masked: bool = False) -> bool:
    """Return True if a fused attention kernel supports fewer key and value heads than query heads."""
    if query.device.type != "cuda":
        return True
    # Only flash attention does, in 16 bits, from compute capability 8.0 on and without a mask
    # (``aten/native/transformers/cuda/sdp_utils.cpp``). The memory-efficient kernel does not, and the unfused kernel
    # stores the scores of all pairs of tokens.
    half = autocast_type(query) in (torch.float16, torch.bfloat16)
    return half and not masked and torch.cuda.get_device_properties().major >= 8


def attend_within(query: Tensor, key: Tensor, value: Tensor, documents: Tensor) -> Tensor:
    """Return causal attention within documents, ``[batch, length, heads, size]`` like the arguments.

    ``documents`` are their bounds in all tokens of the batch, int32 ``[documents + 1]``.
    """
    # The import takes seconds, and only GPUs have the kernel. It has no autocast rule.
    from torch.nn.attention.varlen import varlen_attn

    from slipstream.shared.machine.torch_versions import shared_heads

    attend: Callable[..., Any] = varlen_attn
    length, dtype = query.shape[1], autocast_type(query)
    rows = [x.to(dtype).flatten(0, 1) for x in (query, key, value)]
    more = {"window_size": (-1, 0), **shared_heads(attend)}
    mixed: Tensor = attend(*rows, documents, documents, length, length, **more)
    return mixed.unflatten(0, (-1, length))


class Attention(nn.Module):
    """Causal attention in which several query heads may share a key and value head (Ainslie et al. 2023, "GQA")."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        size = self.head_size = config.head_size
        queries, keys = config.num_attention_heads * size, config.key_value_heads * size
        self.q_proj = nn.Linear(config.hidden_size, queries, config.query_bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, config.query_bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, config.query_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, config.attention_bias)
        self.q_norm = RmsNorm(size, config.rms_norm_eps) if config.query_key_norm else nn.Identity()
        self.k_norm = RmsNorm(size, config.rms_norm_eps) if config.query_key_norm else nn.Identity()

    def forward(
        self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """Attend within ``documents`` or by ``mask``, else to all earlier positions.

        Input and output are ``[batch, length, hidden]``.
        """
        # The number of heads is left open: with tensor parallelism a device holds some of them.
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_size)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosine, sine = cosine[: query.shape[1]], sine[: query.shape[1]]
        query, key = rotate_heads(self.q_norm(query), cosine, sine), rotate_heads(self.k_norm(key), cosine, sine)
        if documents is not None:
            return self.o_proj(attend_within(query, key, value, documents).flatten(2))
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and not kernel_shares_heads(query, masked=mask is not None):
            key, value, shared = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1), 1
        mixed = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=shared > 1
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Gated feed-forward layer SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, config.mlp_bias)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderBlock(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.input_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, x: Tensor, cosine: Tensor, sine: Tensor, mask: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, mask, documents)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Transformer without its output layer; on a pipeline stage only the stage's modules remain."""

    embed_tokens: nn.Embedding
    norm: RmsNorm

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        # By name and not by position, so that the blocks of a stage keep their names.
        self.layers = nn.ModuleDict({str(number): DecoderBlock(config) for number in range(config.num_hidden_layers)})
        self.norm = RmsNorm(config.hidden_size, config.rms_norm_eps)


class TiedHead(nn.Module):
    """Output layer that is called with the embedding's weight, so that this parameter has only one name."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.linear(x, weight)


class Transformer(nn.Module):
    """Decoder-only language model.

    Takes tokens, int64 ``[batch, length]``; returns the logits of the next tokens, ``[batch, length, vocabulary]``. If
    the signature has a document end, tokens attend only within their document. ``config`` is the path of a Hugging Face
    ``config.json``; ``arguments`` are settings of :class:`TransformerConfig` and override it. A pipeline stage takes or
    returns hidden states instead, see :class:`.ParallelPlan`, and also takes the row's ``ids``. With the bounds of the
    batch's ``documents`` attention is computed without a mask.
    """

    def __init__(self, signature: Signature, config: str = "", **arguments: object) -> None:
        super().__init__()
        if signature.task != "next token":
            raise UserError(
                "model.name: transformer takes rows of tokens and predicts each next one; this data has "
                f"{', '.join(spec.name for spec in signature.inputs)} and asks for a {signature.task}"
            )
        self.length = signature.inputs[0].shape[0]
        stated = from_hugging_face(read_config(Path(config)), self.length) if config else {}
        sizes = {"vocab_size": signature.outputs, "max_position_embeddings": self.length}
        self.config = TransformerConfig.from_dict({**sizes, **stated, **arguments})
        self.check_sizes(signature)
        self.model = Decoder(self.config)
        tied = self.config.tie_word_embeddings
        head = TiedHead() if tied else nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)
        self.lm_head: nn.Module | None = head
        self.takes_tokens = True
        self.document_start, self.document_end = signature.document_start, signature.document_end

    def check_sizes(self, signature: Signature) -> None:
        if self.config.vocab_size != signature.outputs:
            raise self.config.reject("vocab_size", f"{signature.outputs}, the number of token ids of the data")
        if self.config.max_position_embeddings < self.length:
            raise self.config.reject(
                "max_position_embeddings", f"at least {self.length}, the length of the data's rows"
            )

    def forward(self, x: Tensor, ids: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        model = self.model
        if self.takes_tokens:
            ids = x
            x = model.embed_tokens(x)
            # The residual stream has the dtype of the matmuls, as with sharded weights.
            x = x.to(autocast_type(x))
        cosine, sine = tables_for(self.config, self.length, x)
        mask = None
        if documents is not None:
            documents = documents.flatten()
        elif self.document_start >= 0 and ids is not None:
            mask = attention_mask(ids, self.document_start)
        for block in model.layers.values():
            x = block(x, cosine, sine, mask, documents)
        if self.lm_head is None:
            return x
        x = model.norm(x)
        return self.lm_head(x, model.embed_tokens.weight) if self.config.tie_word_embeddings else self.lm_head(x)

    def initial_std(self, name: str) -> float | None:
        """Return the standard deviation of a parameter's initial values; None if it starts from ones.

        Weights into the residual stream are scaled as in GPT-2.
        """
        if name.endswith("bias"):
            return 0.0
        if "norm" in name:
            return None
        residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        return self.config.initializer_range / (math.sqrt(2 * self.config.num_hidden_layers) if residual else 1.0)

    def plan(self) -> ParallelPlan:
        config = self.config
        styles: dict[str, Style] = {"model.embed_tokens": "embedding", "model.norm": "norm", "lm_head": "head"}
        for number in self.model.layers:
            of_block: dict[str, Style] = {
                **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "norm"),
                **dict.fromkeys(("self_attn", "mlp"), "region"),
                **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "column"),
                **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "column"),
                **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "row"),
            }
            if config.query_key_norm:
                of_block |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "head norm")
            styles |= {f"model.layers.{number}.{name}": style for name, style in of_block.items()}
        present = dict(self.named_modules())
        return ParallelPlan(
            blocks=tuple(f"model.layers.{number}" for number in self.model.layers),
            tensor={name: style for name, style in styles.items() if name in present},
            divisible={
                "num_attention_heads": config.num_attention_heads,
                "num_key_value_heads": config.key_value_heads,
                "hidden_size": config.hidden_size,
                "intermediate_size": config.intermediate_size,
                "vocab_size": config.vocab_size,
            },
            sequence=self.length,
            hidden=(self.length, config.hidden_size),
            cut=self.cut,
            takes_ids=self.document_start >= 0,
            takes_documents=config.head_size % ALIGNED == 0 and config.head_size <= LARGEST_HEAD,
        )

    def cut(self, start: int, stop: int) -> None:
        """Remove all modules but the pipeline stage of blocks ``start`` to ``stop``.

        With tied embeddings the last stage keeps the embedding under its name, as the output layer's weight.
        """
        last = stop == self.config.num_hidden_layers
        for number in range(self.config.num_hidden_layers):
            if not start <= number < stop:
                del self.model.layers[str(number)]
        self.takes_tokens = start == 0
        if not self.takes_tokens and not (last and self.config.tie_word_embeddings):
            del self.model.embed_tokens
        if not last:
            del self.model.norm
            self.lm_head = None


def read_config(path: Path) -> dict[str, JsonValue]:
    """Return the contents of a ``config.json``; raises ``UserError`` if it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"model.arguments.config: {path} cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"model.arguments.config: {path}: expected a JSON object, as in Hugging Face's config.json")
    return data
