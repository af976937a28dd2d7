"""Incremental preparation: new files become further segments of prepared data, with its statistics unchanged."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import pyarrow as pa

from slipstream.pipeline.prepare.card import with_drifts
from slipstream.pipeline.prepare.drift import drift_from
from slipstream.pipeline.prepare.fit.fit import (
    CATEGORICAL,
    CONSTANT,
    DOCUMENT,
    IDENTIFIER,
    PROSE,
    TIME,
    USED,
    WEIGHT,
    ColumnRole,
    FittedColumns,
)
from slipstream.pipeline.prepare.fit.scan_result import ScanResult
from slipstream.pipeline.prepare.fit.splits import Cuts
from slipstream.shared.artifacts.format import (
    MANIFEST,
    Artifact,
    ArtifactWriter,
    DamagedArtifact,
    FileRecord,
    hash_file,
)
from slipstream.shared.artifacts.prepared.card import DataCard, read_card
from slipstream.shared.artifacts.prepared.data import KIND, PreparedData, segment_number
from slipstream.shared.artifacts.prepared.streamed import ROWS, make_hole
from slipstream.shared.comparison.stability import significant_drifts
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.settings import counted_settings
from slipstream.shared.source import quarantine
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.identity import ROW_HASH, comparable_rules
from slipstream.shared.source.columns.number_formats import CASTS, DECLARED
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.config import ColumnType, DataConfig
from slipstream.shared.source.files import SourceFile
from slipstream.shared.source.quarantine import BadRow
from slipstream.shared.source.resolved import digest_files
from slipstream.shared.storage import S3, STORES, copy_within_s3, list_names, open_reader, storage_for

#: Parsed JSON object.
Json: TypeAlias = dict[str, Any]
#: Data card of the data that the statistics were fitted on, if a base set was itself extended.
REFERENCE = "reference.json"
#: Settings that must equal the base set's, since they decide the splits and the meaning of values.
LASTING = ("drop", "id", "group", "time", "weight", "split", "missing", "decimal", "thousands")
DECLARED_AS: dict[str, ColumnType] = {
    value_types.NUMBER: "number",
    value_types.BOOLEAN: "boolean",
    value_types.TIME: "date",
    value_types.DAY_FIRST: "day-first date",
    value_types.MONTH_FIRST: "month-first date",
    value_types.TEXT: "text",
}
#: Roles of columns whose values are used, not only hashed.
READ = (*USED, TIME, WEIGHT)
#: Roles that a text column can get, and the roles possible under every declaration in ``data.types``.
JUDGED = (CATEGORICAL, CONSTANT, DOCUMENT, IDENTIFIER, PROSE)
ROLES: dict[str, tuple[str, ...]] = {
    "text": (CATEGORICAL, CONSTANT, IDENTIFIER, PROSE),
    "category": (CATEGORICAL, CONSTANT),
    "document": (DOCUMENT,),
}


@dataclass(frozen=True)
class FileSet:
    """Files prepared together: relative paths with sizes, and one fingerprint of all."""

    fingerprint: str
    files: list[tuple[str, int]]


@dataclass(frozen=True)
class TableSchema:
    """Contents of ``schema.json``.

    It holds the columns with type and role, the settings and times that decide splits, the prepared files, and
    :attr:`.ScanResult.gaps`.
    """

    columns: list[dict[str, str]]
    target: str
    settings: DataConfig
    cuts: Cuts | None
    sources: list[FileSet]
    gaps: list[int]
    #: As in :class:`.SplitRule`.
    drawn: list[int] | None = None
    #: :meth:`.SplitOverlap.held_out`, if the data give the test split; None in earlier versions.
    held_out: str | None = None

    @property
    def dropped(self) -> set[str]:
        return {column["name"] for column in self.columns if column["role"] == "dropped"}

    @property
    def types(self) -> dict[str, str]:
        return {column["name"]: column["type"] for column in self.columns}

    def to_json(self) -> Json:
        return {
            "columns": self.columns,
            "target": self.target,
            "missing": self.settings.missing,
            "settings": {name: setting_value(self.settings, name) for name in LASTING},
            "cuts": self.cuts,
            "row_hash": ROW_HASH,
            "gaps": self.gaps,
            "sources": [vars(files) for files in self.sources],
            **({} if self.drawn is None else {"drawn": self.drawn}),
            **({} if self.held_out is None else {"held_out": self.held_out}),
        }

    @classmethod
    def from_json(cls, schema: Json) -> TableSchema:
        try:
            settings, cuts = DataConfig.from_dict(schema["settings"]), schema["cuts"]
        except UserError as error:  # names the user's own settings
            raise TypeError("settings") from error
        sources = [FileSet(of["fingerprint"], [(path, size) for path, size in of["files"]]) for of in schema["sources"]]
        gaps = [int(count) for count in schema.get("gaps", [])]
        if len(gaps) != (0 if cuts else len(settings.identities)):
            raise ValueError("gaps")
        drawn = schema.get("drawn")
        if settings.split.is_given is (drawn is None):
            raise ValueError("drawn")
        held_out = schema.get("held_out")
        if held_out is not None:
            int(held_out, 16)
        cut = cuts and (cuts[0], cuts[1])
        return cls(
            schema["columns"],
            schema["target"],
            settings,
            cut,
            sources,
            gaps,
            None if drawn is None else [int(n) for n in drawn],
            held_out,
        )


@dataclass(frozen=True)
class BaseSet:
    """Prepared data of an earlier run at ``data.earlier``, without its rows."""

    address: str
    schema: TableSchema
    transform: Transform
    card: Json
    #: Data card of the data that the statistics were fitted on.
    reference: Json
    #: Files in its manifest.
    files: dict[str, FileRecord]
    fingerprint: str
    made_by: Json

    @classmethod
    def open(cls, address: str) -> BaseSet:
        """Open and verify all files except the rows, for which see :meth:`verify_part`.

        Raise ``UserError`` for damaged or unsuitable data.
        """
        remote = address.startswith(STORES)
        try:
            with TemporaryDirectory() as fetched:
                artifact = PreparedData.open(
                    fetch_without_rows(address, Path(fetched)) if remote else Path(address)
                ).artifact
                schema = artifact.read_json("schema.json")
                if "sources" not in schema:
                    raise UserError(f"data.earlier: {address!r} holds images; expected a prepared table")
                whole = not any(schema.get("settings", {}).get(name) for name in ("id", "group"))
                if not schema["cuts"] and comparable_rules(schema.get("row_hash"), whole) != ROW_HASH:
                    raise UserError(
                        f"data.earlier: {address!r} was prepared with other rules for equal rows, so copies of a row "
                        "could get other splits; prepare all files again without data.earlier"
                    )
                card = read_card(artifact)
                return cls(
                    address,
                    TableSchema.from_json(schema),
                    Transform.from_json(artifact.read_json("statistics.json")),
                    card,
                    read_card(artifact, REFERENCE) if REFERENCE in artifact.files else card,
                    artifact.files,
                    artifact.fingerprint,
                    artifact.made_by,
                )
        except DamagedArtifact as damage:
            raise UserError(f"data.earlier: {damage.message}") from None
        except UserError:
            raise
        except (
            LookupError,
            TypeError,
            AttributeError,
            ValueError,
            ArithmeticError,
        ):  # a manifest may vouch for other content
            raise UserError(
                f"data.earlier: {address!r} has a schema.json or statistics.json that prepare did not write; prepare "
                "all files again without data.earlier"
            ) from None

    def verify(self) -> None:
        """Raise ``UserError`` if the base set has changed since it was opened.

        Local files are compared byte by byte. In a store only the manifest is compared: rows are verified when
        downloaded.
        """
        try:
            if self.address.startswith(STORES):
                with open_reader(f"{self.address.rstrip('/')}/{MANIFEST}") as source:
                    fingerprint = hashlib.sha256(source.read()).hexdigest()
            else:
                fingerprint = Artifact.open(Path(self.address), KIND).check().fingerprint
        except DamagedArtifact as damage:
            raise UserError(f"data.earlier: {damage.message}") from None
        if fingerprint != self.fingerprint:
            raise UserError(f"data.earlier: {self.address!r} was replaced after it was listed; start again")

    def check_settings(self, target: str, config: DataConfig) -> None:
        """Raise ``UserError`` for a setting that would move or reinterpret rows of the base set."""
        if target != self.schema.target:
            raise UserError(
                f"target: {target!r} is not {self.schema.target!r}, the target of {self.address!r}; expected the same "
                "target"
            )
        for name in LASTING:
            now, then = setting_value(config, name), setting_value(self.schema.settings, name)
            if now != then:
                raise UserError(
                    f"data.{name}: {now!r} is not {then!r}, the value in data.earlier = {self.address!r}; set it to "
                    "that value, or prepare all files again without data.earlier"
                )
        task = self.transform.task
        if config.task not in ("auto", task):
            raise UserError(f"data.task: {config.task!r} is not {task!r}, {self._made_so}")
        length = self.transform.text_length
        if length and config.text_length != length:
            raise UserError(f"data.text_length: {config.text_length} is not {length}, {self._made_so}")
        for name, declared in config.types.items():
            self._check_declared(name, declared, config)

    def _check_declared(self, name: str, declared: ColumnType, config: DataConfig) -> None:
        """Raise ``UserError`` unless the column's type and role match its declaration in ``data.types``."""
        if name not in self.schema.types:
            raise UserError(f"data.types: {self.address!r}, which data.earlier names, has no column {name!r}")
        kind, role = self.schema.types[name], self._roles[name].role
        if not both_read(kind, DECLARED[declared]):
            raise UserError(f"data.types.{name}: {declared!r} is not {kind!r}, {self._made_so}")
        if role in JUDGED and name != config.id and role not in ROLES.get(declared, JUDGED):
            raise UserError(f"data.types.{name}: {declared!r} does not make the column {role!r}, {self._made_so}")

    @property
    def _roles(self) -> dict[str, ColumnRole]:
        return {column["name"]: ColumnRole(column["role"], column.get("why", "")) for column in self.card["columns"]}

    @property
    def _made_so(self) -> str:
        """End of the error message about a changed setting."""
        return (
            f"the value in data.earlier = {self.address!r}; remove the setting, set it to that value, or prepare all "
            "files again without data.earlier"
        )

    def unseen(self, files: Mapping[str, SourceFile], target: str) -> list[SourceFile]:
        """Return the non-empty files that the base set does not contain; ``files`` are keyed by relative path.

        Raise ``UserError`` if a file of the base set has changed.
        """
        left = dict(files)
        for group in self.schema.sources:
            matches = [(name, take_file(left, name, size)) for name, size in group.files]
            present = [(name, file) for name, file in matches if file is not None]
            missing = [name for name, file in matches if file is None]
            if missing and (present or missing[0] in left):
                raise UserError(
                    f"data: {missing[0]!r} is missing or was changed since {self.address!r} was prepared from it; "
                    "expected the same files and new ones, or only new files"
                )
            if present and group.fingerprint and digest_files(present, target) != group.fingerprint:
                raise UserError(
                    f"data: of {len(present)} files, {present[0][0]!r} among them, one was changed since "
                    f"{self.address!r} was prepared from it; expected new data in new files"
                )
        return [file for file in left.values() if file.size]

    def declared(self, config: DataConfig, *, text: bool) -> DataConfig:
        """Return ``config`` with the base set's column types; in text files, integers are declared as numbers."""
        names = DECLARED_AS | ({value_types.INTEGER: "number"} if text else {})
        types = {name: names[kind] for name, kind in self.schema.types.items() if kind in names}
        types = {name: declared for name, declared in types.items() if name not in self.schema.dropped}
        return replace(config, types={**types, **config.types})

    def check_columns(self, types: Mapping[str, str], indices: Iterable[str]) -> None:
        """Raise ``UserError`` unless the new files have the columns of the base set.

        Names must be equal except for dropped columns and ``indices``, and types of columns in use compatible. The id
        or group column that decides splits must not change to or from times or bytes.
        """
        new = set(types)
        differing = sorted((new ^ set(self.schema.types)) - self.schema.dropped - set(indices))
        if differing:
            where = "the new files" if differing[0] in new else f"{self.address!r}"
            raise UserError(f"data: the column {differing[0]!r} is only in {where}; expected the same columns")
        for name in self.schema.settings.identities:
            before, now = (each.get(name, "") for each in (self.schema.types, types))
            if before != now and {before, now} & {*value_types.TIMES, value_types.OTHER}:
                raise UserError(
                    f"data: the column {name!r} decides splits and holds {now} values, but {before} in "
                    f"{self.address!r}; expected the same type, or all files prepared again without data.earlier"
                )
        used = {column["name"]: column["type"] for column in self.schema.columns if column["role"] in READ}
        for name, kind in used.items():
            if not both_read(kind, types[name]):
                raise UserError(
                    f"data: the column {name!r} holds {types[name]} values in the new files, but {kind} in "
                    f"{self.address!r}; expected the same type, or the type in data.types if all values can be read "
                    "as such"
                )

    def fitted(self, scanned: ScanResult) -> FittedColumns:
        """Return the base set's fit; raise ``UserError`` if no row of the new files is usable or a class is new."""
        if not sum(scanned.rows):
            raise UserError("data: all rows of the new files were quarantined; expected at least one usable row")
        labels = Counter[str]()
        for split in scanned.classes:
            labels.update(split.of)
        new = sorted(set(labels) - set(self.transform.classes)) if self.transform.classes else []
        if new:
            raise UserError(
                f"target {self.transform.target!r}: the class {new[0]!r} of the new files is not a class of "
                f"{self.address!r}; prepare all files again without data.earlier"
            )
        return FittedColumns(self._roles, self.transform, [])

    def repeat(self, writer: ArtifactWriter) -> Mapping[str, object]:
        """Copy the whole base set, as there are no new files; return its ``made_by``."""
        logger("prepare").info("no new files: %s holds all of them and is reused unchanged", self.address)
        self.copy(self.files, writer)
        return self.made_by

    def copy_rows(self, writer: ArtifactWriter, home: str = "") -> int:
        """Copy all rows by :meth:`copy`; return the number for the new segment."""
        self.copy(self.segments, writer, home)
        return 1 + max(map(segment_number, self.segments))

    @property
    def segments(self) -> list[str]:
        return [name for name in self.files if name.endswith(ROWS)]

    def copy(self, names: Iterable[str], writer: ArtifactWriter, home: str = "") -> None:
        """Add the base set's files ``names`` to an artifact.

        On S3 they are copied to ``home`` within S3. Without ``home``, or from other stores, they are downloaded. Raise
        ``UserError`` if their content has changed.
        """
        for name in names:
            record = self.files[name]
            if not self.address.startswith(STORES):
                writer.link(Path(self.address) / name, name, record, root=Path(self.address))
                continue
            if home and self.address.startswith(S3):
                copy_within_s3(f"{self.address.rstrip('/')}/{name}", f"{home}/{name}", record.size, record.sha256)
            elif hash_file(storage_for(self.address).get(name, writer.directory), record.block_bytes) != record:
                raise UserError(f"data.earlier: {self.address}: {name} was changed after it was written")
            writer.note(name, record)

    def quarantined(self) -> Iterator[BadRow]:
        with TemporaryDirectory() as scratch:
            self.copy([quarantine.NAME], writer := ArtifactWriter(Path(scratch)))
            with (writer.directory / quarantine.NAME).open("rb") as file:
                yield from quarantine.read_parquet(file)

    def continued(self, card: DataCard, sample: pa.Table) -> DataCard:
        """Extend the data card of the new files to all files.

        Rows and classes are summed. Columns describe the new files and their drift from the original fit's data.
        """
        reference = {column["name"]: column for column in self.reference["columns"]}
        inputs = [column.name for column in card.columns if column.name in self.transform.columns]
        drifts = {name: drift for name in inputs if (drift := drift_from(reference[name], sample)) is not None}
        return replace(
            card,
            rows={name: count + self.card["rows"][name] for name, count in card.rows.items()},
            classes={
                label: {split: count + self.card["classes"][label][split] for split, count in counts.items()}
                for label, counts in card.classes.items()
            },
            earlier={"address": self.address, "fingerprint": self.fingerprint},
            columns=[
                with_drifts(column, {"earlier": drifts[column.name]}) if column.name in drifts else column
                for column in card.columns
            ],
            warnings=card.warnings
            + [
                f"column {name!r} is distributed differently than in the earlier data "
                f"(stability index {each.index:.2f})"
                for name, each in significant_drifts(drifts).items()
            ],
        )


def both_read(earlier: str, now: str) -> bool:
    """Return True if values of the type ``now`` can be read as the type ``earlier``."""
    wide = value_types.NUMBER if earlier == value_types.INTEGER else earlier
    return now in (earlier, wide) or (now, wide) in CASTS


def setting_value(config: DataConfig, name: str) -> object:
    return counted_settings(config)[name]


def take_file(files: dict[str, SourceFile], path: str, size: int) -> SourceFile | None:
    """Remove and return the file of this path and size, else of this name and size in any folder; None if absent."""
    if path in files:
        return files.pop(path) if files[path].size == size else None
    last = path.rsplit("/", 1)[-1]
    alike = (name for name, file in files.items() if file.size == size and file.name == last)
    return files.pop(name) if (name := next(alike, None)) else None


def fetch_without_rows(address: str, directory: Path) -> Path:
    """Download an artifact from a store, with empty sparse files in place of the rows."""
    storage = storage_for(address)
    for name, listed in list_names(address).items():
        if name.endswith(ROWS):
            make_hole(directory, name, listed.size)
        else:
            storage.get(name, directory)
    return directory
