"""Command ``slipstream hugging-face``, which exports a trained transformer in Hugging Face's format."""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from slipstream.shared.artifacts.prepared.token_rows import tokenizer_files
from slipstream.shared.artifacts.workspaces import put_in_place
from slipstream.shared.errors import UserError
from slipstream.shared.language.chat_template import stop_token_ids
from slipstream.shared.language.tokenizer import READ
from slipstream.shared.models.hugging_face.files import hugging_face_files, transformer_config, weights_dtype
from slipstream.shared.models.trained import TrainedModel, UntrustedFactory
from slipstream.shared.models.transformer import Transformer

DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("trained", type=DIRECTORY)
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--which", type=click.Choice(["best", "last"]), default="best", help="Weights to write.")
@click.option("--tokenizer", type=DIRECTORY, help="Directory with a tokenizer to copy to OUTPUT.")
def main(trained: Path, output: Path, which: str, tokenizer: Path | None) -> None:
    """Write the trained transformer in the directory TRAINED to the new directory OUTPUT.

    The files are in Hugging Face's format: config.json, and model.safetensors or its shards of at most 5 GB with their
    index.

    Example: slipstream hugging-face runs/…/trained gpt --tokenizer tokenizer/
    """
    expected = "expected a model of model.name transformer"
    try:
        opened = TrainedModel.open(trained)
        model = opened.load(which).network
    except UntrustedFactory:
        raise UserError(f"{trained}: holds a model of another factory; {expected}") from None
    if not isinstance(model, Transformer):
        raise UserError(f"{trained}: holds a {type(model).__name__}; {expected}")
    if transformer_config(model) is None:
        raise UserError(
            f"{trained}: holds a transformer that was pruned to feed-forward layers of different widths, and "
            "config.json has one intermediate_size; expected one width"
        )
    if output.exists():
        raise UserError(f"{output}: exists already; choose a new directory")
    more = tokenizer_files(tokenizer, model.config.vocab_size) if tokenizer else {}
    texts = {name: more[name].decode() for name in READ if name in more}
    stops = stop_token_ids(texts, answers=opened.signature.conversations) if texts else []
    base = opened.inherited
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as scratch:
        partial = Path(scratch, output.name)
        partial.mkdir()
        for name, chunks in hugging_face_files(model, stops=stops, base=base, dtype=weights_dtype("auto", base)):
            with (partial / name).open("wb") as file:
                file.writelines(chunks)
        for name, content in more.items():
            (partial / name).write_bytes(content)
        put_in_place(partial, output)
