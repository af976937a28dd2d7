"""The model card: a Markdown description that is shipped with the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from tasks.artifacts.exported import DeployedSignature, DeployedTensor, ExportReport, VariantFigures

BATCHES = ("1", "256")


def model_card(signature: DeployedSignature, report: ExportReport, rows: Mapping[str, int]) -> str:
    """The card as Markdown; ``rows`` are the row counts of the data card."""
    output = signature["outputs"][0]
    classes = f"\nClasses, in this order: {', '.join(signature['classes'])}.\n" if signature["classes"] else ""
    machine = report["machine"]
    flags = ", ".join(machine["flags"]) or "no instruction set known"
    return f"""# {signature["target"]}: {signature["task"]}

Predicts `{signature["target"]}`. Trained on {rows["train"]:,} rows; every metric below is of the same
{rows["test"]:,} rows of the test split, which neither training nor calibration has seen.

## Use

`{signature["model"]}` (ONNX, opset {signature["opset"]}), any batch size:

| | name | dtype | shape |
|---|---|---|---|
{tensors("input", signature["inputs"])}
{tensors("output", signature["outputs"])}

The output is in {output["units"]}.
{classes}
`schema.json` and `statistics.json` say how raw columns become these inputs.

## Variants

{variants(report["variants"])}

{report["why"]}.

Measured with ONNX Runtime {machine["onnxruntime"]} and torch {machine["torch"]}, {machine["threads"]} thread(s)
per call, on {machine["cpu"]} ({machine["architecture"]}; {flags}). On another machine the order may differ.
"""


def tensors(kind: str, specs: list[DeployedTensor]) -> str:
    return "\n".join(f"| {kind} | `{s['name']}` | {s['dtype']} | [{', '.join(map(str, s['shape']))}] |" for s in specs)


def variants(found: list[VariantFigures]) -> str:
    """A table with a line for each variant that was made, and a sentence for each that could not be made."""
    made = [v for v in found if "metrics" in v]
    names = [name for name, value in made[0]["metrics"].items() if value is not None]
    head = ["variant", "file", "bytes", *(f"p50 / p99 ms at batch {b}" for b in BATCHES), *names]
    lines = [head, ["---"] * len(head)]
    for v in made:
        timings = [f"{v['latency_ms'][b]['p50']:.3g} / {v['latency_ms'][b]['p99']:.3g}" for b in BATCHES]
        metrics = cast(Mapping[str, float], v["metrics"])
        scored = [f"{metrics[name]:.4g}" for name in names]
        label = f"**{v['name']}**" if v["chosen"] else v["name"]
        lines.append([label, v["file"] or "", f"{v['bytes']:,}", *timings, *scored])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return "\n\n".join([table, *(f"{v['name']} {v['verdict']}." for v in found if "metrics" not in v)])
