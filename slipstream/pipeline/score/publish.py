"""Publication of scored tables: parts, then manifest, then a create-only pointer.

``tables/<key>/`` holds parts and, hidden from readers of Parquet by ``_``, manifest and quarantined rows, under names
with their digests. ``published/<key>.json`` publishes the table; its files are written again only if they are lost. For
other bytes, ``published/<key>-2.json`` does; the highest number counts. The key's next run removes files of killed
runs.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from slipstream.pipeline.promote.store import scratch_of
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.part import ScoredPart, ScorePartJob, score_part, table_prefix
from slipstream.pipeline.score.plan import ScoringPlan, plan_scoring, public_key, table_settings
from slipstream.pipeline.score.predict import measure_drift
from slipstream.shared.artifacts.format import MANIFEST, Artifact, ArtifactWriter, Manifest, hash_file
from slipstream.shared.artifacts.records import decode_record, from_tree, to_json, to_tree
from slipstream.shared.artifacts.results.scoring import KIND, Publication, QuarantineCount, ScoredTable
from slipstream.shared.distributed.pool import WorkerPool, workers_for
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.source import quarantine
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import files_unchanged
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.storage import MissingObject, list_names, storage_for, try_create
from slipstream.shared.storage.base import CONCURRENCY

LOG = logger("score")
PUBLISHED = "published/"
POINTER = re.compile(rf"{PUBLISHED}([0-9a-f]{{16}})(?:-([2-9]|[1-9]\d{{1,8}}))?\.json")
QUARANTINE = "_quarantine/"
#: Name of quarantined rows in tables that earlier versions published.
EARLIER_QUARANTINE = re.compile(r"set-aside-([0-9a-f]{16}\.parquet)")
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
        aside = f"{QUARANTINE}{hashlib.sha256(content).hexdigest()[:16]}.parquet"
        writer.write_bytes(aside, content)
        writer.write_manifest(KIND, to_tree(table))
        manifest = (writer.directory / MANIFEST).read_bytes()
    digest = hashlib.sha256(manifest).hexdigest()
    storage.put(f"{table_prefix(plan.key)}{aside}", content)
    storage.put(f"{table_prefix(plan.key)}{manifest_names(digest)[0]}", manifest)
    pointers = storage.list(PUBLISHED)
    there = newest_pointers(pointers).get(plan.key, 0)
    # Lost files have just been written again, so the table may be whole.
    found = find_table(plan.output, plan.key, there)
    publication, new = found.publication, False
    if publication is None or found.why:
        at = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
        publication = Publication(1 + len(pointers), plan.key, digest, plan.model.version, at, uuid.uuid4().hex)
        where = pointer_key(plan.key, there + 1)
        new = try_create(storage, where, to_json(publication))
        if not new:
            publication = read_pointer(plan.output, where)
        elif there:
            LOG.warning("%s: published again as number %d of its key, as %s", where, there + 1, found.why)
    found = check_table(plan.output, publication)
    storage.delete(found.leftovers)
    return publication, new


def table_of(plan: ScoringPlan, parts: Sequence[ScoredPart], model: ServedModel) -> ScoredTable:
    """Return the table's record for its manifest.

    Raises ``UserError`` as :func:`publish_table`.
    """
    rows, bad = sum(part.rows for part in parts), [row for part in parts for row in part.bad]
    address = plan.source.address
    if not rows:
        raise UserError(f"data: {address!r} has no rows; expected at least one row to score")
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


# Published tables


class DamagedTable(UserError):
    """Error for a published table or pointer that lost or changed a file."""


@dataclass(frozen=True)
class FoundTable:
    """Published table of a key, None if there is none.

    ``why`` is the reason why it cannot be used, or "". ``leftovers`` are keys of files that other runs left.
    """

    publication: Publication | None
    why: str = ""
    leftovers: tuple[str, ...] = ()


def pointer_key(key: str, number: int) -> str:
    """Return the key of the pointer to table ``number`` of ``key``, from 1."""
    return f"{PUBLISHED}{key}-{number}.json" if number > 1 else f"{PUBLISHED}{key}.json"


def manifest_names(digest: str) -> tuple[str, str]:
    """Return the name of a table's manifest, and the name in tables that earlier versions published."""
    name = f"manifest-{digest[:16]}.json"
    return f"_{name}", name


def newest_pointers(names: Sequence[str]) -> dict[str, int]:
    numbers: dict[str, int] = {}
    for match in filter(None, map(POINTER.fullmatch, names)):
        numbers[match[1]] = max(numbers.get(match[1], 0), int(match[2] or 1))
    return numbers


def list_publications(output: str) -> list[Publication]:
    """Return the publications of all keys, the newest last; damaged pointers are skipped with one warning."""
    newest = newest_pointers(storage_for(output).list(PUBLISHED))

    def read(key: str) -> Publication | DamagedTable:
        try:
            return read_pointer(output, pointer_key(key, newest[key]))
        except DamagedTable as error:
            return error

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        read_all = list(pool.map(read, newest))
    if damaged := [each for each in read_all if isinstance(each, DamagedTable)]:
        more = f"; so are {len(damaged) - 1} more" if damaged[1:] else ""
        LOG.warning("%s%s", damaged[0], more)
    found = [each for each in read_all if isinstance(each, Publication)]
    return sorted(found, key=lambda each: (each.at, each.number, each.key))


def find_publication(output: str, key: str) -> Publication | None:
    """Return the publication of this key if its table is whole, without leftovers; see :func:`check_table`."""
    storage = storage_for(output)
    found = find_table(output, key, newest_pointers(storage.list(f"{PUBLISHED}{key}")).get(key, 0))
    if found.why:
        LOG.warning("scoring again, as %s", found.why)
        return None
    if found.leftovers:
        storage.delete(found.leftovers)
    return found.publication


def find_table(output: str, key: str, number: int) -> FoundTable:
    if not number:
        return FoundTable(None)
    try:
        return check_table(output, read_pointer(output, pointer_key(key, number)))
    except DamagedTable as error:
        return FoundTable(None, str(error))


def check_table(output: str, publication: Publication) -> FoundTable:
    """Compare a table with its manifest: the manifest's digest, presence and size of every file, by one listing."""
    prefix = table_prefix(publication.key)
    where = f"{output.rstrip('/')}/{prefix}".rstrip("/")
    there = list_names(where)
    try:
        files = read_manifest(output, publication).files
    except DamagedTable as error:
        return FoundTable(publication, str(error))
    for name, record in files.items():
        if name not in there:
            return FoundTable(publication, f"{where}/{name} is missing")
        if there[name].size != record.size:
            return FoundTable(publication, f"{where}/{name} has {there[name].size} bytes instead of {record.size}")
    known = {*files, *manifest_names(publication.manifest)}
    return FoundTable(publication, "", tuple(f"{prefix}{name}" for name in there if name not in known))


def read_pointer(output: str, where: str) -> Publication:
    """Return the publication at the key ``where``. Raises ``DamagedTable`` for another content."""
    with tempfile.TemporaryDirectory() as scratch:
        text = storage_for(output).get(where, Path(scratch)).read_bytes()
    publication, match = decode_record(text, Publication), POINTER.fullmatch(where)
    if publication and match and publication.key == match[1]:
        return publication
    raise DamagedTable(f"{output}/{where} is not a publication of scoring")


def read_manifest(output: str, publication: Publication) -> Manifest:
    storage, prefix = storage_for(output), table_prefix(publication.key)
    names = manifest_names(publication.manifest)
    raw = None
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            with suppress(MissingObject):
                raw = storage.get(f"{prefix}{name}", Path(scratch)).read_bytes()
                break
    where = f"{output}/{prefix}{name if raw else names[0]}"
    if raw is None:
        raise DamagedTable(f"{where} is missing")
    if hashlib.sha256(raw).hexdigest() != publication.manifest:
        raise DamagedTable(f"{where} was changed: its SHA-256 is not the published one")
    return Manifest.parse(raw, where)


def read_scored(output: str, publication: Publication) -> ScoredTable:
    """Return the record in a table's manifest.

    Raises ``UserError`` on failure.
    """
    return from_tree(
        read_manifest(output, publication).made_by, ScoredTable, f"{output}: the manifest of {publication.key}"
    )


def verify_table(output: str, publication: Publication, read_bytes: bool) -> None:
    why = check_table(output, publication).why
    storage, prefix = storage_for(output), table_prefix(publication.key)
    for name, record in read_manifest(output, publication).files.items() if read_bytes and not why else ():
        with tempfile.TemporaryDirectory() as scratch:
            if hash_file(storage.get(f"{prefix}{name}", Path(scratch))).sha256 != record.sha256:
                why = f"{output}/{prefix}{name} was changed: its SHA-256 is not the recorded one; delete it"
    if why:
        raise UserError(f"{why}; score the same data again: files that are missing are made again")


def fetch_table(output: str, publication: Publication, directory: Path) -> Artifact:
    """Copy a table to the fresh ``directory``, under the names of this version, and verify every byte.

    Raises ``UserError`` on failure.
    """
    storage, prefix = storage_for(output), table_prefix(publication.key)
    manifest, writer = read_manifest(output, publication), ArtifactWriter(directory)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".fetch-") as scratch:
        for name, record in manifest.files.items():
            target = directory / EARLIER_QUARANTINE.sub(rf"{QUARANTINE}\1", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(storage.get(f"{prefix}{name}", Path(scratch)), target)
            writer.note(target.relative_to(directory).as_posix(), record)
    artifact = writer.finish(KIND, manifest.made_by).check_sha256()
    (directory / MANIFEST).rename(directory / f"_{MANIFEST}")
    return artifact


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

    By default the number of processes follows from the data; sessions have one thread.
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
