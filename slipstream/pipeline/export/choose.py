"""Choice of the variant to deploy, a pure function of the measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures
from slipstream.shared.comparison.latencies import PERCENTILES, calls_needed
from slipstream.shared.comparison.quality import QualityLoss, in_words, passes_gate
from slipstream.shared.errors import UserError


@dataclass(frozen=True)
class Contender:
    """Variant that may be deployed; ``loss`` is None for FP32, the reference."""

    name: str
    bytes: int
    latency: dict[str, LatencyFigures]
    loss: QualityLoss | None = None

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
    batch = config.decide_at_batch
    verdicts = {other.name: gate_result(task, other, config, batch) for other in others}
    best = {at: best_at(fp32, others, config, int(at)).name for at in fp32.latency}
    chosen = best[str(batch)]
    if chosen != fp32.name:
        verdicts[chosen] = GateResult("chosen", verdicts[chosen].reason)
        why = f"{chosen} is {verdicts[chosen].reason}"
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
    return passes_gate(answer, config.when_in_doubt)


def is_faster(each: Contender, config: ExportConfig, batch: int) -> bool:
    speedup = each.speedup(batch)
    return config.optimise == "size" or (speedup is not None and speedup.low > config.min_speedup)


def gate_result(task: str, each: Contender, config: ExportConfig, batch: int) -> GateResult:
    """Return the first limit that a variant misses, or "passed", with its measurements in words."""
    assert each.loss is not None
    speedup, answer = each.speedup(batch), each.loss.answer(config.max_loss)
    assert speedup is not None
    speed = f"{speedup.value:.2f} times as fast as FP32 at batch {batch} ({speedup.low:.2f} to {speedup.high:.2f})"
    measured = f"{speed}, and {in_words(each.loss, task, config.max_loss, config.evidence)}"
    if not is_faster(each, config, batch):
        short = "slower" if speedup.high < 1 else "not faster"
        return GateResult(short, f"{speed}, less than the required {config.min_speedup:g}")
    if not keeps_quality(each, config):
        return GateResult(answer, measured)
    if not within_budget(each, config):
        return GateResult("over budget", f"{measured}; {budget_excess(each, config)}")
    taken = "" if answer == "passed" else " (taken anyway: export.when_in_doubt)"
    return GateResult("passed", measured + taken)


def within_budget(each: Contender, config: ExportConfig) -> bool:
    return not budget_excess(each, config)


def budget_excess(each: Contender, config: ExportConfig) -> str:
    """Return in words how a contender exceeds the budget; "" if its confidence limit is within."""
    if config.budget_mb and each.bytes > config.budget_mb * 1e6:
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
    if config.budget_mb and smallest.bytes > config.budget_mb * 1e6:
        raise UserError(
            f"export.budget_mb: no variant that may be deployed has at most {config.budget_mb:g} MB; {smallest.name} "
            f"comes closest: {budget_excess(smallest, config)}; raise it, or train a smaller model"
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
