"""Assembly of a servable export: the chosen model under a fixed name, its raw model, and sample rows."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.pipeline.export.check import OUTPUT, RAW, TENSORS, raw_column, runtime_providers
from slipstream.pipeline.export.convert import rounding_error
from slipstream.pipeline.export.package.libraries import ModelProvenance, is_coarse, metadata_entries, with_metadata
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.package.raw_model import encoding_model, raw_model
from slipstream.pipeline.export.package.raw_times import input_dtype
from slipstream.pipeline.export.package.samples import ROWS, draw_raw, draw_tensors
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.export import (
    DIGEST,
    GIVEN,
    HELD_OUT,
    KIND,
    DeployedSignature,
    DeployedTensor,
    Holdout,
    ModelSignature,
    RawSignature,
    SampleRows,
    digest_line,
)
from slipstream.shared.errors import UserError
from slipstream.shared.models.predict import record_inputs
from slipstream.shared.source.columns.value_types import BOOLEAN, TEXT, TIME, TIMES

if TYPE_CHECKING:
    import onnx

MODEL, RAW_MODEL = "model.onnx", "model.raw.onnx"
#: Tolerances for outputs on another machine: ``FINE`` times the largest output (see :func:`.convert.rounding_error`);
#: for low-precision models also ``COARSE`` times the range of the outputs.
FINE, COARSE = 1e-4, 0.05
LOGITS = "logits of every next token; softmax gives probabilities"
#: Units of raw columns by type and dtype.
UNITS = {
    (TEXT, "string"): "text without spaces around it",
    (TIME, "string"): "date or time as text, ISO 8601 (UTC without a zone); any other text is missing",
    (TIME, "float64"): "seconds since 1970 (UTC)",
    (BOOLEAN, "float64"): "0 or 1",
}


def assemble_package(
    writer: ArtifactWriter,
    chosen: Path,
    deployed: ModelSignature,
    data: PreparedData,
    origin: ModelProvenance,
    real: bool,
    threshold: float | None = None,
) -> DeployedSignature:
    """Write ``model.onnx``, sample rows and, if the columns allow it, ``model.raw.onnx`` into the artifact.

    ``chosen`` is the variant's file. With ``real``, sample tensors come from the test split. Returns ``deployed`` with
    all fields set. Raises ``UserError`` if the outputs of the two models differ.
    """
    import onnx

    model = onnx.load(chosen)
    kind = onnx.helper.tensor_dtype_to_np_dtype(model.graph.output[0].type.tensor_type.elem_type)
    deployed = replace(deployed, outputs=[replace(each, dtype=kind.name) for each in deployed.outputs])
    columns = read_columns(data.artifact.read_json("statistics.json"))
    if real:
        tensors = dict(zip(names(model), record_inputs(data.signature, data.sample("test", ROWS)), strict=True))
    elif isinstance(columns, RawColumns):
        tensors = encode_random_rows(columns, deployed.opset)
    else:
        tensors = draw_tensors(data.signature)
    save_model(model, metadata_entries(deployed, deployed.inputs, deployed.outputs, origin), writer.directory / MODEL)
    outputs = run_model(model, tensors)[0]
    packed = io.BytesIO()
    np.savez(packed, allow_pickle=False, **tensors, **{OUTPUT: outputs})
    writer.write_bytes(TENSORS, packed.getvalue())
    raw = (
        write_raw(writer, model, columns, deployed, data.signature, origin, threshold)
        if isinstance(columns, RawColumns)
        else None
    )
    return DeployedSignature(
        **{**vars(deployed), "model": MODEL},
        samples=SampleRows(real, output_tolerance(outputs, data.signature, is_coarse(model))),
        raw=raw,
        no_raw="" if isinstance(columns, RawColumns) else columns,
        holdout=holdout_rule(data),
        threshold=threshold,
    )


def write_raw(
    writer: ArtifactWriter,
    model: onnx.ModelProto,
    columns: RawColumns,
    deployed: ModelSignature,
    trained: Signature,
    origin: ModelProvenance,
    threshold: float | None,
) -> RawSignature:
    """Write ``model.raw.onnx`` and raw sample rows with its outputs.

    Raises ``UserError`` if they differ from those of ``model``.
    """
    raw, classes = raw_model(model, columns, deployed.classes, threshold), deployed.classes
    values = dict(zip(names(raw), draw_raw(columns, deployed.opset).values(), strict=True))
    dtypes = {
        name: input_dtype(kind, deployed.opset) for name, kind in zip(values, columns.types.values(), strict=True)
    }
    *labels, scores = run_model(raw, {name: raw_column(column, dtypes[name]) for name, column in values.items()})
    allowed = output_tolerance(scores, trained, is_coarse(model))
    outputs = run_model(model, encode_random_rows(columns, deployed.opset))[0]
    expected = softmax(outputs) if classes else outputs
    if not np.abs(scores - expected).max() <= allowed:
        raise UserError(f"export: the outputs of {RAW_MODEL} and {MODEL} differ; please report this with schema.json")
    text = [name for row in labels for name in row[:, 0].tolist()]
    writer.write_json(RAW, {"inputs": values, "outputs": scores.astype(float).tolist(), "labels": text})
    inputs = [
        DeployedTensor(name, dtypes[name], ("batch", 1), UNITS.get((kind, dtypes[name]), "as in the data"))
        for name, kind in zip(values, columns.types.values(), strict=True)
    ]
    signature = RawSignature(RAW_MODEL, inputs, raw_outputs(raw, deployed), columns.mark, allowed)
    save_model(
        raw, metadata_entries(deployed, signature.inputs, signature.outputs, origin), writer.directory / RAW_MODEL
    )
    return signature


def raw_outputs(model: onnx.ModelProto, deployed: ModelSignature) -> list[DeployedTensor]:
    *labels, scores = [value.name for value in model.graph.output]
    units = "probabilities" if labels else deployed.outputs[0].units
    return [
        *(DeployedTensor(name, "string", ("batch", 1)) for name in labels),
        DeployedTensor(scores, deployed.outputs[0].dtype, ("batch", len(deployed.classes) or 1), units),
    ]


def holdout_rule(data: PreparedData) -> Holdout | None:
    """Return how test rows were selected; None if the prepared data do not record it."""
    schema = data.artifact.read_json("schema.json")
    settings = schema.get("settings") or data.artifact.made_by.get("config")
    if not settings or "split" not in settings:
        return None
    given = {name: settings["split"][name] for name in ("directories", "column") if settings["split"].get(name)}
    if given and 2 not in schema.get("drawn", []):
        rows = {HELD_OUT: schema[HELD_OUT]} if HELD_OUT in schema else {}
        return Holdout(GIVEN, {**given, **rows}, None)
    types = {column["name"]: column.get("type") for column in schema["columns"]}
    if schema.get("cuts"):
        column = settings["time"]
        # Cuts in seconds and cuts in numbers cannot be compared.
        kind = "time" if types.get(column) in TIMES else "number"
        return Holdout("time", {"column": column, "type": kind}, schema["cuts"])
    by = next((name for name in ("group", "id") if settings.get(name)), "content")
    aside = [column["name"] for column in schema["columns"] if column["role"] in ("dropped", "weight", "split")]
    content = sorted(name for name, kind in types.items() if kind != "other" and name not in aside)
    names = [settings[name] for name in ("group", "id") if settings.get(name)]
    # Rows without the group or id were split by the next of these.
    used = 1 + sum(count > 0 for count in schema.get("gaps", []))
    columns = list(dict.fromkeys([*names[:used], *(content if used > len(names) else [])]))
    shares = {name: settings["split"][name] for name in ("validation", "test", "seed")}
    if by == "content":  # hashed as values, in any notation
        types = {name: TIME if kind in TIMES else kind for name, kind in types.items()}
    rules = rules_of(schema, columns, types) if "settings" in schema else {}
    return Holdout(by, {**rules, **given, **shares, "columns": columns}, None)


def rules_of(schema: dict[str, Any], columns: list[str], types: dict[str, str]) -> dict[str, object]:
    """Return the settings that row hashes of ``columns`` depend on.

    See :mod:`slipstream.shared.source.columns.identity`.
    """
    settings = schema["settings"]
    return {
        "row_hash": schema.get("row_hash", 1),
        "missing": sorted(settings["missing"]),
        "decimal": settings["decimal"],
        "thousands": settings["thousands"],
        "types": {name: types[name] for name in columns if types[name] in (*TIMES, "other")},
    }


def finish_package(writer: ArtifactWriter, made_by: Mapping[str, object]) -> Artifact:
    """Write the manifest and its digest."""
    artifact = writer.finish(KIND, made_by)
    (writer.directory / DIGEST).write_text(digest_line(artifact.fingerprint), encoding="utf-8")
    return artifact


def encode_random_rows(columns: RawColumns, opset: int) -> dict[str, np.ndarray]:
    """Return randomly drawn raw rows, encoded as the model's inputs."""
    encoding = encoding_model(columns, opset)
    drawn = zip(names(encoding), draw_raw(columns, opset).values(), columns.types.values(), strict=True)
    feed = {name: raw_column(values, input_dtype(kind, opset)) for name, values, kind in drawn}
    tensors = run_model(encoding, feed)
    return {value.name: tensor for value, tensor in zip(encoding.graph.output, tensors, strict=True)}


def run_model(model: onnx.ModelProto, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=runtime_providers())
    return session.run(None, feed)


def save_model(model: onnx.ModelProto, properties: dict[str, str], path: Path) -> None:
    import onnx

    onnx.save(with_metadata(model, properties), path)


def names(model: onnx.ModelProto) -> list[str]:
    return [value.name for value in model.graph.input]


def output_tolerance(outputs: np.ndarray, signature: Signature, coarse: bool) -> float:
    return rounding_error(outputs, signature, FINE) + (COARSE * float(np.ptp(outputs)) if coarse else 0.0)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)
