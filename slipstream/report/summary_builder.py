"""Fills :mod:`slipstream.report.figures` from the results of the stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

from slipstream.artifacts.prepared.data import PreparedData, Signature
from slipstream.artifacts.results import export as exported
from slipstream.artifacts.results.compression import Compression
from slipstream.artifacts.results.evaluation import Evaluation
from slipstream.artifacts.results.promotion import Promotion
from slipstream.interconnect.profile import NetworkProfile
from slipstream.models.metrics import HEADLINE
from slipstream.report.figures import (
    DataFigures,
    NetworkFigures,
    QualityFigures,
    ScheduleFigures,
    StageFigures,
    VariantFigures,
)
from slipstream.report.stage_results import Results, quarantine_reasons
from slipstream.report.summary import DataSummary, ExportSummary, RunSummary

# What the directory of a run holds.
REPORT, MODEL, SUMMARY, PREPARED = "report.html", "model", "summary.json", "prepared"
CARD, CARD_DATA = "card.html", "card.json"
#: The recommended variant, under a name that does not depend on which it is.
MODEL_FILE = f"{MODEL}/model.onnx"


def run_summary(
    results: Results,
    stages: Sequence[StageFigures],
    directory: str,
    schedule: ScheduleFigures | None = None,
    promotion: Promotion | None = None,
    compression: Compression | None = None,
) -> RunSummary:
    """The figures of a whole run, whose directory is ``directory``."""
    metric = results.evaluation["metric"]["name"]
    return RunSummary(
        directory=directory,
        report=REPORT,
        model=MODEL,
        model_file=MODEL_FILE,
        data=data_figures(results.card, results.signature),
        quality=quality_figures(results.evaluation, metric),
        variants=[variant_figures(variant, metric) for variant in results.export["variants"]],
        chosen=results.export["chosen"],
        why=results.export["why"],
        ceiling=ceiling(results.export),
        machine=device(results.export),
        threads=results.export["machine"]["threads"],
        network=network_figures(results.network.profile) if results.network else None,
        stages=list(stages),
        schedule=schedule,
        promotion=promotion,
        compression=compression,
    )


def data_summary(
    prepared: PreparedData, stages: Sequence[StageFigures], directory: str, address: str = ""
) -> DataSummary:
    """The figures of a run that only prepares; ``address`` as of :func:`slipstream.report.data_engine.build_data`."""
    card = prepared.card
    return DataSummary(
        directory=directory,
        card=CARD,
        prepared=address or PREPARED,
        data=data_figures(card, prepared.signature),
        quarantined=quarantine_reasons(prepared.artifact),
        roles=dict(Counter(column["role"] for column in card["columns"]).most_common()),
        warnings=card["warnings"],
        stages=list(stages),
    )


def data_figures(card: Mapping[str, Any], signature: Signature) -> DataFigures:
    rows = card["rows"]
    return DataFigures(
        source=card["source"],
        target=signature.target,
        task=signature.task,
        classes=len(signature.classes),
        rows_read=rows["read"],
        rows_kept=rows["kept"],
        rows_quarantined=rows["quarantined"],
        rows_train=rows["train"],
        rows_validation=rows["validation"],
        rows_test=rows["test"],
    )


def quality_figures(evaluation: Evaluation, metric: str) -> QualityFigures:
    model, baseline = by_name(evaluation["model"]), by_name(evaluation["baseline"])
    return QualityFigures(
        metric=metric,
        value=cast(float, model[metric]),
        baseline=evaluation["baseline"]["name"],
        baseline_value=baseline.get(metric),
        model_metrics=model,
        baseline_metrics={name: baseline[name] for name in model if name in baseline},
    )


def by_name(scores: Mapping[str, Any]) -> dict[str, float | None]:
    """All scores by the names of their metrics."""
    return {name: score for name, score in scores.items() if not isinstance(score, str)}


def variant_figures(variant: exported.VariantFigures, metric: str) -> VariantFigures:
    latency, quality = variant.get("latency_ms", {}), variant.get("quality")
    return VariantFigures(
        name=variant["name"],
        file=variant["file"] or "",
        bytes=variant["bytes"],
        latency_p50_ms={batch: at["p50"]["value"] for batch, at in latency.items() if at["p50"]},
        latency_p90_ms={batch: at["p90"]["value"] for batch, at in latency.items() if at["p90"]},
        latency_p99_ms={batch: at["p99"]["value"] for batch, at in latency.items() if at["p99"]},
        speedup={batch: at["speedup"]["value"] for batch, at in latency.items() if "speedup" in at},
        speedup_low={batch: at["speedup"]["low"] for batch, at in latency.items() if "speedup" in at},
        value=by_name(variant.get("metrics", {})).get(metric),
        loss=quality["loss"] if quality else None,
        loss_low=quality["low"] if quality else None,
        loss_high=quality["high"] if quality else None,
        largest_difference=variant.get("largest_difference"),
        mean_difference=variant.get("mean_difference"),
        chosen=variant["chosen"],
        verdict=variant["verdict"],
        reason=variant["reason"],
    )


def device(export: exported.ExportReport) -> str:
    """What the variants ran on."""
    return export["machine"]["gpu"] or export["machine"]["cpu"]


def ceiling(export: exported.ExportReport) -> str:
    """What quantisation could gain at most at the batch size that decides, in words."""
    at = next(each for each in export["profile"] if each["batch"] == export["decided_at_batch"])
    return (
        f"Products are {100 * at['products']:.0f} % of FP32's time at batch {at['batch']}: if they took none at all, "
        f"the model would be {at['at_most']:.2f} times as fast"
    )


def export_summary(
    export: exported.ExportReport, target: str, stages: Sequence[StageFigures], directory: str
) -> ExportSummary:
    """The figures of a run that only exports, whose directory is ``directory``."""
    metric = HEADLINE[export["task"]][0]
    return ExportSummary(
        directory=directory,
        report=REPORT,
        model=MODEL,
        model_file=MODEL_FILE,
        target=target,
        metric=metric,
        variants=[variant_figures(variant, metric) for variant in export["variants"]],
        chosen=export["chosen"],
        why=export["why"],
        ceiling=ceiling(export),
        machine=device(export),
        threads=export["machine"]["threads"],
        stages=list(stages),
    )


def network_figures(profile: NetworkProfile) -> NetworkFigures:
    its, all_reduces = profile.fingerprint, profile.of("all_reduce")
    first, last = (all_reduces[0], all_reduces[-1]) if all_reduces else (None, None)
    return NetworkFigures(
        world=its.world,
        nodes=its.nodes,
        backend=its.backend,
        device=profile.topology.hosts[0].devices[0],
        all_reduce_latency_us=first.p50 * 1e6 if first else None,
        all_reduce_latency_bytes=first.bytes if first else None,
        all_reduce_busbw_gbps=last.busbw() if last else None,
        all_reduce_busbw_bytes=last.bytes if last else None,
        measured_at=profile.measured_at,
        findings=list(profile.topology.findings),
    )
