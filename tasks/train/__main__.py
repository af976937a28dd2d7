"""Training by plain torchrun: ``torchrun --nproc-per-node 2 -m tasks.train PREPARED OUTPUT [CONFIG.yaml]``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click
import yaml

from tasks.artifact import MANIFEST
from tasks.config import RunConfig
from tasks.errors import UserError
from tasks.train.run import run


@click.command()
@click.argument("prepared", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
def main(prepared: Path, output: Path, config: Path | None) -> None:
    """Train on PREPARED and write the trained model to OUTPUT; its checkpoints go to OUTPUT.checkpoints."""
    try:
        settings = RunConfig.from_dict(yaml.safe_load(config.read_text(encoding="utf-8"))) if config else RunConfig()
    except yaml.YAMLError as error:
        raise UserError(f"{config}: not valid YAML: {error}") from None
    if (output / MANIFEST).exists():
        raise UserError(f"{output}: holds an artifact already; choose another OUTPUT or remove it")
    run(
        prepared=prepared,
        model=settings.model,
        training=settings.training,
        directory=output,
        checkpoints_home=f"{output}.checkpoints",
        # The agent's, so that what it starts again is the same run; "none" unless it was told or made up one.
        execution=os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none"),
        made_by={"command": "tasks.train"},
    )


if __name__ == "__main__":
    sys.exit(main())
