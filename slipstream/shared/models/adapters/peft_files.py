"""Reader and writer of adapters in peft's files: ``adapter_config.json`` and ``adapter_model.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from slipstream.shared.artifacts.prepared.token_rows import ADAPTER, ADAPTER_CONFIG
from slipstream.shared.errors import UserError
from slipstream.shared.models.adapters.layers import is_adapter
from slipstream.shared.models.base.directory import START, BaseDirectory
from slipstream.shared.models.base.tensors import TYPES, OpenedBase, read_header
from slipstream.shared.models.config import LINEAR_LAYERS, LoraConfig
from slipstream.shared.settings import LARGEST

#: Prefix of tensor names in peft's files, because peft's model wraps the base twice.
PREFIX = "base_model.model."
#: Settings of peft that change an adapter's function or train other parameters; adapters with any are refused.
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
#: Supported values of ``init_lora_weights``. Other initialisations change the base's weights, so that an adapter does
#: not fit the original base.
BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")


@dataclass(frozen=True)
class NewAdapter:
    """Adapter to write.

    ``tensors`` have the network's names: ``….q_proj.lora_A.weight`` ``[rank, in]`` and ``….q_proj.lora_B.weight``
    ``[out, rank]``. ``base`` is the name or address of the base to write into the files.
    """

    lora: LoraConfig
    base: str
    tensors: Mapping[str, Tensor]


def peft_files(adapter: NewAdapter) -> dict[str, bytes]:
    """Return the contents of peft's files by name."""
    lora = adapter.lora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base,
        "r": lora.rank,
        # Some readers accept integers only.
        "lora_alpha": int(lora.alpha) if float(lora.alpha).is_integer() else lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted(lora.targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors = {f"{PREFIX}{name}": tensor.detach().contiguous() for name, tensor in adapter.tensors.items()}
    return {ADAPTER_CONFIG: json.dumps(config, indent=2).encode(), ADAPTER: save(tensors, metadata={"format": "pt"})}


@dataclass(frozen=True)
class StoredAdapter:
    """Opened adapter, whose tensors are read later.

    ``tensors`` have the network's names, as in :class:`NewAdapter`. Every process reads only the slices that it holds.
    """

    directory: BaseDirectory
    lora: LoraConfig
    tensors: OpenedBase

    def check(self, lora: LoraConfig, network: nn.Module) -> None:
        """Raise ``UserError`` unless the adapter matches the settings ``lora`` and the network exactly."""
        for name in ("rank", "alpha", "targets"):
            stated, asked = getattr(self.lora, name), getattr(lora, name)
            if stated != asked and (name != "targets" or set(stated) != set(asked)):
                raise UserError(
                    f"{self.directory.where(ADAPTER_CONFIG)}: its {name} is {stated}; expected {asked}, as in "
                    f"model.lora.{name}"
                )
        where, stored = self.directory.where(ADAPTER), self.tensors.tensors
        needed = {name: tuple(each.shape) for name, each in network.named_parameters() if is_adapter(name)}
        for name, shape in needed.items():
            if name not in stored:
                raise UserError(f"{where}: lacks the tensor {name}, which an adapter of this base has")
            if stored[name].shape != shape or stored[name].dtype not in TYPES:
                raise UserError(
                    f"{where}: {name} is {stored[name].dtype} {list(stored[name].shape)}; expected {list(shape)}, of "
                    f"{', '.join(TYPES)}"
                )
        odd = next((name for name in stored if name not in needed), None)
        if odd is not None:
            raise UserError(f"{where}: holds the tensor {odd!r:.200}, which no adapter of this base has")


def read_peft(directory: BaseDirectory) -> StoredAdapter:
    """Open the adapter in a listed directory, reading only settings and header.

    Raises ``UserError`` unless it is an undamaged, plain LoRA of linear layers of a transformer's blocks;
    ``StorageUnavailable``.
    """
    if ADAPTER not in directory.files:
        raise UserError(f"{directory.where(ADAPTER)}: is missing; {START.expected}")
    lora = lora_of(directory.json(ADAPTER_CONFIG), directory.where(ADAPTER_CONFIG))
    stored = {name.removeprefix(PREFIX): tensor for name, tensor in read_header(directory, ADAPTER).items()}
    return StoredAdapter(directory, lora, OpenedBase(directory, stored))


def lora_of(config: Mapping[str, Any], where: str) -> LoraConfig:
    """Convert peft's configuration, from the file ``where``.

    Raises ``UserError`` for unsupported settings.
    """

    def refused(name: str, expected: str) -> UserError:
        return UserError(f"{where}: {name}: {config.get(name)!r:.200} is not supported; expected {expected}")

    if config.get("peft_type") != "LORA":
        raise refused("peft_type", '"LORA"')
    if config.get("bias", "none") != "none":
        raise refused("bias", '"none"')
    if config.get("init_lora_weights", True) not in BEGINNINGS:
        raise refused("init_lora_weights", "a value that keeps the base's weights unchanged, such as true")
    if odd := next((name for name in FOREIGN if config.get(name)), None):
        raise refused(odd, "none, as in plain LoRA")
    targets, known = config.get("target_modules"), ", ".join(LINEAR_LAYERS)
    if not isinstance(targets, list) or not targets or not all(each in LINEAR_LAYERS for each in targets):
        raise refused("target_modules", f"a list of some of {known}")
    rank, alpha, dropout = config.get("r"), config.get("lora_alpha"), config.get("lora_dropout", 0.0)
    if type(rank) is not int or not 1 <= rank <= LARGEST:
        raise refused("r", "a positive integer")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not 0 < alpha <= LARGEST:
        raise refused("lora_alpha", f"a positive number, up to {LARGEST}")
    if not isinstance(dropout, int | float) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        raise refused("lora_dropout", "a number from 0 to below 1")
    return LoraConfig(rank, float(alpha), float(dropout), [layer for layer in LINEAR_LAYERS if layer in targets])
