"""Write a trained transformer as Hugging Face's libraries read it: ``config.json`` and ``model.safetensors``.

``python -m tasks.models.transformer TRAINED OUTPUT`` takes a trained model's directory and one that is to be made.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from safetensors.torch import save_file

from tasks.errors import UserError
from tasks.models.trained import TrainedModel
from tasks.models.transformer.config import to_hugging_face
from tasks.models.transformer.network import Transformer


@click.command(help=__doc__)
@click.argument("trained", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--which", type=click.Choice(["best", "last"]), default="best", help="Which weights.")
def main(trained: Path, output: Path, which: str) -> None:
    network = TrainedModel.open(trained).load(which).network
    if not isinstance(network, Transformer):
        raise UserError(f"{trained}: holds a {type(network).__name__}; expected a model of model.name transformer")
    if output.exists():
        raise UserError(f"{output}: exists already; choose a directory that is to be made")
    output.mkdir(parents=True)
    save_file(network.state_dict(), output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(to_hugging_face(network.config), indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
