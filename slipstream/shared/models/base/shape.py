"""Shape of a base: the transformer arguments in its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.prepared.token_rows import CONFIG, INDEX, WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import BaseDirectory, ModelOrigin
from slipstream.shared.models.base.tensors import our_names, stored_tensors
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.transformer_config import TransformerConfig, from_hugging_face
from slipstream.shared.settings import to_dict

#: Transformer arguments that a base's ``config.json`` must have.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LAYERS = "model.layers."
EVERY = frozenset(one.name for one in fields(TransformerConfig))


def with_base_shape(config: ModelConfig, length: int, origin: ModelOrigin) -> ModelConfig:
    """Return the configuration, whose base is ``origin``, with all transformer arguments for rows of ``length`` tokens.

    The user's arguments override the base's. A configuration without a base, or with all arguments, is returned
    unchanged, and no file is read. Raises ``UserError`` if the transformer does not support the base, or if the base
    has too few layers or positions; ``StorageUnavailable``.
    """
    if not config.base or config.arguments.keys() >= EVERY:
        return config
    if "config" in config.arguments:
        raise UserError(
            "model.arguments.config: not allowed with model.base, which has its own config.json; expected none"
        )
    directory = origin.base
    where = directory.where(CONFIG)
    stated = stated_shape(directory, length)
    shape = TransformerConfig.from_dict({**stated, **config.arguments})
    check_layers(directory, shape.num_hidden_layers)
    if shape.max_position_embeddings < length:
        raise UserError(
            f"{where}: has positions for {shape.max_position_embeddings} tokens, and a row has {length}; expected a "
            "smaller data.length, or more in model.arguments.max_position_embeddings"
        )
    return replace(config, name="transformer", arguments=to_dict(shape))


def check_layers(directory: BaseDirectory, layers: int) -> None:
    """Raise ``UserError`` if the stored weights have fewer than ``layers`` layers.

    Checking first avoids building a huge model.
    """
    if directory.files.keys().isdisjoint((WHOLE, INDEX)):
        return  # Missing weights are reported where they are read.
    stored = our_names(stored_tensors(directory))
    there = {name.split(".")[2] for name in stored if name.startswith(LAYERS)}
    if missing := next((number for number in map(str, range(layers)) if number not in there), ""):
        raise UserError(
            f"model.base: {directory.address}: lacks the tensors {LAYERS}{missing}.…, but {layers} layers are "
            f"requested; expected at most {len(there)} in num_hidden_layers of its config.json or of model.arguments"
        )


def stated_shape(directory: BaseDirectory, length: int) -> dict[str, Any]:
    """Return the transformer arguments in a base's config.json; raises ``UserError`` for unsupported settings."""
    content, where = directory.json(CONFIG), directory.where(CONFIG)
    if quantised := content.get("quantization_config"):
        form = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UserError(
            f"{where}: quantization_config: the weights are stored in another form ({form}); expected the original "
            "base with plain weights; model.quantise: nf4 holds them in four bits"
        )
    try:
        stated = {"max_position_embeddings": length, **from_hugging_face(content, length)}
        if missing := next((name for name in SIZES if name not in stated), ""):
            raise UserError(f"states no {missing}; expected Hugging Face's config.json of this model")
        TransformerConfig.from_dict(stated)
    except UserError as error:
        what = error.message.removeprefix(f"{CONFIG}: ").removeprefix(f"{TransformerConfig.section}.")
        raise UserError(f"{where}: {what}") from None
    except (TypeError, ValueError) as error:  # A value has another type than expected.
        raise UserError(f"{where}: is not a config.json of Hugging Face: {error}") from None
    return stated


def shaped_for(config: ModelConfig, signature: Signature, origin: ModelOrigin) -> ModelConfig:
    """Apply :func:`with_base_shape` for data of this signature.

    Raises ``UserError`` also if the data has no rows of tokens, or another vocabulary size.
    """
    if not config.base:
        return config
    if signature.task != "next token":
        raise UserError(
            f"model.base: {config.base} predicts tokens, and this data has "
            f"{', '.join(spec.name for spec in signature.inputs)} and asks for a {signature.task}; expected none, or "
            "data.task language"
        )
    shaped = with_base_shape(config, signature.inputs[0].shape[0], origin)
    known = shaped.arguments["vocab_size"]
    if known != signature.outputs:
        raise UserError(
            f"model.base: {config.base} has {known} token ids, and this data {signature.outputs}; expected data that "
            "was prepared with the base's directory as data.tokenizer"
        )
    return shaped
