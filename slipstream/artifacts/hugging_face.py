"""The names of a model's files as Hugging Face's libraries write them."""

from __future__ import annotations

CONFIG = "config.json"
#: Its weights in one file, or what says of parts which one each tensor is in.
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Of peft's adapters.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
#: The longest JSON that is read of a model, in bytes.
LONGEST_JSON = 64 << 20
