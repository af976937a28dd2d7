"""``slipstream memory``: prediction of a training's device memory."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.train.checks import rows_of_text
from slipstream.pipeline.train.memory.choices import (
    USABLE,
    TracedJob,
    TraceJob,
    changed_settings,
    cheapest_fitting,
    find_remedies,
    layout_choices,
    trace_all,
)
from slipstream.pipeline.train.memory.processes import TraceFailure
from slipstream.pipeline.train.memory.tracker import KINDS
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import aligned_table, count_with_noun, size_text
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.base.shape import shaped_for, with_base_shape
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.transformer import read_config
from slipstream.shared.settings import LARGEST

BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(GiB|GB|MiB|MB)")
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6}
#: Upper bounds of the options --devices, --length and --memory, far above any training.
MOST_DEVICES, LONGEST, MOST_BYTES = 100_000, 1 << 20, 2.0**50
COLUMNS = ("shard", "recompute", "micro-batches", "rows", "peak", *KINDS)
LEFT = ("shard", "recompute", "")


class MemorySizeParam(click.ParamType):
    """Click type for sizes such as 24GiB or 80GB; converts to bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = BYTES.fullmatch(str(value).strip())
        size = float(match[1]) * UNITS[match[2]] if match else 0.0
        if not 1 <= size <= MOST_BYTES:
            raise UserError(f"--memory {value}: expected a device's memory, such as 24GiB or 80GB")
        return size


@dataclass(frozen=True)
class MemoryAnswer:
    """Result of the command: all traced layouts, among them the requested layout (``asked``)."""

    asked: TracedJob
    traced: Sequence[TracedJob]
    notes: Sequence[str]
    memory: float | None = None

    @property
    def fits(self) -> bool:
        return self.memory is None or self.asked.fits(USABLE * self.memory)


@click.command()
@click.argument("config", nargs=-1, required=True)
@click.option("--devices", type=int, help="Number of GPUs over all nodes [default: those of this machine, or 1].")
@click.option("--nodes", type=int, default=1, help="Number of nodes, with equally many GPUs each.")
@click.option("--memory", type=MemorySizeParam(), metavar="24GiB", help="Memory of a device.")
@click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Directory with the prepared data.")
@click.option("--length", type=int, help="Tokens per row, instead of --data.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def main(  # noqa: PLR0913 - an argument for each option
    context: click.Context,
    config: tuple[str, ...],
    devices: int | None,
    nodes: int,
    memory: float | None,
    data: Path | None,
    length: int | None,
    as_json: bool,
) -> None:
    """Print the peak memory of a device for the training in CONFIG, by kind of tensor.

    It covers every way to shard the state, with and without recomputed blocks, for several micro-batch counts.

    A step is traced on tensors without memory: no GPU is needed and nothing is allocated. With --memory it prints which
    layouts fit, or the three cheapest remedies, and exits with 1 if the training does not fit unchanged.

    Example: slipstream memory run.yaml --length 8192 --devices 8 --memory 80GiB
    """
    devices = visible_gpus() or 1 if devices is None else devices
    asked = (("devices", devices, MOST_DEVICES), ("nodes", nodes, MOST_DEVICES), ("length", length, LONGEST))
    for name, number, most in asked:
        if number is not None and not 1 <= number <= most:
            raise UserError(f"--{name} {number}: expected a whole number from 1 to {most:,}")
    if devices % nodes:
        raise UserError(f"--nodes {nodes}: does not divide the {devices} devices; expected a divisor of that")
    run, rows = read_settings(RunConfig, config), LARGEST  # for the largest batch, if the data is unknown
    origin = ModelOrigin(run.model)
    if data:
        prepared = PreparedData.open(data)
        signature, rows = prepared.signature, prepared.training_rows
    elif length is None and run.data.task == "language" and (run.model.base or run.data.tokenizer == "train"):
        signature = rows_of_text(run.data, origin)
    else:
        signature = rows_of_tokens(origin, length)
    precision = "bf16" if run.training.precision == "auto" else run.training.precision
    training = replace(run.training.for_rows(rows), precision=precision)
    shaped = shaped_for(run.model.for_rows(rows, signature), signature, origin)
    job = TraceJob(shaped, signature, training, devices, nodes)
    build_model(
        job.model, signature, seed=0, shapes_alone=True
    )  # reports errors of the model in one line, before any trace
    answer = traced_answer(job, memory)
    click.echo(json.dumps(tree(answer), indent=1) if as_json else text(answer))
    context.exit(0 if answer.fits else 1)


def rows_of_tokens(origin: ModelOrigin, length: int | None) -> Signature:
    """Return the signature of rows of ``length`` tokens for a transformer.

    Raises ``UserError`` for another model, without ``length``, or if the model's settings have no vocabulary size.
    """
    if length is None or origin.model.name not in ("auto", "transformer"):
        raise UserError(
            "--data: expected a directory with the prepared data, which defines the model's inputs; or, for a "
            "transformer, --length with the tokens per row"
        )
    model = with_base_shape(origin.model, length, origin)
    stated = read_config(Path(str(model.arguments["config"]))) if "config" in model.arguments else {}
    vocabulary = model.arguments.get("vocab_size", stated.get("vocab_size"))
    if not isinstance(vocabulary, int) or vocabulary < 2:
        raise UserError(
            "model.arguments.vocab_size: expected the number of token ids, there, in model.base or in the file that "
            "config names, or --data with the prepared data"
        )
    return Signature((TensorSpec("tokens", "int64", (length,)),), "next token", "next token", buckets=vocabulary)


def traced_answer(job: TraceJob, memory: float | None) -> MemoryAnswer:
    """Trace the job and all its choices of layout.

    With ``accumulation: auto`` the requested layout gets the fewest micro-batches that fit.
    """
    found = list(layout_choices(job))
    jobs = [one for one in found if isinstance(one, TraceJob)]
    notes = [one for one in found if isinstance(one, str)]
    auto = job.training.accumulation == "auto"
    asked = job.with_(number=job.fewest) if auto else job
    if asked not in jobs:
        jobs.insert(0, asked)
    traced = trace_all(jobs)
    notes += sorted({one.found.reason for one in traced if isinstance(one.found, TraceFailure)})
    same = [
        one for one in traced if changed_settings(job, one.job).startswith("training.accumulation") or one.job == job
    ]
    fitting = cheapest_fitting(same, memory) if auto and memory else []
    return MemoryAnswer(fitting[0] if fitting else traced[jobs.index(asked)], traced, notes, memory)


def text(answer: MemoryAnswer) -> str:
    """Format the answer for a terminal."""
    job = answer.asked.job
    parallel = job.training.parallel
    layout = "".join(
        f", {name} {getattr(parallel, name)}" for name in ("pipeline", "tensor") if getattr(parallel, name) > 1
    )
    head = (
        f"{count_with_noun(job.devices, 'device')}{layout}; batches of {job.training.rows_per_step} rows, "
        f"{job.share} per process; computed in {job.training.precision}"
    )
    lines = [head, "", aligned_table((*COLUMNS, ""), [cells(answer, one) for one in answer.traced], LEFT), ""]
    if answer.memory is not None:
        lines += verdict(answer, answer.memory)
    return "\n".join([*lines, *(f"not traced: {note}" for note in answer.notes)]).rstrip()


def cells(answer: MemoryAnswer, one: TracedJob) -> list[str]:
    training, step = one.job.training, one.job.step
    start = [training.parallel.shard, training.recompute, str(step.micro_batches), str(step.rows)]
    mark = "<- this configuration" if one is answer.asked else ""
    if isinstance(one.found, TraceFailure):
        return [*start, "?", *("" for _ in KINDS), mark]
    if answer.memory is not None:
        mark = f"{'fits' if one.fits(USABLE * answer.memory) else 'too much'} {mark}".rstrip()
    return [*start, size_text(one.peak or 0), *(size_text(one.found.at_peak[kind]) for kind in KINDS), mark]


def verdict(answer: MemoryAnswer, memory: float) -> list[str]:
    if answer.fits:
        return [f"It fits into {size_text(memory)}; a tenth is reserved for memory that the trace does not show."]
    peak = "an unknown number of bytes" if answer.asked.peak is None else size_text(answer.asked.peak)
    found = find_remedies(answer.asked.job, answer.traced, memory)
    lines = [
        f"It does not fit: it needs up to {peak}, and {size_text(USABLE * memory)} of {size_text(memory)} may be used."
    ]
    return lines + [f"{number}. {remedy}" for number, remedy in enumerate(found, start=1)]


def tree(answer: MemoryAnswer) -> dict[str, object]:
    """Return the answer as a JSON-serialisable dictionary; sizes are in bytes."""
    rows = [
        {
            "shard": one.job.training.parallel.shard,
            "recompute": one.job.training.recompute,
            "micro_batches": one.job.step.micro_batches,
            "rows": one.job.step.rows,
            "peak": one.peak,
            "at_peak": None if isinstance(one.found, TraceFailure) else one.found.at_peak,
            "lasting": None if isinstance(one.found, TraceFailure) else one.found.lasting,
            "fits": None if answer.memory is None else one.fits(USABLE * answer.memory),
            "as_it_is": one is answer.asked,
        }
        for one in answer.traced
    ]
    found = (
        [] if answer.fits or answer.memory is None else find_remedies(answer.asked.job, answer.traced, answer.memory)
    )
    return {"rows": rows, "fits": answer.fits, "remedies": found, "not_traced": list(answer.notes)}
