"""A model that starts from a base computes the same logits as transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.bases import SIGNATURE, make_base, some_tokens, theirs

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
BASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama in parts, tied": {"tie_word_embeddings": True, "max_shard_size": "20KB"},
    "llama with scaled positions and biases": {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True},
    "mistral in bf16, in parts": {"family": "mistral", "dtype": torch.bfloat16, "max_shard_size": "20KB"},
    "qwen2 in fp16": {"family": "qwen2", "dtype": torch.float16},
    "qwen2 tied in bf16": {"family": "qwen2", "tie_word_embeddings": True, "dtype": torch.bfloat16},
    "qwen3 in parts": {"family": "qwen3", "max_shard_size": "20KB"},
}


def logits(directory: Path) -> torch.Tensor:
    model = build_model(ModelConfig(base=str(directory)), SIGNATURE, seed=0).eval()
    with torch.no_grad():
        found: torch.Tensor = model(some_tokens())
    return found


@pytest.mark.parametrize("kind", BASES)
def test_logits_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", **BASES[kind])
    parts = len(list(base.glob("*.safetensors")))
    assert parts > 3 if "max_shard_size" in BASES[kind] else parts == 1
    expected = theirs(base, some_tokens())
    assert expected.std() > 0.5
    torch.testing.assert_close(logits(base), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_names_without_prefix_and_what_old_files_hold(tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", tie_word_embeddings=tied)
    expected = logits(base)
    file = base / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    tensors["layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    if tied:
        tensors["lm_head.weight"] = tensors["embed_tokens.weight"].clone()
    save_file(tensors, file)
    assert torch.equal(logits(base), expected)
