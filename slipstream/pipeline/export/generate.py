"""Command ``slipstream generate``, which continues a text with an exported transformer."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from slipstream.pipeline.export.package.libraries import HUGGING_FACE
from slipstream.shared.artifacts.prepared.token_rows import CONFIG
from slipstream.shared.errors import UserError, first_line
from slipstream.shared.language.tokenizer import whole_document


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--prompt", required=True, help='Text to continue, or a message if MODEL has a chat template; "-": stdin.'
)
@click.option("--plain", is_flag=True, help="Continue the text itself, without the chat template.")
@click.option("--tokens", type=click.IntRange(1), default=200, show_default=True, help="Maximum number of new tokens.")
@click.option(
    "--temperature",
    type=click.FloatRange(0),
    default=0.0,
    show_default=True,
    help="Divisor of the logits before a token is drawn; 0 takes the likeliest token.",
)
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Draw only from the likeliest tokens with this sum of probabilities.",
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the draws.")
def main(model: Path, prompt: str, plain: bool, tokens: int, temperature: float, top_p: float, seed: int) -> None:
    """Continue a text with the exported transformer in MODEL, a run's model directory or its hugging-face/.

    Nothing is downloaded, and no code of MODEL runs.

    Example: slipstream generate runs/…/model --prompt "Once upon a time"
    """
    directory = transformer_directory(model)
    transformers = offline_transformers()
    try:
        safe = {"trust_remote_code": False, "local_files_only": True}
        network = transformers.AutoModelForCausalLM.from_pretrained(
            directory, use_safetensors=True, dtype="auto", **safe
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(directory, **safe)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"{directory}: cannot be loaded by transformers: {first_line(error)}") from None
    text = sys.stdin.read() if prompt == "-" else prompt
    ids = prompt_ids(tokenizer, text, plain)
    room = getattr(network.config, "max_position_embeddings", len(ids) + tokens) - len(ids)
    if room < 1:
        raise UserError(f"--prompt: has {len(ids)} tokens; expected fewer than the {room + len(ids)} of the model")
    chosen = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else GREEDY
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(seed)
    network.to(device).eval().generate(
        torch.tensor([ids], device=device),
        attention_mask=torch.ones((1, len(ids)), dtype=torch.long, device=device),
        max_new_tokens=min(tokens, room),
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        streamer=transformers.TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **chosen,
    )


#: Arguments of ``generate`` for the likeliest token; None overrides a default of ``generation_config.json``.
GREEDY = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None, "num_beams": 1}


def transformer_directory(model: Path) -> Path:
    """Return the directory in Hugging Face's format in ``model``, or ``model`` itself. Raises ``UserError``."""
    for directory in (model / HUGGING_FACE, model):
        if (directory / CONFIG).is_file():
            return directory
    raise UserError(
        f"{model}: holds no {HUGGING_FACE}/{CONFIG}; expected the model directory of a run that trained a transformer"
    )


def offline_transformers() -> Any:
    os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def prompt_ids(tokenizer: Any, text: str, plain: bool) -> Sequence[int]:
    """Return the tokens of a prompt as training has them: a conversation by its template, or a document's start."""
    if tokenizer.chat_template and not plain:
        message = [{"role": "user", "content": text}]
        return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    encoded = tokenizer(text, return_special_tokens_mask=True)
    if tokenizer.eos_token_id is None:
        return list(encoded["input_ids"])
    front = len(list(takewhile(bool, encoded["special_tokens_mask"])))
    return [int(each) for each in whole_document(np.array(encoded["input_ids"]), front, tokenizer.eos_token_id)[:-1]]
