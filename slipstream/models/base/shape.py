"""The shape of a base: the arguments of our transformer that its ``config.json`` states."""

from __future__ import annotations

from dataclasses import fields, replace

from slipstream.artifacts.prepared.data import Signature
from slipstream.errors import UserError
from slipstream.models.base.directory import CONFIG, BaseDirectory
from slipstream.models.config import ModelConfig
from slipstream.models.transformer_config import TransformerConfig, from_hugging_face
from slipstream.settings import to_dict

#: What has no default that would be right for a base.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
EVERY = frozenset(one.name for one in fields(TransformerConfig))


def with_base_shape(config: ModelConfig, length: int) -> ModelConfig:
    """The configuration with all arguments of the transformer that it fine-tunes on rows of ``length`` tokens: the
    user's own, and for the others those of the base. One without a base, or that has them all, is returned as it is,
    and nothing is read. Raises ``UserError`` for a base that the transformer cannot be, or with fewer positions than a
    row, ``StorageUnavailable``."""
    if not config.base or config.arguments.keys() >= EVERY:
        return config
    if "config" in config.arguments:
        raise UserError("model.arguments.config: none expected beside model.base, which has a config.json of its own")
    directory = BaseDirectory.list(config.base)
    where, stated = directory.where(CONFIG), directory.json(CONFIG)
    try:
        stated = from_hugging_face(stated, length)
    except UserError as error:
        raise UserError(f"model.base: {config.base}: {error.message}") from None
    if missing := next((name for name in SIZES if name not in stated), ""):
        raise UserError(f"{where}: states no {missing}; expected Hugging Face's config.json of this model")
    shape = TransformerConfig.from_dict({"max_position_embeddings": length, **stated, **config.arguments})
    if shape.max_position_embeddings < length:
        raise UserError(
            f"{where}: has positions for {shape.max_position_embeddings} tokens, and a row has {length}; expected a "
            "smaller data.length, or more in model.arguments.max_position_embeddings"
        )
    return replace(config, name="transformer", arguments=to_dict(shape))


def shaped_for(config: ModelConfig, signature: Signature) -> ModelConfig:
    """:func:`with_base_shape` for data of this signature. Raises ``UserError`` also for data that is no rows of tokens,
    or has other token ids."""
    if not config.base:
        return config
    if signature.task != "next token":
        raise UserError(
            f"model.base: {config.base} predicts tokens, and this data has "
            f"{', '.join(spec.name for spec in signature.inputs)} and asks for a {signature.task}; expected none, or "
            "data.task language"
        )
    shaped = with_base_shape(config, signature.inputs[0].shape[0])
    known = shaped.arguments["vocab_size"]
    if known != signature.outputs:
        raise UserError(
            f"model.base: {config.base} has {known} token ids, and this data {signature.outputs}; expected data that "
            "was prepared with the base's directory as data.tokenizer"
        )
    return shaped
