"""Model card: the Markdown description that is shipped with the model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.shared.artifacts.prepared.card import BEHIND_THE_END, Card
from slipstream.shared.artifacts.results.export import (
    DeployedSignature,
    DeployedTensor,
    Estimate,
    ExportReport,
    LibraryFiles,
    VariantFigures,
)
from slipstream.shared.one_line import one_line

#: Settings of the model and of training that the card lists, and the number of classes that it names.
MODEL_SETTINGS = ("name", "arguments", "base", "quantise")
TRAINING_SETTINGS = (
    "epochs",
    "batch_size",
    "learning_rate",
    "weight_decay",
    "warmup",
    "clip_norm",
    "label_smoothing",
    "ema",
    "patience",
    "precision",
    "seed",
)
CLASSES_NAMED = 20
BITS = {7: "every CPU computes the same numbers", 8: "an x86 CPU without VNNI computes other, wrong numbers"}


def model_card(
    signature: DeployedSignature,
    report: ExportReport,
    data: Card,
    code: Sequence[str],
    made_by: Mapping[str, Any],
) -> str:
    """Return the card as Markdown. It has no date, so equal models have equal cards.

    ``data`` is the data card, ``code`` are the code versions that trained the model, and ``made_by`` is the provenance
    of the trained model.
    """
    rows = data["rows"]
    start = f"\nIn the training data, {BEHIND_THE_END}.\n" if BEHIND_THE_END in data["warnings"] else ""
    tested = (
        f"""; every metric below is of the same
{rows["test"]:,} rows of the test split, which were not used for training or calibration"""
        if report.variants
        else ""
    )
    trained_by = f"\n{trained_by_code(code)}\n" if code else ""
    licence = f"\nLicence: {report.licence}.\n" if report.licence else ""
    return f"""# {signature.target}: {signature.task}

Predicts `{signature.target}`. Trained on {rows["train"]:,} rows{tested}.
{trained_by}{start}
## Intended use

To predict `{signature.target}` for rows of the same source and period as the training data:
{in_a_line(data["source"])}.
Rows of another source or a later time may be predicted worse than measured here; scoring reports such drift.

## Data

{data_section(data)}
## Settings

{settings_section(made_by)}
## Use

{on_tensors(signature)}{batch_section(report)}
{libraries(report.libraries)}
{licence}
## Variants

{measurements_section(report) if report.variants else f"There is no ONNX model: {report.why}."}
"""


def data_section(data: Card) -> str:
    """Return the rows by split, and the classes with their rows."""
    rows, classes = data["rows"], data["classes"]
    lines = [
        f"{rows['read']:,} rows read, {rows['kept']:,} kept, {rows['quarantined']:,} quarantined: {rows['train']:,} to "
        f"train, {rows['validation']:,} to validate, {rows['test']:,} to test. Columns: {len(data['columns'])}."
    ]
    if classes:
        most = sorted(classes.items(), key=lambda each: -sum(each[1].values()))
        named = ", ".join(f"{in_a_line(name)} ({sum(counts.values()):,})" for name, counts in most[:CLASSES_NAMED])
        lines.append(f"Classes, by rows: {named}{', …' if len(most) > CLASSES_NAMED else ''}.")
    if data["warnings"]:  # they may quote cells, which a model that is passed on must not
        lines.append(f"The data card has {len(data['warnings'])} warning(s).")
    return "\n".join(f"{line}\n" for line in lines)


def settings_section(made_by: Mapping[str, Any]) -> str:
    """Return a table of the settings that decide the trained model, as far as its provenance has them."""
    model, training = made_by.get("model"), made_by.get("training")
    named = {f"model.{name}": model[name] for name in MODEL_SETTINGS if isinstance(model, dict) and name in model}
    if isinstance(training, dict):
        named |= {f"training.{name}": training[name] for name in TRAINING_SETTINGS if name in training}
    if not named:
        return "Not recorded.\n"
    lines = [f"| `{name}` | `{in_a_line(json.dumps(value))}` |" for name, value in named.items()]
    return "\n".join(["| setting | value |", "|---|---|", *lines, ""])


def in_a_line(text: str) -> str:
    """Return a name from the data or a setting without characters that would end its place in the Markdown."""
    return one_line(text).replace("|", "\\|").replace("`", "'")


def trained_by_code(versions: Sequence[str]) -> str:
    """Return a line with the code versions that trained a model, in order."""
    named = ", then ".join(f"`{version}`" for version in versions)
    return f"Trained by code version{'s' if len(versions) > 1 else ''} {named}."


def on_tensors(signature: DeployedSignature) -> str:
    """Return the card's section about inputs and outputs; for ONNX also file, classes and raw columns."""
    called = f"""| | name | dtype | shape |
|---|---|---|---|
{tensors("input", signature.inputs)}
{tensors("output", signature.outputs)}

The output is in {signature.outputs[0].units}.
"""
    if signature.no_onnx:
        return f"Rows of token ids, of any number:\n\n{called}"
    classes = f"\nClasses, in this order: {', '.join(signature.classes)}.\n" if signature.classes else ""
    return f"""`{signature.model}` (ONNX, opset {signature.opset}), any batch size:

{called}{classes}{longest_text(signature)}
`schema.json` and `statistics.json` define how raw columns become these inputs.

{raw_model(signature)}"""


def batch_section(report: ExportReport) -> str:
    """Return how answers depend on the rows of a call; "" if they do not."""
    chosen = report.recommended
    return f"\nNote: {chosen.by_batch}.\n" if chosen and chosen.by_batch else ""


def longest_text(signature: DeployedSignature) -> str:
    if signature.task != "next token":
        return ""
    _, length = signature.inputs[0].shape
    return f"\nThe longest text has {length} tokens; a shorter one is padded at its end, with any ids.\n"


def libraries(directories: Sequence[LibraryFiles]) -> str:
    """Return the loading instructions for the directories of other libraries."""
    return "\n".join(
        f"`{each.name}/` ({each.parts} file(s) of weights, {each.bytes:,} bytes), from this directory:\n\n"
        + "".join(f"- {library}: `{line}`\n" for library, line in each.loaded_by.items())
        + (f"\nNote: {each.note}.\n" if each.note else "")
        for each in directories
    )


def measurements_section(report: ExportReport) -> str:
    """Return the card's section about the variants, the choice and the measuring machine."""
    machine = report.machine
    flags = ", ".join(machine.flags) or "unknown instruction sets"
    return f"""{variants_table(report.variants)}

{report.why}.

Measured with ONNX Runtime {machine.onnxruntime} and torch {machine.torch}, {machine.threads} thread(s)
per call, on {machine.cpu} ({machine.architecture}; {flags}). On another machine the order may differ.
A percentile is quoted if ten calls lie beyond it. INT8 weights have {report.weight_bits} bits:
{BITS[report.weight_bits]}."""


def raw_model(signature: DeployedSignature) -> str:
    """Return the card's section about the model that takes raw columns, or why there is none."""
    raw = signature.raw
    if not raw:
        return f"There is no model that takes raw columns: {signature.no_raw}.\n"
    missing = f"NaN, or `{raw.missing}`" if raw.missing else "NaN, or an empty text"
    return f"""`{raw.model}` includes this preparation and takes typed raw columns; a missing value is {missing}:

| | name | dtype | shape |
|---|---|---|---|
{tensors("input", raw.inputs)}
{tensors("output", raw.outputs)}
"""


def tensors(kind: str, specs: Sequence[DeployedTensor]) -> str:
    return "\n".join(f"| {kind} | `{s.name}` | {s.dtype} | [{', '.join(map(str, s.shape))}] |" for s in specs)


def variants_table(all_variants: list[VariantFigures]) -> str:
    """Return a table of the timed variants, and one line per variant with its gate result."""
    timed = [(v, v.metrics) for v in all_variants if v.metrics]
    names = [name for name, value in vars(timed[0][1]).items() if value is not None]
    batches = sorted(timed[0][0].latency_ms, key=int)
    head = ["variant", "file", "bytes", *(f"p50 / p90 / p99 ms at batch {b}" for b in batches), *names]
    lines = [head, ["---"] * len(head)]
    for v, scores in timed:
        timings = [" / ".join(cell(v.latency_ms[b].percentile(p)) for p in ("p50", "p90", "p99")) for b in batches]
        scored = [f"{scores.of(name):.4g}" for name in names]
        label = f"**{v.name}**" if v.chosen else v.name
        lines.append([label, v.file or "", f"{v.bytes:,}", *timings, *scored])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    verdicts = [f"- {v.name}, {v.verdict}: {v.reason}" for v, _ in timed]
    others = [f"- {v.name}, {v.verdict}: {v.reason}" for v in all_variants if not v.metrics]
    parts = [table, "\n".join(verdicts)]
    if others:
        parts += [f"<details><summary>{len(others)} more, not timed</summary>", "\n".join(others), "</details>"]
    return "\n\n".join(parts)


def cell(estimate: Estimate | None) -> str:
    """Return a latency in ms; "-" if too few calls lie beyond the percentile."""
    return f"{estimate.value:.3g}" if estimate else "-"
