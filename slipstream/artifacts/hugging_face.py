"""Names of a model's files as Hugging Face's libraries write them."""

from __future__ import annotations

CONFIG = "config.json"
#: The weights in one file, or the index that maps tensors to files.
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files of peft's adapters.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
#: Largest JSON file of a model that is read, in bytes.
LONGEST_JSON = 64 << 20
