"""Tiny bases to fine-tune, as transformers writes them, with a tokenizer."""

from pathlib import Path
from typing import Any

import torch
import transformers

from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.language.chat_template import OWN_TEMPLATE
from slipstream.shared.language.tokenizer import TEMPLATE, bytes_tokenizer
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.base.shape import shaped_for, with_base_shape
from slipstream.shared.models.config import ModelConfig

#: More ids than the tokenizer has, as bases have that are padded to a multiple.
VOCABULARY = 272
LENGTH = 24
SIGNATURE = Signature((TensorSpec("tokens", "int64", (LENGTH,)),), "next token", "next token", buckets=VOCABULARY)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "sliding_window": None,
}


def random_network(family: str = "llama", **changes: Any) -> Any:
    """transformers' network with random weights; biases and normalisations, too, since ones and zeros hide errors."""
    settings = {**SIZES, **({"head_dim": 16} if family == "qwen3" else {}), **changes}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(family, **settings))
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return network.float().eval()


def make_base(
    directory: Path,
    family: str = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Write a base of a ``family`` and, if ``tokenizer``, a tokenizer of the bytes.

    ``changes`` are other settings of its config.json. Its files have at most ``max_shard_size`` (such as "20KB").
    """
    limit = {"max_shard_size": max_shard_size} if max_shard_size else {}
    random_network(family, **changes).to(dtype).save_pretrained(directory, **limit)
    if tokenizer:
        write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    """Write a tokenizer of the bytes, with a chat template."""
    directory.mkdir(exist_ok=True)
    for name, content in {**bytes_tokenizer(turns=True), TEMPLATE: OWN_TEMPLATE}.items():
        (directory / name).write_text(content, encoding="utf-8")


def theirs(directory: Path, tokens: torch.Tensor) -> torch.Tensor:
    """The logits of transformers, computed in float32, for tokens ``[batch, length]``."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits
    return logits


def some_tokens(rows: int = 3, length: int = LENGTH, vocabulary: int = VOCABULARY) -> torch.Tensor:
    """Random ids, int64 ``[rows, length]``."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def shaped_by_length(model: ModelConfig, length: int = LENGTH) -> ModelConfig:
    return with_base_shape(model, length, ModelOrigin(model))


def shaped_by_data(model: ModelConfig, signature: Signature = SIGNATURE) -> ModelConfig:
    return shaped_for(model, signature, ModelOrigin(model))


def fingerprint_base(address: str) -> str:
    return ModelOrigin(ModelConfig(base=address)).base_digest
