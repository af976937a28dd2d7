"""Promotion of a new model that passes a comparison with the model in service on the same test rows."""

from __future__ import annotations

import tempfile
from pathlib import Path

from slipstream.pipeline.promote.comparison import ComparedPackage, Incomparable, PairedPredictions, paired_predictions
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import PromotionPointer, Registry, manifest_digest, package_version
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import Promotion, PromotionDecision
from slipstream.shared.comparison.quality import in_words, paired_loss, passes_gate


def evaluate_promotion(
    package: Path, registry: Registry, data: PreparedData, config: PromotionConfig
) -> PromotionDecision:
    """Decide whether to promote an exported model, compared with the promoted one on ``data``, which it was made from.

    Raises ``UserError`` if files of either model are missing or damaged.
    """
    version, served = package_version(package), registry.promoted()
    if served is None:
        return PromotionDecision(True, 1, "it is the first in this registry")
    number = served.number + 1
    try:
        with tempfile.TemporaryDirectory() as scratch:
            old = registry.fetch(served, Path(scratch, "model"))
            if served.version == version:
                return PromotionDecision(False, number, f"it is version {version}, which is already in service")
            paired = paired_predictions(ComparedPackage(package), ComparedPackage(old), data)
    except Incomparable as reason:
        return PromotionDecision(False, number, f"it cannot be compared with version {served.version}: {reason}")
    return promotion_decision(paired, data.signature.task, served, config)


def promotion_decision(
    paired: PairedPredictions, task: str, served: PromotionPointer, config: PromotionConfig
) -> PromotionDecision:
    loss = paired_loss(task, paired.truth, paired.old, paired.new, config.max_loss)
    answer = loss.answer(config.max_loss)
    passed = passes_gate(answer, config.when_in_doubt)
    why = f"against version {served.version}: {in_words(loss, task, config.max_loss, 'test')}"
    if paired.left_out:
        why += f"; {paired.left_out} rows are skipped because that version may know their texts from training"
    if passed and answer != "passed":
        why += " (taken anyway: promotion.when_in_doubt)"
    return PromotionDecision(passed, served.number + 1, why)


def promote_package(
    package: Path, registry: Registry, data: PreparedData, config: PromotionConfig, passed: PromotionDecision
) -> Promotion:
    """Store the model, and put it in service if the decision ``passed`` is positive.

    If another run has promoted a model meanwhile, the comparison is repeated with that model. A retry accepts the
    promotion by a killed attempt.
    """
    version = registry.add(package, Path(config.signing_key) if config.signing_key else None)
    while passed.passed:
        if registry.point(passed.number, version, manifest_digest(package), passed.why):
            return Promotion(True, registry.uri, version, passed.why)
        served = registry.promoted()
        if served is not None and served.version == version:
            return Promotion(True, registry.uri, version, served.why)
        passed = evaluate_promotion(package, registry, data, config)
    return Promotion(False, registry.uri, version, passed.why)
