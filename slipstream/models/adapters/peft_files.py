"""Adapters as peft's files: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from slipstream.errors import UserError
from slipstream.models.adapters.layers import DOWN, UP, is_adapter
from slipstream.models.config import LINEAR_LAYERS, LoraConfig

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
#: Before the base's names: of peft's model, which holds its own, which holds the base.
PREFIX = "base_model.model."
#: What changes what an adapter computes, or trains other things beside it, and has to be absent.
FOREIGN = (
    "alora_invocation_tokens",
    "alpha_pattern",
    "arrow_config",
    "exclude_modules",
    "fan_in_fan_out",
    "kasa_config",
    "layer_replication",
    "layers_pattern",
    "layers_to_transform",
    "lora_bias",
    "megatron_config",
    "modules_to_save",
    "monteclora_config",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
    "use_rslora",
    "velora_config",
)
#: Beginnings that leave the base's weights as they are; others change them, and the adapter fits to what they became.
BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class Adapter:
    """``tensors`` have the names that they have in the network: ``….q_proj.lora_A.weight`` ``[rank, in]`` and
    ``….q_proj.lora_B.weight`` ``[out, rank]``. ``base`` is what the adapter says it is for."""

    lora: LoraConfig
    base: str
    tensors: Mapping[str, Tensor]


def peft_files(adapter: Adapter) -> dict[str, bytes]:
    """The contents of peft's files, by name."""
    lora = adapter.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {f"{PREFIX}{name}": tensor.detach().contiguous() for name, tensor in adapter.tensors.items()}
    return {CONFIG: json.dumps(config, indent=2).encode(), WEIGHTS: save(tensors, metadata={"format": "pt"})}


def read_peft(directory: Path) -> Adapter:
    """The adapter in peft's files. Raises ``UserError`` for one that is no plain LoRA of linear layers of a
    transformer's blocks, or whose tensors are not those that its configuration asks for."""
    path = directory / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{path}: expected a JSON object, as peft writes it")
    lora = lora_of(config, path)
    try:
        stored = load((directory / WEIGHTS).read_bytes())
    except (OSError, SafetensorError) as error:
        raise UserError(f"{directory / WEIGHTS}: cannot be read as safetensors: {error}") from None
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items()}
    check_tensors(tensors, lora, directory / WEIGHTS)
    return Adapter(lora, config.get("base_model_name_or_path") or "", tensors)


def lora_of(config: Mapping[str, Any], path: Path) -> LoraConfig:
    """The settings that peft's configuration states. Raises ``UserError``, which names ``path``, for what is not built
    here."""

    def refused(name: str, expected: str) -> UserError:
        return UserError(f"{path}: {name}: {config.get(name)!r} is not built here; expected {expected}")

    if config.get("peft_type") != "LORA":
        raise refused("peft_type", '"LORA"')
    if config.get("bias", "none") != "none":
        raise refused("bias", '"none"')
    if config.get("init_lora_weights", True) not in BEGINNINGS:
        raise refused("init_lora_weights", "one that leaves the base's weights as they are, such as true")
    if odd := next((name for name in FOREIGN if config.get(name)), None):
        raise refused(odd, "none, as in plain LoRA")
    targets, known = config.get("target_modules"), ", ".join(LINEAR_LAYERS)
    if not isinstance(targets, list) or not targets or not set(targets) <= set(LINEAR_LAYERS):
        raise refused("target_modules", f"a list of some of {known}")
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if not isinstance(rank, int) or rank < 1:
        raise refused("r", "a positive integer")
    if not isinstance(alpha, int | float):
        raise refused("lora_alpha", "a number")
    return LoraConfig(rank, alpha, dropout, [layer for layer in LINEAR_LAYERS if layer in targets])


def check_tensors(tensors: Mapping[str, Tensor], lora: LoraConfig, path: Path) -> None:
    """Raise ``UserError`` unless these are pairs of factors of that rank, of every target and of nothing else."""
    expected = f"pairs of {DOWN[1:]} [rank, in] and {UP[1:]} [out, rank], of rank {lora.rank}"
    for name, tensor in tensors.items():
        layer, _, _ = name.rpartition(".lora_")
        rank = tensor.shape[0 if name.endswith(DOWN) else 1] if tensor.ndim == 2 else 0
        both = {layer + DOWN, layer + UP} <= tensors.keys()
        if not is_adapter(name) or layer.rpartition(".")[2] not in lora.targets or rank != lora.rank or not both:
            raise UserError(f"{path}: {name!r} {list(tensor.shape)}: expected {expected}")
    layers = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
    if missing := next((target for target in lora.targets if target not in layers), None):
        raise UserError(f"{path}: has no tensors of {missing}; expected {expected}, of each target")
