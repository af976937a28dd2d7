"""``slipstream collectives``: interconnect benchmark without Flyte."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.collectives.compare import compare_with_history
from slipstream.pipeline.collectives.engine import benchmark_interconnect
from slipstream.pipeline.collectives.launch.worker_group import LeaderUnreachable, WorkerGroup
from slipstream.pipeline.collectives.tune.decision import plugin_csv
from slipstream.pipeline.collectives.tune.steps import ConfiguredModel, Model, SyntheticModel
from slipstream.pipeline.collectives.tune.tuner import tune_settings
from slipstream.shared.artifacts.prepared.streamed import open_prepared
from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.distributed.user_errors import check_gpus
from slipstream.shared.errors import Interrupted, UserError
from slipstream.shared.interconnect.profile import CSV, FILE, TABLE
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.models.arithmetic import Arithmetic

#: Environment variables by which a start under torchrun is recognised.
TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
OUTPUT = click.Path(path_type=Path, dir_okay=False)


class OneSpeaker(click.Command):
    """Command whose errors only rank 0 prints, since all ranks fail alike under torchrun.

    Other ranks print only that rank 0 cannot be reached.
    """

    def make_context(self, *arguments: Any, **more: Any) -> click.Context:
        with report_errors_once():
            return super().make_context(*arguments, **more)

    def invoke(self, ctx: click.Context) -> Any:
        with report_errors_once():
            return super().invoke(ctx)


@contextmanager
def report_errors_once() -> Iterator[None]:
    """Exit on errors of the block, and print them on rank 0 only."""
    speaks = os.environ.get("RANK", "0") == "0"
    try:
        yield
    except click.ClickException as error:
        if speaks:
            raise
        sys.exit(error.exit_code)
    except Interrupted as error:
        if speaks or isinstance(error, LeaderUnreachable):
            click.echo(f"Error: {error}", err=True)
        sys.exit(1)


@click.command(cls=OneSpeaker)
@click.argument("what", type=click.Choice(["benchmark", "compare", "tune"]), default="benchmark")
@click.option("--processes", type=click.IntRange(1), help="Number of processes to start [default: one per GPU, or 2].")
@click.option("--config", "given", multiple=True, help="Settings of a run: YAML or JSON file, JSON, or setting=value.")
@click.option("--json", "json_file", type=OUTPUT, help="Also write the profile with all raw times to this file.")
@click.option("--csv", "csv_file", type=OUTPUT, help="Also write one line per case to this file.")
@click.option("--nccl-csv", type=OUTPUT, help="For tune: also write the table of NCCL's tuner plugin to this file.")
@click.option(
    "--prepared", type=click.Path(path_type=Path), help="For tune: prepared data, with which the real model is trained."
)
def main(
    what: str,
    processes: int | None,
    given: tuple[str, ...],
    json_file: Path | None,
    csv_file: Path | None,
    nccl_csv: Path | None,
    prepared: Path | None,
) -> None:
    """Measure the collectives between processes.

    The command reports slow ranks and links, and adds the profile to the history. "compare" also reports whether the
    network has become slower; "tune" searches for settings with faster training steps.

    Without torchrun the command starts processes on this machine. Under torchrun it measures torchrun's processes, on
    any number of machines.

    Example: slipstream collectives compare --processes 2

    Example: torchrun --nproc-per-node 8 -m slipstream collectives
    """
    run = read_settings(RunConfig, given)
    config = run.collectives
    if not any(name in os.environ for name in TORCHRUN_VARIABLES):
        gpus = visible_gpus()
        check_gpus(processes or gpus, gpus)
        workers = WorkerGroup.local(processes or gpus or 2, config.timeout)
    elif processes:
        raise UserError("--processes: torchrun has started the processes already; remove it")
    else:
        workers = WorkerGroup.from_environment(os.environ, config.timeout)
    if what == "tune":
        tuning = tune_settings(workers, config, model_of(run, prepared, workers.world))
        if tuning:
            click.echo(tuning)
            if json_file:
                json_file.write_text(json.dumps(to_tree(tuning)) + "\n", encoding="utf-8")
            if nccl_csv:
                nccl_csv.write_text(plugin_csv(tuning), encoding="utf-8")
        return
    with tempfile.TemporaryDirectory(prefix="collectives-") as scratch:
        directory = Path(scratch) / "profile"
        if what == "compare":
            compare_with_history(workers, config, directory)
        else:
            benchmark_interconnect(workers, config, directory, reuse=False)
        if not workers.is_leader:
            return
        click.echo((directory / TABLE).read_text(encoding="utf-8"))
        for path, name in ((json_file, FILE), (csv_file, CSV)):
            if path:
                path.write_bytes((directory / name).read_bytes())


def model_of(run: RunConfig, prepared: Path | None, world: int) -> Model:
    training = run.training
    arithmetic = Arithmetic(training.precision, training.tf32)
    if prepared is None:
        return SyntheticModel(arithmetic=arithmetic)
    data = open_prepared(prepared)
    run = run.for_data(data)
    rows = max(1, run.training.rows_per_step // world)
    return ConfiguredModel(run.model, data.signature, rows, training.seed, arithmetic)
