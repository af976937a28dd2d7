"""``slipstream train``: training under plain torchrun, without Flyte."""

from __future__ import annotations

import os
import socket
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import click

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.train.checkpoint.home import Superseded
from slipstream.pipeline.train.checkpoint.lease import wait_for_others
from slipstream.pipeline.train.identity import run_identity
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.pipeline.train.run import run_attempt
from slipstream.shared.artifacts.format import MANIFEST, Artifact, DamagedArtifact, canonical_json, in_run
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.streamed import make_stub
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.distributed.process_group import exit_at_once, group_stands
from slipstream.shared.distributed.user_errors import torch_user_error
from slipstream.shared.errors import OutOfMemory, UserError
from slipstream.shared.logs import logger
from slipstream.shared.models.base.directory import ModelOrigin, with_lasting_addresses
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.storage import STORES
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.watch import telemetry_sampled

LOG = logger("train")


@contextmanager
def local_prepared_data(prepared: str) -> Iterator[Path]:
    """Yield the directory of the prepared data; for a store address, a temporary stub that streams it."""
    if not prepared.startswith(STORES):
        if not Path(prepared).is_dir():
            raise UserError(
                f"{prepared}: no such directory; expected prepared data, here or on s3://, gs:// or abfs://"
            )
        yield in_run(Path(prepared), "prepare")
        return
    cache_bytes = int(current_profile().placement("train").data_cache_gib * 2**30)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    with tempfile.TemporaryDirectory(prefix="prepared-") as scratch:
        yield make_stub(prepared, Path(scratch) / "stub", cache_bytes // processes)


def is_finished(output: Path, made_by: Callable[[], Mapping[str, object]]) -> bool:
    """Return True if ``output`` already holds the model of this training.

    This happens if torchrun restarts a rank that died after the end of training. Raises ``UserError`` if ``output``
    holds another artifact.
    """
    if not (output / MANIFEST).exists():
        return False
    with suppress(DamagedArtifact):
        if canonical_json(Artifact.open(output, KIND).made_by) == canonical_json(made_by()):
            if os.environ.get("RANK", "0") == "0":
                LOG.info("%s is the model of this training already; remove it to train again", output)
            return True
    raise UserError(f"{output}: holds an artifact already; choose another OUTPUT or remove it")


@contextmanager
def alone_at_once() -> Iterator[None]:
    """Print an error of this rank and end the process without waiting for other ranks.

    See :mod:`slipstream.shared.distributed.process_group`.
    """
    try:
        yield
    except Exception as error:
        if not group_stands():
            raise
        if isinstance(error, click.ClickException):
            error.show()
        elif isinstance(error, OutOfMemory):
            click.echo(str(error), err=True)
        else:
            traceback.print_exc()
        exit_at_once()


@contextmanager
def sampled_machine(request: TrainingRequest) -> Iterator[None]:
    """Run the telemetry sampler on each machine's first rank, because torchrun's agent starts none."""
    if request.sampled is None or os.environ.get("LOCAL_RANK", "0") != "0":
        yield
        return
    labels = MetricLabels(request.holder.execution or "torchrun", KIND, request.holder.attempt, socket.gethostname())
    with telemetry_sampled(request.sampled, labels):
        yield


@click.command()
@click.argument("prepared")
@click.argument("output", type=click.Path(path_type=Path))
@click.argument("config", nargs=-1)
def main(prepared: str, output: Path, config: tuple[str, ...]) -> None:
    """Train on PREPARED and write the trained model to OUTPUT.

    Checkpoints go to OUTPUT.checkpoints, device telemetry to OUTPUT.telemetry (shown by slipstream telemetry).

    PREPARED is a directory, or an address on s3://, gs:// or abfs://, from which rows are streamed during training.
    CONFIG is a YAML or JSON file, JSON, or single values.

    Example: torchrun --nproc-per-node 2 -m slipstream train prepared/ model/ run.yaml training.epochs=3
    """
    settings = read_settings(RunConfig, config)
    training, model = settings.for_training(), with_lasting_addresses(settings.model)
    origin = ModelOrigin(model)
    with alone_at_once(), local_prepared_data(prepared) as directory:

        @cache
        def made_by() -> Mapping[str, object]:
            # Lazy: only a process that needs the digest reads the base.
            data = PreparedData.open(directory)
            made = {"command": "slipstream.train", "code": code_version(KIND)}
            rows = data.training_rows
            resolved = model.for_rows(rows, data.signature), training.for_rows(rows)
            return {**made, **run_identity(data, *resolved, base_digest=origin.digest)}

        if is_finished(output, made_by):
            return
        home = training.checkpoint_uri or f"{output}.checkpoints"
        # The agent's run id, so that restarted workers belong to the same run; "none" without one.
        run_id = os.environ.get("TORCHELASTIC_RUN_ID", "").removeprefix("none")
        holder = Holder(run_id, int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")))
        if wait_for_others(home, holder, training.when_held) and is_finished(output, made_by):
            return
        request = TrainingRequest(
            prepared=directory,
            model=model,
            training=training,
            directory=output,
            home=home,
            holder=holder,
            made_by=made_by() if os.environ.get("RANK", "0") == "0" else {},
            sampled=Path(f"{output}.telemetry"),
            opened=origin,
        )
        try:
            with sampled_machine(request):
                run_attempt(request)
        except Superseded as error:
            # Two processes started at once, so neither saw the other's lease.
            raise UserError(f"{error}; start again to wait for the other one") from None
        except Exception as error:
            if mendable := torch_user_error(error):
                raise mendable from None
            raise
