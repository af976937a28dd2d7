"""The shape of a base: the arguments of our transformer that its ``config.json`` states."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

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
    where = directory.where(CONFIG)
    stated = stated_shape(directory, length)
    shape = TransformerConfig.from_dict({**stated, **config.arguments})
    if shape.max_position_embeddings < length:
        raise UserError(
            f"{where}: has positions for {shape.max_position_embeddings} tokens, and a row has {length}; expected a "
            "smaller data.length, or more in model.arguments.max_position_embeddings"
        )
    return replace(config, name="transformer", arguments=to_dict(shape))


def stated_shape(directory: BaseDirectory, length: int) -> dict[str, Any]:
    """The arguments that a base's config.json states. Raises ``UserError`` for others than the transformer takes."""
    content, where = directory.json(CONFIG), directory.where(CONFIG)
    try:
        stated = {"max_position_embeddings": length, **from_hugging_face(content, length)}
        if missing := next((name for name in SIZES if name not in stated), ""):
            raise UserError(f"states no {missing}; expected Hugging Face's config.json of this model")
        TransformerConfig.from_dict(stated)
    except UserError as error:
        what = error.message.removeprefix(f"{CONFIG}: ").removeprefix(f"{TransformerConfig.section}.")
        raise UserError(f"{where}: {what}") from None
    return stated


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
