"""Choice of the variant to deploy, a pure function of the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import EXAMPLE_ROWS, check_parity, check_rows, largest_difference, to_onnx
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures, VariantFigures
from slipstream.shared.comparison.latencies import PERCENTILES, Load, calls_needed
from slipstream.shared.comparison.quality import QualityLoss, in_words
from slipstream.shared.errors import UserError
from slipstream.shared.machine.description import CpuModel
from slipstream.shared.models.metrics import compute_scores
from slipstream.shared.models.predict import (
    BATCH,
    ModelFunction,
    model_function,
    predict_records,
    record_inputs,
    record_targets,
)

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Contender:
    """Variant that may be deployed; ``loss`` is None for FP32, the reference."""

    name: str
    bytes: int
    latency: dict[str, LatencyFigures]
    loss: QualityLoss | None = None
    #: Words about the rows per call on which answers depend; "" if on none.
    by_batch: str = ""

    def speedup(self, batch: int) -> Estimate | None:
        return self.latency[str(batch)].speedup

    def times_as_fast(self, batch: int) -> float:
        """Return the speedup over FP32; 1 for FP32 itself."""
        speedup = self.speedup(batch)
        return speedup.value if speedup else 1.0


@dataclass(frozen=True)
class GateResult:
    """Gate result of a variant in one or two words, and the reason."""

    short: str
    reason: str


@dataclass(frozen=True)
class VariantChoice:
    """Variant to deploy, the reason, the gate results by contender, and the best by batch size."""

    chosen: str
    why: str
    verdicts: dict[str, GateResult]
    best: dict[str, str]


def choose_variant(task: str, fp32: Contender, others: Sequence[Contender], config: ExportConfig) -> VariantChoice:
    """Choose the variant to deploy.

    It is the best by ``config.optimise`` among the variants within the loss, speedup and budget limits, else FP32.
    Raises ``UserError`` if no contender is within the budget.
    """
    check_budget([fp32, *others], config)
    batch, excess = config.decide_at_batch, budget_excess(fp32, config)
    verdicts = {other.name: gate_result(task, other, config, batch, needs_speed=not excess) for other in others}
    best = {at: best_at(fp32, others, config, int(at)).name for at in fp32.latency}
    chosen = best[str(batch)]
    if chosen != fp32.name:
        verdicts[chosen] = GateResult("chosen", verdicts[chosen].reason)
        over = f"; {fp32.name} is over the budget: {excess}" if excess else ""
        why = f"{chosen} is {verdicts[chosen].reason}{over}"
    else:
        why = f"{fp32.name} stays: {why_not_fastest(others, verdicts, batch)}"
    return VariantChoice(chosen, why, verdicts, best)


def why_not_fastest(others: Sequence[Contender], verdicts: Mapping[str, GateResult], batch: int) -> str:
    """Return why the fastest variant apart from FP32 was not chosen."""
    if not others:
        return "no other variant was worth timing"
    fastest = max(others, key=lambda each: each.times_as_fast(batch))
    return f"the fastest of the others ({fastest.name}) is {verdicts[fastest.name].reason}"


def best_at(fp32: Contender, others: Sequence[Contender], config: ExportConfig, batch: int) -> Contender:
    """Return the best contender at a batch size by ``config.optimise``."""
    able = [each for each in others if keeps_quality(each, config)]
    allowed = [fp32, *(each for each in able if is_faster(each, config, batch))]
    if batch == config.decide_at_batch:
        # If FP32 exceeds the budget, the budget decides and no speedup over FP32 is required.
        allowed = [each for each in (allowed if within_budget(fp32, config) else able) if within_budget(each, config)]
    if config.optimise == "size":
        return min(allowed, key=lambda each: each.bytes)
    return max(allowed, key=lambda each: each.times_as_fast(batch))


def keeps_quality(each: Contender, config: ExportConfig) -> bool:
    answer = each.loss.answer(config.max_loss) if each.loss else "passed"
    return config.passes(answer)


def is_faster(each: Contender, config: ExportConfig, batch: int) -> bool:
    speedup = each.speedup(batch)
    return config.optimise == "size" or (speedup is not None and speedup.low > config.min_speedup)


def gate_result(task: str, each: Contender, config: ExportConfig, batch: int, needs_speed: bool = True) -> GateResult:
    """Return the first limit that a variant misses, or "passed", with its measurements in words."""
    assert each.loss is not None
    speedup, answer = each.speedup(batch), each.loss.answer(config.max_loss)
    assert speedup is not None
    speed = f"{speedup.value:.2f} times as fast as FP32 at batch {batch} ({speedup.low:.2f} to {speedup.high:.2f})"
    measured = f"{speed}, and {in_words(each.loss, task, config.max_loss, config.evidence)}{each.by_batch}"
    if needs_speed and not is_faster(each, config, batch):
        short = "slower" if speedup.high < 1 else "not faster"
        return GateResult(short, f"{speed}; the lower limit is not above the required {config.min_speedup:g}")
    if not keeps_quality(each, config):
        return GateResult(answer, measured)
    if not within_budget(each, config):
        return GateResult("over budget", f"{measured}; {budget_excess(each, config)}")
    taken = "" if answer == "passed" else " (taken anyway: export.when_in_doubt)"
    return GateResult("passed", measured + taken)


def within_budget(each: Contender, config: ExportConfig) -> bool:
    return not budget_excess(each, config)


def is_within_size(size: int, config: ExportConfig) -> bool:
    return not config.budget_mb or size <= config.budget_mb * 1e6


def budget_excess(each: Contender, config: ExportConfig) -> str:
    """Return in words how a contender exceeds the budget; "" if its confidence limit is within."""
    if not is_within_size(each.bytes, config):
        return f"{each.bytes / 1e6:.3g} MB is {each.bytes / 1e6 / config.budget_mb:.2f} times the budget"
    if not config.budget_ms:
        return ""
    name, batch = config.budget_percentile, config.decide_at_batch
    figures = each.latency[str(batch)]
    estimate = figures.percentile(name)
    if estimate is None:
        needed = calls_needed(PERCENTILES[name])
        return f"{name} cannot be estimated from {figures.calls:,} calls ({needed:,} are needed; raise export.seconds)"
    if estimate.high <= config.budget_ms:
        return ""
    return f"{name} of {estimate.value:.3g} ms (up to {estimate.high:.3g}) is over the budget"


def check_budget(contenders: Sequence[Contender], config: ExportConfig) -> None:
    """Raise ``UserError`` unless a variant within the loss limit meets the budget.

    The message names the closest variant and its excess.
    """
    able = [each for each in contenders if keeps_quality(each, config)]
    if any(within_budget(each, config) for each in able):
        return
    smallest = min(able, key=lambda each: each.bytes)
    if not is_within_size(smallest.bytes, config):
        raise UserError(
            f"export.budget_mb: no variant that was made and may be deployed has at most {config.budget_mb:g} MB; "
            f"{smallest.name} comes closest: {budget_excess(smallest, config)}; raise it, or train a smaller model"
        )
    name, batch = config.budget_percentile, str(config.decide_at_batch)

    def far(each: Contender) -> float:
        estimate = each.latency[batch].percentile(name)
        return estimate.high if estimate else float("inf")

    closest = min(able, key=far)
    raise UserError(
        f"export.budget_ms: no variant that may be deployed is shown to need at most {config.budget_ms:g} ms at "
        f"batch {batch} ({name}); {closest.name} comes closest: {budget_excess(closest, config)}; raise it, or "
        "train a smaller model"
    )


TORCH, TORCH_BF16, FP32 = "torch-fp32", "torch-bf16", "onnx-fp32"
FP32_FILE = "model.fp32.onnx"
#: x86 extensions for bfloat16 matmuls.
BF16 = ("avx512_bf16", "amx_bf16")


@dataclass(frozen=True)
class Variant:
    """Runnable variant of the model; ``outputs`` are ``[rows, outputs]`` on the test split."""

    name: str
    file: str | None
    bytes: int
    load: Load
    outputs: np.ndarray
    #: Code of the quantisation recipe.
    recipe: str = ""

    @property
    def dynamic(self) -> bool:
        """True if scales come from all rows of a call."""
        return self.recipe.startswith("dynamic")


def torch_variants(model: nn.Module, signature: Signature, test: np.ndarray, machine: CpuModel) -> list[Variant]:
    """Return the torch module (the reference) and, if the CPU supports it, its bfloat16 form."""
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    runs = {TORCH: model_function(model)}
    if set(BF16) & set(machine.flags):
        runs[TORCH_BF16] = in_bf16(model)
    return [
        Variant(name, None, size, already_loaded(run), predict_records(run, signature, test))
        for name, run in runs.items()
    ]


def already_loaded(run: ModelFunction) -> Load:
    return lambda: run


def in_bf16(model: nn.Module) -> ModelFunction:
    """Return the module with bfloat16 matmuls and convolutions, and outputs of at least float32."""
    import torch

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            outputs = model(*(torch.from_numpy(array) for array in inputs))
            return outputs.to(torch.promote_types(outputs.dtype, torch.float32)).numpy()

    return run


def fp32_variant(
    directory: Path,
    model: nn.Module,
    reference: ModelFunction,
    data: PreparedData,
    test: np.ndarray,
    config: ExportConfig,
) -> Variant:
    """Return the model converted to ONNX in FP32.

    Raises ``UserError`` if its outputs differ from torch's at a tried batch size.
    """
    path = directory / FP32_FILE
    to_onnx(model, data.signature, record_inputs(data.signature, np.resize(test, EXAMPLE_ROWS)), config.opset, path)
    run, inputs = onnx_predictor(path, config.threads, config.provider), record_inputs(data.signature, test[:32])
    check_parity(reference, run, inputs, data.signature)
    check_rows(run, inputs, data.signature)
    return onnx_variant(FP32, path, data.signature, test, config)


def onnx_variant(
    name: str, path: Path, signature: Signature, test: np.ndarray, config: ExportConfig, recipe: str = ""
) -> Variant:
    load = partial(onnx_predictor, path, config.threads, config.provider)
    outputs = predict_records(load(), signature, test, rows_together(config))
    return Variant(name, path.name, path.stat().st_size, load, outputs, recipe)


def rows_together(config: ExportConfig) -> int:
    """Return the rows per call at which variants are evaluated, besides single rows."""
    return config.decide_at_batch if config.decide_at_batch > 1 else BATCH


def variant_figures(
    variant: Variant,
    reference: Variant,
    task: str,
    test: np.ndarray,
    latency_ms: dict[str, LatencyFigures],
    config: ExportConfig,
    threshold: float | None = None,
) -> VariantFigures:
    """Return a variant's entry in ``export.json``, without its gate result."""
    medians = {rows: at.p50.value for rows, at in latency_ms.items() if at.p50}
    rates = {rows: 1000 * int(rows) / median for rows, median in medians.items()}
    difference = np.abs(variant.outputs.astype(np.float64) - reference.outputs)
    price = config.price_per_hour
    return VariantFigures(
        name=variant.name,
        file=variant.file,
        bytes=variant.bytes,
        chosen=False,
        verdict="",
        reason="",
        recipe=variant.recipe,
        latency_ms=latency_ms,
        rows_per_second=rates,
        cost_per_million={rows: price / 3600 / rate * 1e6 for rows, rate in rates.items()} if price else {},
        metrics=compute_scores(task, variant.outputs, record_targets(test), threshold),
        largest_difference=largest_difference(reference.outputs, variant.outputs),
        mean_difference=float(difference.mean()),
    )


def left_out(name: str, verdict: GateResult, file: Path | None = None, recipe: str = "") -> VariantFigures:
    """Return the report entry of a variant that was not timed; ``file`` is the name of its file if that is kept."""
    size = file.stat().st_size if file else None
    return VariantFigures(name, file.name if file else None, size, False, verdict.short, verdict.reason, recipe)
