"""Results of a run's stages, read from their artifacts."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.pipeline.report.figures import DataFigures, NetworkFigures, Quarantined
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.card import Card
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.records import read_record
from slipstream.shared.artifacts.results.devices import TrainingDevices
from slipstream.shared.artifacts.results.evaluation import KIND as EVALUATED
from slipstream.shared.artifacts.results.evaluation import Evaluation, read_evaluation
from slipstream.shared.artifacts.results.export import KIND as EXPORTED
from slipstream.shared.artifacts.results.export import ExportReport, read_export
from slipstream.shared.artifacts.results.training import KIND as TRAINED
from slipstream.shared.artifacts.results.training import (
    Attempt,
    History,
    Operations,
    read_attempt,
    read_devices,
    read_history,
    read_operations,
)
from slipstream.shared.interconnect.profile import (
    COURSE,
    KIND,
    MODEL,
    ModelPoint,
    NetworkProfile,
    TrendPoint,
    read_profile,
)
from slipstream.shared.source.given_splits import DRAWN
from slipstream.shared.source.quarantine import QuarantinedRows, read_quarantine

#: Number of quarantined rows that the data card lists; quarantine.parquet has all.
ROWS_SHOWN = 50


@dataclass(frozen=True)
class NetworkResults:
    """Interconnect profile and additional chart data."""

    profile: NetworkProfile
    #: Largest all_reduce of every profile of this hardware, oldest first.
    course: list[TrendPoint]
    #: Time of all_reduce by size that a fitted model predicts; empty if the model does not fit.
    model: list[ModelPoint]

    @classmethod
    def open(cls, directory: Path) -> NetworkResults:
        """Read the artifact of the interconnect benchmark.

        Raises ``DamagedArtifact`` if the directory is damaged.
        """
        profile, artifact = read_profile(directory), Artifact.open(directory, KIND)
        course = read_record(artifact, COURSE, list[TrendPoint])
        return cls(profile, course, read_record(artifact, MODEL, list[ModelPoint]))


@dataclass(frozen=True)
class StageResults:
    """Contents of the stages' JSON files, and artifacts whose files are copied."""

    signature: Signature
    card: Card
    quarantined: list[Quarantined]
    history: History
    attempt: Attempt
    #: None if no steps were profiled.
    operations: Operations | None
    #: None if nothing was sampled.
    devices: TrainingDevices | None
    evaluation: Evaluation
    export: ExportReport
    #: None if the interconnect benchmark failed.
    network: NetworkResults | None
    prepared: Artifact
    trained: Artifact
    exported: Artifact
    #: Fingerprints of all artifacts that were read.
    fingerprints: list[str]

    @classmethod
    def open(
        cls, prepared: Path, trained: Path, evaluated: Path, exported: Path, network: Path | None = None
    ) -> StageResults:
        """Read the results of all stages.

        Raises ``DamagedArtifact`` naming the first damaged artifact.
        """
        data = PreparedData.open(prepared)
        artifacts = (data.artifact, Artifact.open(trained, TRAINED), Artifact.open(exported, EXPORTED))
        others = [Artifact.open(evaluated, EVALUATED), *([Artifact.open(network, KIND)] if network else [])]
        return cls(
            data.signature,
            data.card,
            quarantine_reasons(data.artifact),
            read_history(trained),
            read_attempt(trained),
            read_operations(trained),
            read_devices(trained),
            read_evaluation(evaluated),
            read_export(exported),
            NetworkResults.open(network) if network else None,
            *artifacts,
            [artifact.fingerprint for artifact in (*artifacts, *others)],
        )


def data_figures(card: Card, signature: Signature) -> DataFigures:
    counted = ("read", "kept", "quarantined", "train", "validation", "test")
    rows = {f"rows_{name}": card["rows"][name] for name in counted}
    text = {"unit": "document", "tokens": card["tokens"]["train"]} if "tokens" in card else {}
    classes, answers = len(signature.classes), answers_sentence(card)
    drawn = [each for each in card["warnings"] if each.endswith(DRAWN)]
    return DataFigures(
        card["source"], signature.target, signature.task, classes, **rows, **text, answers=answers, drawn=drawn
    )


#: Answers that are learned, by the rule of the data card.
RULES = {
    "marked": "those that the chat template marks",
    "all": "all",
    "last": "the last, since the chat template shows answers differently once others follow (see data.answers)",
}


def answers_sentence(card: Card) -> str:
    if "answers" not in card:
        return ""
    found = card["answers"]
    rules = {RULES[name]: rows for name, rows in found["rows"].items() if rows}
    chosen = [f"{rule} (in {fmt.rows(rows)})" if len(rules) > 1 else rule for rule, rows in rules.items()]
    others = fmt.count(found["not_learned"]) if found["not_learned"] else "none"
    return f"{fmt.count_with_noun(found['learned'], 'answer')} learned, {others} not learned; rule: {'; '.join(chosen)}"


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
        short=profile.short,
    )


def quarantine_reasons(prepared: Artifact) -> list[Quarantined]:
    found = sorted(QuarantinedRows.counted(read_quarantine(prepared)).reasons, key=lambda each: -each.rows)
    return [Quarantined(it.first.reason, it.first.column, it.rows, it.first.file, it.first.line) for it in found]


def quarantined_rows(prepared: Artifact) -> list[dict[str, Any]]:
    """Return the first ``ROWS_SHOWN`` quarantined rows: ``file``, ``line``, ``column``, ``reason`` and ``raw``."""
    return [asdict(row) for row in islice(read_quarantine(prepared), ROWS_SHOWN)]
