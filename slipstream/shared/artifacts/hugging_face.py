"""File names of models in Hugging Face's format."""

from __future__ import annotations

CONFIG = "config.json"
#: File with all weights, or the index that maps tensors to several files.
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
#: Files of peft's adapters.
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
#: Largest JSON file of a model that is read, in bytes; larger files are refused.
LONGEST_JSON = 64 << 20
