"""Training with plain torchrun: ``torchrun --nproc-per-node 2 -m tasks.train PREPARED OUTPUT [CONFIG.yaml]``.

PREPARED is a directory, or an address on ``s3://``, ``gs://`` or ``abfs://``, from which the rows are streamed during
training.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from tasks.artifacts.format import MANIFEST
from tasks.artifacts.streamed import make_stub
from tasks.config import RunConfig
from tasks.distributed.explained import explained
from tasks.errors import UserError
from tasks.hardware.profile import current_profile
from tasks.storage import STORES
from tasks.train.run import TrainingRequest, run


@contextmanager
def local_prepared_data(prepared: str) -> Iterator[Path]:
    """The directory of the prepared data; for a URI a temporary stub, which only this process uses."""
    if not prepared.startswith(STORES):
        if not Path(prepared).is_dir():
            raise UserError(
                f"{prepared}: no such directory; expected prepared data, here or on s3://, gs:// or abfs://"
            )
        yield Path(prepared)
        return
    cache_bytes = int(current_profile().placement("train").data_cache_gib * 2**30)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory(prefix="prepared-") as scratch:
        yield make_stub(prepared, Path(scratch) / "stub", cache_bytes // processes)


@click.command()
@click.argument("prepared")
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("config", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=False)
def main(prepared: str, output: Path, config: Path | None) -> None:
    """Train on PREPARED and write the trained model to OUTPUT; its checkpoints go to OUTPUT.checkpoints."""
    settings = RunConfig.from_file(config) if config else RunConfig()
    if (output / MANIFEST).exists():
        raise UserError(f"{output}: holds an artifact already; choose another OUTPUT or remove it")
    with local_prepared_data(prepared) as directory:
        request = TrainingRequest(
            prepared=directory,
            model=settings.model,
            training=settings.for_training(),
            directory=output,
            checkpoints_home=f"{output}.checkpoints",
            # The agent's run id, so that restarted workers belong to the same run; "none" if it has none.
            execution=os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none"),
            made_by={"command": "tasks.train"},
        )
        try:
            run(request)
        except Exception as error:
            if mendable := explained(error):
                raise mendable from None
            raise


if __name__ == "__main__":
    sys.exit(main())
