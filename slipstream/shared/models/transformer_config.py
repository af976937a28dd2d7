"""Shape of a transformer, under the names of Hugging Face's ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields
from typing import Annotated, Any, Literal

from pydantic import Field

from slipstream.shared.errors import UserError
from slipstream.shared.models.config import DEEPEST
from slipstream.shared.settings import LARGEST, Natural, Positive, Settings, settings

Family = Literal["llama", "mistral", "qwen2", "qwen3"]
ARCHITECTURES: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
#: Hugging Face's defaults for settings missing in config.json, where they differ from ours; "" is for all families.
OMITTED: dict[str, dict[str, Any]] = {"": {"rms_norm_eps": 1e-6}, "qwen3": {"head_dim": 128}}


@settings
class RopeScaling(Settings):
    """Scaling of the rotary frequencies for longer contexts."""

    section = "model.arguments.rope_scaling"

    rope_type: Literal["default", "llama3"] = "default"
    """Kind of scaling: "default" for none, "llama3" for that of Llama 3, by the other settings."""
    factor: Annotated[float, Field(ge=1)] = 8.0
    """Divisor of low frequencies."""
    original_max_position_embeddings: Positive = 8192
    """Context length in tokens for which the model was trained originally."""
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Waves longer than the original context length divided by low_freq_factor are scaled."""
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Waves shorter than the original context length divided by high_freq_factor stay unchanged; waves between both
    limits are scaled partly."""

    def check(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise self.reject("high_freq_factor", f"more than low_freq_factor, {self.low_freq_factor:g}")


@settings
class TransformerConfig(Settings):
    """Shape of a decoder-only transformer: ``model.arguments`` if ``model.name`` is transformer."""

    section = "model.arguments"

    vocab_size: Annotated[int, Field(ge=2, le=LARGEST)]
    """Number of token ids."""
    model_type: Family = "llama"
    """Model family: "qwen2" adds biases to queries, keys and values, "qwen3" normalises queries and keys."""
    hidden_size: Positive = 256
    """Width of the hidden states."""
    intermediate_size: Positive = 688
    """Width of the feed-forward layers."""
    num_hidden_layers: Annotated[int, Field(ge=1, le=DEEPEST)] = 4
    """Number of blocks."""
    num_attention_heads: Positive = 8
    """Number of query heads."""
    num_key_value_heads: Natural = 0
    """Number of key and value heads; 0 means one per query head."""
    head_dim: Natural = 0
    """Size of a head; 0 means hidden_size / num_attention_heads."""
    max_position_embeddings: Positive = 2048
    """Maximum number of tokens in a row."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Constant added to the mean square in normalisations."""
    rope_theta: Annotated[float, Field(gt=0)] = 10_000.0
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Scaling of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Use the embedding as the weight of the output layer."""
    attention_bias: bool = False
    """Add biases to the linear layers of the attention ("llama" and "qwen3" only)."""
    mlp_bias: bool = False
    """Add biases to the feed-forward layers ("llama" only)."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of the initial weights."""

    def check(self) -> None:
        if not self.head_dim and self.hidden_size % self.num_attention_heads:
            raise self.reject("num_attention_heads", f"a divisor of hidden_size, {self.hidden_size}, or set head_dim")
        if self.head_size % 2:
            raise self.reject("head_dim", "an even number, as rotary positions turn pairs of numbers")
        if self.num_attention_heads % self.key_value_heads:
            raise self.reject("num_key_value_heads", f"a divisor of num_attention_heads, {self.num_attention_heads}")
        if self.attention_bias and self.model_type not in ("llama", "qwen3"):
            raise self.reject("attention_bias", f'false: "{self.model_type}" has no such setting')
        if self.mlp_bias and self.model_type != "llama":
            raise self.reject("mlp_bias", f'false: "{self.model_type}" has no such setting')

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def query_bias(self) -> bool:
        """True if the projections to queries, keys and values have biases."""
        return self.attention_bias or self.model_type == "qwen2"

    @property
    def query_key_norm(self) -> bool:
        """True if queries and keys are normalised per head."""
        return self.model_type == "qwen3"


def from_hugging_face(data: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Convert a ``config.json`` to :class:`TransformerConfig` arguments, for rows of ``length`` tokens.

    Reads the layouts of transformers 4 (``rope_theta``, ``rope_scaling``) and 5 (``rope_parameters``). Raises
    ``UserError`` for unsupported models: another family or activation, other rotary scaling, attention over a window
    shorter than a row.
    """
    data = {**OMITTED[""], **OMITTED.get(str(data.get("model_type")), {}), **data}
    rope = dict(data.pop("rope_parameters", None) or {})
    data["rope_theta"] = rope.pop("rope_theta", data.get("rope_theta"))
    scaling = dict(data.get("rope_scaling") or rope)
    kind = scaling.pop("rope_type", scaling.pop("type", "default"))
    refusals = {
        "model_type": data.get("model_type") not in ARCHITECTURES,
        "hidden_act": data.get("hidden_act", "silu") != "silu",
        "rope_scaling": kind not in ("default", "llama3"),
        "sliding_window": data.get("use_sliding_window", True) and 0 < (data.get("sliding_window") or 0) < length,
    }
    expected = {
        "model_type": f"one of {', '.join(ARCHITECTURES)}",
        "hidden_act": '"silu"',
        "rope_scaling": 'none, or rope_type "llama3"',
        "sliding_window": f"null or at least the row's length, {length}: attention over a window is not supported",
    }
    for name, refused in refusals.items():
        if refused:
            given = kind if name == "rope_scaling" else data.get(name)
            raise UserError(f"config.json: {name}: {given!r} is not allowed; expected {expected[name]}")
    data["rope_scaling"] = {"rope_type": kind, **scaling} if kind == "llama3" else {}
    settings_names = {one.name for one in fields(TransformerConfig)}
    return {name: value for name, value in data.items() if name in settings_names and value is not None}


def to_hugging_face(config: TransformerConfig) -> dict[str, Any]:
    """Return the contents of ``config.json``, in a layout that transformers 4 and 5 read."""
    scaling = config.rope_scaling
    data = {one.name: getattr(config, one.name) for one in fields(config)}
    data |= {
        "architectures": [ARCHITECTURES[config.model_type]],
        "head_dim": config.head_size,
        "num_key_value_heads": config.key_value_heads,
        "rope_scaling": vars(scaling) if scaling.rope_type != "default" else None,
        "hidden_act": "silu",
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "torch_dtype": "float32",
    }
    return data
