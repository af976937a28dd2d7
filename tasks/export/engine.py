"""Export the trained model to ONNX, quantise it, measure the variants and choose the one to deploy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.artifacts.exported import (
    KIND,
    MODEL_CARD,
    PREPROCESSING,
    REPORT,
    SIGNATURE,
    DeployedSignature,
    ExportReport,
    MachineFigures,
    VariantFigures,
)
from tasks.artifacts.format import Artifact, ArtifactWriter
from tasks.artifacts.prepared import PreparedData, Signature
from tasks.artifacts.versions import installed
from tasks.export.card import model_card
from tasks.export.config import ExportConfig
from tasks.export.convert import PARITY_BATCHES, output_name
from tasks.export.gate import Candidate, Decision, decide
from tasks.export.variants import (
    FILES,
    FP32,
    INT8,
    TIMING_SECONDS,
    TORCH,
    figures,
    fp32_variant,
    int8_variant,
    time_variants,
    torch_variant,
)
from tasks.hardware.cpus import usable_cores
from tasks.hardware.machine import Machine, this_machine
from tasks.models.metrics import HEADLINE
from tasks.models.predict import held_out_rows

if TYPE_CHECKING:
    from tasks.models.trained import TrainedModel

#: Verdicts on the variants that the gate does not judge.
REFERENCES = {
    TORCH: "torch itself, run eagerly: the reference for the others",
    FP32: f"gives what torch gives, at batches {', '.join(map(str, PARITY_BATCHES))}",
}


def export(
    directory: Path, trained: TrainedModel, data: PreparedData, config: ExportConfig, made_by: Mapping[str, Any]
) -> Artifact:
    """Write the artifact of :mod:`tasks.artifacts.exported` into the fresh ``directory``.

    Raises ``UserError`` if the model cannot be exported to ONNX or the ONNX model does not agree with torch. If
    quantisation fails, ``export.json`` says why and nothing is raised.
    """
    writer, machine = ArtifactWriter(directory), this_machine()
    variants = make_variants(directory, trained, data, config, machine)
    decision = judge(variants, trained.signature.task, config)
    verdicts = {**REFERENCES, **decision.verdicts}
    for variant in variants:
        variant["chosen"] = variant["name"] == decision.chosen
        if not variant["verdict"]:
            variant["verdict"] = verdicts[variant["name"]]
    report: ExportReport = {
        "task": trained.signature.task,
        "variants": variants,
        "chosen": decision.chosen,
        "why": decision.why,
        "decided_at_batch": config.decide_at_batch,
        "machine": describe(machine, config.threads),
    }
    signature = deployed_signature(trained.signature, config.opset, FILES[decision.chosen])
    writer.write_json(REPORT, report)
    writer.write_json(SIGNATURE, signature)
    for name in PREPROCESSING:
        if name in data.artifact.files:
            writer.write_bytes(name, data.artifact.read_bytes(name))
    writer.write_bytes(MODEL_CARD, model_card(signature, report, data.card["rows"]).encode())
    return writer.finish(KIND, made_by)


def make_variants(
    directory: Path, trained: TrainedModel, data: PreparedData, config: ExportConfig, machine: Machine
) -> list[VariantFigures]:
    """All variants with their figures. One that could not be made has only its name and a verdict with the reason."""
    test, model, signature = held_out_rows(data), trained.load(), trained.signature
    torch = torch_variant(model, signature, test)
    fp32 = fp32_variant(directory, model, torch, data, config)
    made, failed = [torch, fp32], list[VariantFigures]()
    try:
        made.append(int8_variant(directory, data, config, machine))
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        verdict = f"could not be made: {reason}"
        failed.append({"name": INT8, "file": None, "bytes": None, "chosen": False, "verdict": verdict})
    runs = {variant.name: variant.run for variant in made}
    timed = time_variants(runs, signature, test, config.threads, TIMING_SECONDS)
    return [figures(v, torch, fp32, signature.task, test, timed[v.name]) for v in made] + failed


def judge(variants: list[VariantFigures], task: str, config: ExportConfig) -> Decision:
    """Apply the gate to the ONNX variants that were made, at the batch size that decides."""
    batch, metric = str(config.decide_at_batch), HEADLINE[task][0]
    candidates = {
        variant["name"]: Candidate(variant["name"], variant["latency_ms"][batch]["p50"], variant["metrics"][metric])
        for variant in variants
        if variant["file"] is not None
    }
    return decide(task, candidates.pop(FP32), list(candidates.values()), config)


def deployed_signature(signature: Signature, opset: int, file: str) -> DeployedSignature:
    """How to call the model in ``file``."""
    classification = signature.task == "classification"
    return {
        "format": 1,
        "task": signature.task,
        "target": signature.target,
        "model": file,
        "opset": opset,
        "dynamic_batch": True,
        "inputs": [{"name": i.name, "dtype": i.dtype, "shape": ["batch", *i.shape]} for i in signature.inputs],
        "outputs": [
            {
                "name": output_name(signature),
                "dtype": "float32",
                "shape": ["batch", signature.outputs],
                "units": "logits; softmax gives probabilities" if classification else f"units of {signature.target}",
            }
        ],
        "classes": list(signature.classes),
        "cardinalities": list(signature.cardinalities),
        "preprocessing": list(PREPROCESSING),
    }


def describe(machine: Machine, threads: int) -> MachineFigures:
    """The machine, the threads per call and the library versions, as ``export.json`` holds them."""
    return {
        "cpu": machine.cpu,
        "architecture": machine.architecture,
        "flags": list(machine.flags),
        "cores": usable_cores(),
        "threads": threads,
        "onnxruntime": installed("onnxruntime"),
        "onnx": installed("onnx"),
        "torch": installed("torch"),
    }
