"""A trained transformer as Hugging Face's libraries read it, ``config.json`` and ``model.safetensors``; and the command
``slipstream hugging-face`` that writes it."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
from safetensors.torch import save

from slipstream.artifacts.prepared.token_rows import tokenizer_files
from slipstream.artifacts.workspaces import put_in_place
from slipstream.errors import UserError
from slipstream.models.trained import TrainedModel, UntrustedFactory
from slipstream.models.transformer import Transformer
from slipstream.models.transformer_config import to_hugging_face

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


def files_of(model: Transformer) -> Iterator[tuple[str, bytes]]:
    """The names and contents of the files that ``AutoModelForCausalLM.from_pretrained`` reads. None for a model of
    which some layers lost more units than others, as that library has one size for all."""
    widths = {len(weight) for name, weight in model.state_dict().items() if name.endswith("gate_proj.weight")}
    if len(widths) > 1:
        return
    config = replace(model.config, intermediate_size=widths.pop())
    end = model.document_end
    # What a text ends with, it begins behind, too.
    ends = {"bos_token_id": end, "eos_token_id": end} if end >= 0 else {}
    yield "config.json", json.dumps(to_hugging_face(config) | ends, indent=2).encode()
    yield "model.safetensors", save(model.state_dict(), metadata={"format": "pt"})


@click.command()
@click.argument("trained", type=DIRECTORY)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--which", type=click.Choice(["best", "last"]), default="best", help="Which weights.")
@click.option("--tokenizer", type=DIRECTORY, help="A directory whose tokenizer is copied beside them.")
def main(trained: Path, output: Path, which: str, tokenizer: Path | None) -> None:
    """Write the transformer in TRAINED, a trained model's directory, to the new directory OUTPUT as Hugging Face's
    libraries read it: config.json and model.safetensors.

    Example: slipstream hugging-face runs/…/trained gpt --tokenizer tokenizer/
    """
    expected = "expected a model of model.name transformer"
    try:
        model = TrainedModel.open(trained).load(which).network
    except UntrustedFactory:
        raise UserError(f"{trained}: holds a model of another factory; {expected}") from None
    if not isinstance(model, Transformer):
        raise UserError(f"{trained}: holds a {type(model).__name__}; {expected}")
    if output.exists():
        raise UserError(f"{output}: exists already; choose a directory that is to be made")
    more = tokenizer_files(tokenizer, model.config.vocab_size) if tokenizer else []
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        partial = Path(scratch, output.name)
        partial.mkdir()
        for name, content in files_of(model):
            (partial / name).write_bytes(content)
        for path in more:
            shutil.copyfile(path, partial / path.name)
        put_in_place(partial, output)
