"""A decoder-only transformer with Hugging Face's names: Llama, Mistral, Qwen 2 and Qwen 3."""

from slipstream.models.transformer.config import TransformerConfig
from slipstream.models.transformer.network import Transformer

__all__ = ["Transformer", "TransformerConfig"]
