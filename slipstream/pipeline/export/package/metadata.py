"""Metadata in an ONNX file (``metadata_props``), for readers that have only this file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto

from slipstream.shared.artifacts.results.export import DeployedTensor, ModelSignature
from slipstream.shared.artifacts.versions import ROOT

PREFIX = "slipstream."
#: Parts of the names of low-precision operators, whose results depend on how a processor rounds.
COARSE = ("Quantize", "Integer", "NBits")
COARSE_TYPES = (TensorProto.FLOAT16, TensorProto.BFLOAT16)


def with_metadata(model: onnx.ModelProto, entries: Mapping[str, str]) -> onnx.ModelProto:
    """Add ``entries`` to the model's metadata, with the prefix ``slipstream.``."""
    model.producer_name = "slipstream"
    onnx.helper.set_model_props(model, {PREFIX + name: text for name, text in entries.items()})
    return model


@dataclass(frozen=True)
class ModelProvenance:
    """Provenance of a model: the fingerprints in ``made_by``, its licence and target CPUs."""

    made_by: Mapping[str, object]
    licence: str
    cpu_target: str


def metadata_entries(
    deployed: ModelSignature, inputs: list[DeployedTensor], outputs: list[DeployedTensor], origin: ModelProvenance
) -> dict[str, str]:
    """Return the metadata: names, types and units of ``inputs`` and ``outputs``, classes and origin.

    Unknown entries are omitted.
    """
    texts = {
        "task": deployed.task,
        "target": deployed.target,
        "inputs": json.dumps([described(each) for each in inputs], ensure_ascii=False),
        "outputs": json.dumps([described(each) for each in outputs], ensure_ascii=False),
        "classes": json.dumps(deployed.classes, ensure_ascii=False),
        **{name: str(origin.made_by.get(name, "")) for name in ("prepared", "trained", "code")},
        "commit": git_commit(),
        "cpu_target": origin.cpu_target,
        "licence": origin.licence,
    }
    return {name: text for name, text in texts.items() if text}


def described(tensor: DeployedTensor) -> dict[str, object]:
    return {name: value for name, value in vars(tensor).items() if value is not None}


def git_commit() -> str:
    """Return the commit of this code's working tree, with ``-dirty`` if files differ; "" if git fails."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(git, capture_output=True, encoding="utf-8", timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def is_coarse(model: onnx.ModelProto) -> bool:
    """Return True if other processors' rounding may change outputs beyond single precision."""
    graph = model.graph
    return any(part in node.op_type for node in graph.node for part in COARSE) or any(
        tensor.data_type in COARSE_TYPES for tensor in graph.initializer
    )
