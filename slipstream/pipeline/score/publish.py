"""Publication of scored tables: parts, then manifest, then a create-only pointer.

``tables/<key>/`` holds parts and manifest, under names with their digests. ``published/<key>.json`` points to the
manifest and publishes the table. Before, the table does not exist; afterwards, none of its files is written again. A
killed run leaves unreferenced files, which the next run of the same key removes.
"""

from __future__ import annotations

import hashlib
import re
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.part import ScoredPart, ScorePartJob, score_part, table_prefix
from slipstream.pipeline.score.plan import ScoringPlan, plan_scoring, public_key, table_settings
from slipstream.pipeline.score.predict import measure_drift
from slipstream.shared.artifacts.format import MANIFEST, Artifact, ArtifactWriter, Manifest
from slipstream.shared.artifacts.records import decode_record, from_tree, to_json, to_tree
from slipstream.shared.artifacts.results.scoring import KIND, Publication, QuarantineCount, ScoredTable
from slipstream.shared.artifacts.workspaces import temporary_workspace
from slipstream.shared.distributed.pool import WorkerPool, workers_for
from slipstream.shared.errors import UserError
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import files_unchanged
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.storage import MissingObject, Storage, list_names, storage_for, try_create
from slipstream.shared.storage.local import LocalStorage

PUBLISHED = "published/"
POINTER = re.compile(rf"{PUBLISHED}([0-9a-f]{{16}})\.json")
SET_ASIDE = "set-aside-"
#: Maximum number of reasons in the manifest; the file of quarantined rows has all.
REASONS = 8


def publish_table(plan: ScoringPlan, parts: Sequence[ScoredPart], model: ServedModel) -> tuple[Publication, bool]:
    """Publish the table of all ``parts``; return its publication, and False if another run came first.

    Raises ``UserError`` and publishes nothing if there are no rows or too many were quarantined.
    """
    parts = sorted(parts, key=lambda part: part.number)
    if [part.number for part in parts] != [portion.number for portion in plan.portions]:
        raise RuntimeError(f"{len(parts)} of {len(plan.portions)} parts were scored")
    table, bad = table_of(plan, parts, model), [row for part in parts for row in part.bad]
    storage = storage_for(plan.output)
    with tempfile.TemporaryDirectory() as scratch:
        writer = ArtifactWriter(Path(scratch, "table"))
        for part in parts:
            if part.file:
                writer.note(part.name, part.file)
        content = quarantine.to_parquet(bad)
        aside = f"{SET_ASIDE}{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        writer.write_bytes(aside, content)
        writer.write_manifest(KIND, to_tree(table))
        manifest = (writer.directory / MANIFEST).read_bytes()
    digest = hashlib.sha256(manifest).hexdigest()
    storage.put(f"{table_prefix(plan.key)}{aside}", content)
    storage.put(f"{table_prefix(plan.key)}{manifest_name(digest)}", manifest)
    number = 1 + max((each.number for each in list_publications(plan.output)), default=0)
    at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    publication = Publication(number, plan.key, digest, plan.model.version, at, uuid.uuid4().hex)
    new = try_create(storage, pointer_key(plan.key), to_json(publication))
    if not new:
        publication = read_pointer(plan.output, plan.key)
    remove_leftovers(plan.output, publication)
    return publication, new


def table_of(plan: ScoringPlan, parts: Sequence[ScoredPart], model: ServedModel) -> ScoredTable:
    """Return the table's record for its manifest.

    Raises ``UserError`` as :func:`publish_table`.
    """
    rows, bad = sum(part.rows for part in parts), [row for part in parts for row in part.bad]
    address = plan.source.address
    if not rows:
        raise UserError(f"data: {address!r} has no rows; expected at least one row to score")
    if absent := set.intersection(*(set(part.absent) for part in parts if part.rows)):
        raise UserError(f"data: no row of {address!r} has a value of the requested column {min(absent)!r}")
    quarantine.check_limit(bad, rows, plan.source.config.quarantine_limit)
    counts: dict[str, np.ndarray] = {}
    for part in parts:
        for name, counted in part.counts.items():
            counts[name] = counts[name] + counted if name in counts else counted
    return ScoredTable(
        key=plan.key,
        data=plan.fingerprint,
        model=plan.model.version,
        model_manifest=plan.model.manifest,
        by=plan.by,
        target=model.signature.target,
        classes=list(model.signature.classes),
        settings=table_settings(plan.source.config, plan.config),
        rows=rows,
        scored=sum(part.scored for part in parts),
        set_aside=len(bad),
        reasons=reasons_of(bad),
        drift=measure_drift(model.distributions, counts, plan.config.drift),
    )


def reasons_of(bad: Sequence[BadRow]) -> list[QuarantineCount]:
    first: dict[tuple[str, str], BadRow] = {}
    for row in bad:
        first.setdefault((row.reason, row.column), row)
    frequent = Counter((row.reason, row.column) for row in bad).most_common(REASONS)
    return [
        QuarantineCount(n, reason, column, first[reason, column].file, first[reason, column].line)
        for (reason, column), n in frequent
    ]


def remove_leftovers(output: str, publication: Publication) -> None:
    """Remove files that killed or slower runs left beneath a published table."""
    storage, prefix = storage_for(output), table_prefix(publication.key)
    manifest = read_manifest(output, publication)
    known = {*manifest.files, manifest_name(publication.manifest)}
    storage.delete(key for key in storage.list(prefix) if key.removeprefix(prefix) not in known)


# Published tables


def pointer_key(key: str) -> str:
    return f"{PUBLISHED}{key}.json"


def manifest_name(digest: str) -> str:
    return f"manifest-{digest[:16]}.json"


def list_publications(output: str) -> list[Publication]:
    """Return all publications, the newest last; unrelated files are ignored."""
    matches = [match[1] for match in map(POINTER.fullmatch, storage_for(output).list(PUBLISHED)) if match]
    return sorted((read_pointer(output, key) for key in matches), key=lambda each: (each.number, each.at, each.key))


def find_publication(output: str, key: str) -> Publication | None:
    """Return the publication with this key, if it exists."""
    try:
        return read_pointer(output, key)
    except MissingObject:
        return None


def read_pointer(output: str, key: str) -> Publication:
    where = pointer_key(key)
    with tempfile.TemporaryDirectory() as scratch:
        text = storage_for(output).get(where, Path(scratch)).read_bytes()
    publication = decode_record(text, Publication)
    if publication and publication.key == key:
        return publication
    raise UserError(f"{output}/{where}: not a publication of scoring; delete it")


def read_manifest(output: str, publication: Publication) -> Manifest:
    """Return the manifest.

    Raises ``UserError`` if it is not the published one.
    """
    name = f"{table_prefix(publication.key)}{manifest_name(publication.manifest)}"
    with tempfile.TemporaryDirectory() as scratch:
        raw = storage_for(output).get(name, Path(scratch)).read_bytes()
    if hashlib.sha256(raw).hexdigest() != publication.manifest:
        raise UserError(f"{output}/{name}: its SHA-256 differs from the published one: it was changed; restore it")
    return Manifest.parse(raw, f"{output}/{name}")


def read_scored(output: str, publication: Publication) -> ScoredTable:
    """Return the record in a table's manifest.

    Raises ``UserError`` on failure.
    """
    return from_tree(
        read_manifest(output, publication).made_by, ScoredTable, f"{output}: the manifest of {publication.key}"
    )


def check_there(output: str, publication: Publication) -> None:
    """Raise ``UserError`` unless all files of a table exist with the recorded sizes."""
    where = f"{output.rstrip('/')}/{table_prefix(publication.key)}".rstrip("/")
    there = list_names(where)
    for name, record in read_manifest(output, publication).files.items():
        if name not in there:
            raise UserError(f"{where}/{name}: missing, though the manifest lists it; restore it")
        if there[name].size != record.size:
            raise UserError(f"{where}/{name}: {there[name].size} bytes, the manifest says {record.size}; restore it")


def fetch_table(output: str, publication: Publication, directory: Path) -> Artifact:
    """Copy a table to the fresh ``directory`` and verify every byte.

    Raises ``UserError`` on failure.
    """
    storage, prefix = storage_for(output), table_prefix(publication.key)
    manifest = read_manifest(output, publication)
    directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as scratch:
        for name in [*manifest.files, manifest_name(publication.manifest)]:
            stored = storage.get(f"{prefix}{name}", Path(scratch))
            target = directory / (name if name in manifest.files else MANIFEST)
            target.write_bytes(stored.read_bytes())
    return Artifact.open(directory, KIND).check_sha256()


@dataclass(frozen=True)
class ScoredShare:
    """Results of one worker's portions."""

    parts: list[ScoredPart]


def score_data(
    registry: str,
    data: str,
    output: str,
    reading: DataConfig,
    config: ScoringConfig,
    package: str = "",
    workers: int | None = None,
) -> tuple[Publication, bool]:
    """Score ``data`` and publish the table in ``output``.

    The model is the promoted one of ``registry``, or the exported ``package``. Returns the publication, and True if it
    is new. Raises ``UserError`` for invalid input.
    """
    plan = plan_scoring(registry, package, data, output, reading, config)
    there = find_publication(output, plan.key)
    if there:
        return there, False
    parts = score_portions(plan, workers)
    with fetched_model(plan) as model:
        return publish_table(plan, parts, model)


def score_portions(plan: ScoringPlan, workers: int | None = None) -> list[ScoredPart]:
    """Score the portions of a plan and store their parts.

    By default the number of processes follows from the amount of data; every session has one thread.
    """
    if not plan.portions:
        return []
    files = [file for portion in plan.portions for file in portion.files]
    count = workers_for(plan.size, plan.source.config.memory) if workers is None else workers
    with (
        files_unchanged(files),
        fetched_model(plan) as model,
        scratch_of(storage_for(plan.output)) as scratch,
        closing(WorkerPool(min(count, len(plan.portions)), "slipstream.pipeline.score.part")) as processes,
    ):
        jobs = (ScorePartJob(plan, portion, model.directory, Path(scratch)) for portion in plan.portions)
        return list(processes.map(score_part, jobs))


@contextmanager
def fetched_model(plan: ScoringPlan) -> Iterator[ServedModel]:
    """Yield the plan's model, verified, until the block ends."""
    with tempfile.TemporaryDirectory() as scratch:
        yield plan.model.fetch(Path(scratch, "model"), public_key(plan.config))


def scratch_of(storage: Storage) -> AbstractContextManager[Path | str]:
    """Return a directory for parts.

    For a local output it is in the output's file system, and a later run removes it if this process is killed. For a
    store it is temporary.
    """
    if isinstance(storage, LocalStorage):
        return temporary_workspace(storage.scratch())
    return tempfile.TemporaryDirectory(dir=storage.scratch())
