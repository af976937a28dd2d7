"""The choice of the variant to deploy: a pure function of the measured figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tasks.artifacts.exported import PairedTest
from tasks.export.config import ExportConfig
from tasks.models.metrics import HEADLINE


@dataclass(frozen=True)
class Candidate:
    """A variant to choose from: its median latency in ms at ``decide_at_batch``, and its accuracy or RMSE."""

    name: str
    p50: float
    metric: float


@dataclass(frozen=True)
class Decision:
    """The name of the variant to deploy, the reason, and a verdict on each candidate by its name."""

    chosen: str
    why: str
    verdicts: dict[str, str]


def loss(task: str, fp32: float, variant: float) -> float:
    """The loss of a variant against FP32, in points of accuracy or percent of RMSE; negative for a gain."""
    lost = fp32 - variant if HEADLINE[task][1] else (variant - fp32) / max(fp32, 1e-12)
    # Rounded, so that a loss of exactly the allowed size does not fail by the last bit of a subtraction.
    return round(100 * lost, 9)


def decide(task: str, fp32: Candidate, others: Sequence[Candidate], config: ExportConfig) -> Decision:
    """Choose the fastest candidate that loses at most ``max_loss`` and is faster by ``min_speedup``; otherwise FP32."""
    unit = "points of accuracy" if HEADLINE[task][1] else "% of RMSE"
    batch = config.decide_at_batch
    verdicts, passed = {}, {}
    for other in others:
        lost, speedup = loss(task, fp32.metric, other.metric), fp32.p50 / other.p50
        measured = (
            f"{speedup:.2f} times as fast as {fp32.name} at batch {batch} ({other.p50:.3g} against {fp32.p50:.3g} ms) "
            f"and {'loses' if lost >= 0 else 'gains'} {abs(lost):.2f} {unit}"
        )
        objections = []
        if not lost <= config.max_loss:
            objections.append(f"it may lose at most {config.max_loss:g}")
        if not (speedup > 1 and speedup >= config.min_speedup):
            wanted = f"at least {config.min_speedup:g} times as fast" if config.min_speedup > 1 else "faster"
            objections.append(f"it must be {wanted}")
        verdicts[other.name] = f"{measured}: {'rejected, ' + ' and '.join(objections) if objections else 'passed'}"
        if not objections:
            passed[other.name] = other.p50
    chosen = min(passed, key=lambda name: passed[name]) if passed else fp32.name
    if passed:
        why = f"{chosen} is {verdicts[chosen].removesuffix(': passed')}"
    elif others:
        why = f"{fp32.name} stays: " + "; ".join(f"{name} is {verdict}" for name, verdict in verdicts.items())
    else:
        why = f"{fp32.name} stays: no other variant could be made"
    return Decision(chosen, why, verdicts)


def significance(task: str, truth: np.ndarray, fp32: np.ndarray, variant: np.ndarray) -> PairedTest:
    """Test whether two variants differ by more than chance on the same rows; both outputs are ``[rows, outputs]``.

    Classification: McNemar's exact test on the rows that only one predicts correctly. Regression: Wilcoxon's signed
    rank test on the absolute errors. ``p`` is two-sided, and 1 if the variants never differ.
    """
    from scipy.stats import binomtest, wilcoxon

    if task == "classification":
        right_fp32, right_variant = (outputs.argmax(axis=1) == truth for outputs in (fp32, variant))
        only_fp32, only_variant = int(np.sum(right_fp32 & ~right_variant)), int(np.sum(right_variant & ~right_fp32))
        disagreeing = only_fp32 + only_variant
        p = float(binomtest(only_fp32, disagreeing).pvalue) if disagreeing else 1.0
        return {"only_fp32_right": only_fp32, "only_variant_right": only_variant, "p": p}
    worse = np.abs(variant[:, 0] - truth) - np.abs(fp32[:, 0] - truth)
    return {"p": float(wilcoxon(worse).pvalue) if np.any(worse) else 1.0}
