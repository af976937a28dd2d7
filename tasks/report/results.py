"""Everything that a run's stages found out, read from their artifacts."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.artifacts.format import Artifact
from tasks.artifacts.prepared import PreparedData, Signature
from tasks.report.summary import Quarantined


@dataclass(frozen=True)
class Results:
    """The contents of the stages' JSON files, and the artifacts of which files are taken over."""

    signature: Signature
    card: dict[str, Any]
    quarantined: list[Quarantined]
    history: dict[str, Any]
    #: How the attempts at training went, from the ledger.
    ledger: dict[str, Any]
    evaluation: dict[str, Any]
    export: dict[str, Any]
    network: dict[str, Any]
    prepared: Artifact
    exported: Artifact

    @classmethod
    def open(cls, prepared: Path, trained: Path, evaluated: Path, exported: Path, network: Path) -> Results:
        """Raises ``DamagedArtifact`` naming the first artifact that is not whole."""
        data = PreparedData.open(prepared)
        training, model = Artifact.open(trained, "train"), Artifact.open(exported, "export")
        return cls(
            data.signature,
            data.card,
            read_quarantine(data.artifact.read_bytes("quarantine.parquet")),
            training.read_json("history.json"),
            training.read_json("attempt.json")["ledger"],
            Artifact.open(evaluated, "evaluate").read_json("evaluation.json"),
            model.read_json("export.json"),
            Artifact.open(network, "collectives").read_json("profile.json"),
            data.artifact,
            model,
        )


def read_quarantine(parquet: bytes) -> list[Quarantined]:
    """The reasons of ``quarantine.parquet``, the most frequent first."""
    rows = pq.read_table(pa.BufferReader(parquet), columns=["file", "line", "column", "reason"]).to_pylist()
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        first.setdefault((row["reason"], row["column"]), row)
    counts = Counter((row["reason"], row["column"]) for row in rows).most_common()
    return [Quarantined(*why, number, first[why]["file"], first[why]["line"]) for why, number in counts]
