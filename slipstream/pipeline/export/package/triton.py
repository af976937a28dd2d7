"""Model repository for NVIDIA's Triton: ``slipstream triton``.

``config.pbtxt`` is written from the signature and measurements, and checked by :func:`config_errors`. If tritonclient
is installed (extra ``[triton]``), Triton's own protobuf parses it as well.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from slipstream.pipeline.export.package.files import BadPackage, check_files, read_file
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.export import (
    REPORT,
    SIGNATURE,
    DeployedSignature,
    DeployedTensor,
    ExportReport,
)
from slipstream.shared.errors import UserError
from slipstream.shared.untrusted_files import RefusedFile, link_or_copy

TYPES = {
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "string": "TYPE_STRING",
}
#: Speedup in rows per second over every smaller batch from which a larger batch is preferred.
WORTH = 1.05
VERSION = "1"


class EnumValue(str):
    """Enum value of the protobuf, written without quotation marks."""


Config = dict[str, Any]


def write_repository(directory: Path, repository: Path, name: str = "") -> list[Path]:
    """Add the exported model in ``directory`` to a Triton repository, and its raw model as ``<name>_raw``.

    Returns the new directories, which appear only if all are complete. Raises ``UserError`` for an unusable model or
    name.
    """
    try:
        check_files(directory)
    except BadPackage as error:
        raise UserError(str(error)) from None
    signature = from_json(read_file(directory, SIGNATURE), DeployedSignature, directory / SIGNATURE)
    report = from_json(read_file(directory, REPORT), ExportReport, directory / REPORT)
    name = name or re.sub(r"\W+", "_", signature.target, flags=re.ASCII).strip("_") or "model"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise UserError(f"--name: {name!r} is not allowed; expected letters, digits, '_', '-' and '.'")
    models = {name: (signature.onnx(directory).name, signature.inputs, signature.outputs)}
    if raw := signature.raw:
        models[f"{name}_raw"] = (raw.model, raw.inputs, raw.outputs)
    for model in models:
        if (repository / model).exists():
            raise UserError(f"{repository / model}: already exists; remove it, or choose another name with --name")
    repository.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=repository.parent, prefix=".triton-") as scratch:
        for model, (file, inputs, outputs) in models.items():
            config = config_fields(model, inputs, outputs, report)
            if flaws := list(config_errors(config, model, inputs, outputs)):
                raise UserError(f"{model}/config.pbtxt: {flaws[0]}")
            text = "".join(f"# {line}\n" for line in filter(None, [unmixed(report)])) + render_config(config)
            parse_model_config(text)
            target = Path(scratch, model)
            (target / VERSION).mkdir(parents=True)
            (target / "config.pbtxt").write_text(text, encoding="utf-8")
            try:
                link_or_copy(directory, file, target / VERSION / "model.onnx")
            except RefusedFile as refused:
                raise UserError(str(refused)) from None
        repository.mkdir(exist_ok=True)
        return [Path(shutil.move(Path(scratch, model), repository / model)) for model in models]


def config_fields(
    name: str, inputs: Sequence[DeployedTensor], outputs: Sequence[DeployedTensor], report: ExportReport
) -> Config:
    """Return the fields of ``config.pbtxt``.

    At preferred batch sizes the chosen variant has more rows per second than at all smaller ones. A request waits for
    others at most as long as one row takes. Requests are not batched if that would change answers.
    """
    chosen = next(variant for variant in report.variants if variant.chosen)
    speeds = {int(rows): speed for rows, speed in chosen.rows_per_second.items()}
    preferred = [rows for rows in sorted(speeds) if rows > 1 and is_worth(rows, speeds) and not unmixed(report)]
    config: Config = {
        "name": name,
        "backend": "onnxruntime",
        "max_batch_size": max(speeds),
        "input": [tensor(spec) for spec in inputs],
        "output": [tensor(spec) for spec in outputs],
        "instance_group": [{"kind": EnumValue("KIND_CPU"), "count": 1}],
        "parameters": [{"key": "intra_op_thread_count", "value": {"string_value": str(report.machine.threads)}}],
        "model_warmup": [
            {
                "name": f"zeros_{rows}",
                "batch_size": rows,
                "inputs": [
                    {
                        "key": spec.name,
                        "value": {"data_type": dtype(spec), "dims": dims(spec), "zero_data": True},
                    }
                    for spec in inputs
                ],
            }
            for rows in sorted({1, *preferred})
        ],
    }
    if preferred:
        delay = round(1e6 / speeds[min(speeds)] * min(speeds))
        config["dynamic_batching"] = {"preferred_batch_size": preferred, "max_queue_delay_microseconds": delay}
    return config


def unmixed(report: ExportReport) -> str:
    """Return why requests are not batched; "" if they may be."""
    chosen = report.recommended
    if not chosen or not chosen.by_batch or report.mix_requests:
        return ""
    return f"No dynamic batching: {chosen.by_batch} (export.mix_requests)."


def is_worth(rows: int, speeds: Mapping[int, float]) -> bool:
    return all(speeds[rows] >= WORTH * speed for smaller, speed in speeds.items() if smaller < rows)


def tensor(spec: DeployedTensor) -> Config:
    return {"name": spec.name, "data_type": dtype(spec), "dims": dims(spec)}


def dtype(spec: DeployedTensor) -> EnumValue:
    return EnumValue(TYPES[spec.dtype])


def dims(spec: DeployedTensor) -> list[int]:
    """Return the shape without the batch dimension, which Triton prepends."""
    return [int(size) for size in spec.shape[1:]]


# Checks


def config_errors(
    config: Config, directory: str, inputs: Sequence[DeployedTensor], outputs: Sequence[DeployedTensor]
) -> Iterator[str]:
    """Yield errors for which Triton would reject the model or ignore the configuration."""
    if config["name"] != directory:
        yield f"name: {config['name']!r} is not the directory's, {directory!r}"
    largest = config["max_batch_size"]
    if largest < 1:
        yield f"max_batch_size: {largest}; expected at least 1, as the first dimension is the batch"
    for kind, specs in (("input", inputs), ("output", outputs)):
        written = {entry["name"]: (entry["data_type"], entry["dims"]) for entry in config[kind]}
        if len(written) != len(config[kind]):
            yield f"{kind}: a name is used twice"
        for spec in specs:
            right = (TYPES[spec.dtype], dims(spec))
            if written.pop(spec.name, None) != right:
                yield f"{kind} {spec.name!r}: expected {right[0]} with dims {right[1]}, as in the model"
        for name in written:
            yield f"{kind} {name!r}: the model has no such {kind}"
    preferred = config.get("dynamic_batching", {}).get("preferred_batch_size", [])
    for rows in preferred:
        if not 1 < rows <= largest:
            yield f"preferred_batch_size: {rows}; expected more than 1 and at most max_batch_size, {largest}"
    if sorted(set(preferred)) != preferred:
        yield f"preferred_batch_size: {preferred}; expected every size once, ascending"
    for warm in config.get("model_warmup", []):
        if not 1 <= warm["batch_size"] <= largest:
            yield f"model_warmup {warm['name']!r}: batch_size {warm['batch_size']}; expected 1 to {largest}"
        given = {entry["key"]: (entry["value"]["data_type"], entry["value"]["dims"]) for entry in warm["inputs"]}
        if given != {spec.name: (TYPES[spec.dtype], dims(spec)) for spec in inputs}:
            yield f"model_warmup {warm['name']!r}: its inputs differ from the model's"


def parse_model_config(text: str) -> Any:
    """Return ``text`` as Triton's ``ModelConfig``; None without tritonclient.

    Raises ``UserError`` if it does not parse.
    """
    try:
        from google.protobuf import text_format
        from tritonclient.grpc.model_config_pb2 import ModelConfig
    except ModuleNotFoundError:
        return None
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise UserError(f"config.pbtxt: Triton's protobuf refuses it: {error}") from None


# Text format


def render_config(config: Config) -> str:
    """Return ``config`` in protobuf text format."""
    return "".join(f"{line}\n" for line in lines_of(config))


def lines_of(message: Config) -> Iterator[str]:
    for name, value in message.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                yield f"{name} {{"
                yield from (f"  {line}" for line in lines_of(each))
                yield "}"
            else:
                yield f"{name}: {scalar(each)}"


def scalar(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (EnumValue, int)) else json.dumps(value, ensure_ascii=False)


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--name", default="", help="Name of the model in the repository (default: the name of its target).")
def main(directory: Path, repository: Path, name: str) -> None:
    """Add the exported model in DIRECTORY to the Triton model repository REPOSITORY.

    Example: slipstream triton runs/…/model models/ --name churn
    """
    for written in write_repository(directory, repository, name):
        click.echo(written)
