"""New files beside an earlier prepared set: its statistics are taken, its rows stay, and only what it has not seen is
prepared, as further segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import xxhash

from slipstream.artifacts.format import MANIFEST, ArtifactWriter, DamagedArtifact, hash_file
from slipstream.artifacts.prepared.data import SPLITS, PreparedData, segment_number
from slipstream.artifacts.prepared.streamed import ROWS, make_hole
from slipstream.errors import UserError
from slipstream.logs import logger
from slipstream.prepare import quarantine
from slipstream.prepare.card.drift_and_leaks import drift_from
from slipstream.prepare.columns import value_types
from slipstream.prepare.columns.transform import Transform
from slipstream.prepare.config import ColumnType, DataConfig
from slipstream.prepare.fit.fit import FittedColumns, Role
from slipstream.prepare.fit.scan import ScanResult
from slipstream.prepare.fit.splits import Cuts
from slipstream.prepare.quarantine import BadRow
from slipstream.prepare.source.files import SourceFile
from slipstream.prepare.source.fingerprint import digest_files
from slipstream.settings import to_dict
from slipstream.storage import S3, STORES, copy_within_s3, list_names, open_reader, storage_for

#: The card of the data that the statistics were fitted on, if that was a base set.
REFERENCE = "reference.json"
#: Settings by which rows get their splits and values their meaning.
LASTING = ("drop", "id", "group", "time", "weight", "split", "missing", "decimal", "thousands")
DECLARED: dict[str, ColumnType] = {
    value_types.NUMBER: "number",
    value_types.BOOLEAN: "boolean",
    value_types.TIME: "date",
    value_types.TEXT: "text",
}


@dataclass(frozen=True)
class EarlierSet:
    """The prepared set of an earlier run, at the address that the user gave."""

    address: str
    data: PreparedData
    schema: dict[str, Any]
    transform: Transform
    #: The card of the data that the statistics were fitted on.
    reference: dict[str, Any]
    card: dict[str, Any]
    bad: list[BadRow]

    @classmethod
    def open(cls, address: str, scratch: Path) -> EarlierSet:
        """Verified to the byte, except that rows in a store stay there; all else is fetched into ``scratch``.

        Raises ``UserError``.
        """
        try:
            remote = address.startswith(STORES)
            data = PreparedData.open(fetch(address, scratch) if remote else Path(address))
            artifact = data.artifact if remote else data.artifact.check()
            schema = artifact.read_json("schema.json")
        except DamagedArtifact as damage:
            raise UserError(f"data.earlier: {damage.message}") from None
        if "sources" not in schema:
            raise UserError(f"data.earlier: {address!r} holds images; expected a prepared table")
        transform = Transform.from_json(artifact.read_json("statistics.json"))
        reference = artifact.read_json(REFERENCE) if REFERENCE in artifact.files else data.card
        return cls(address, data, schema, transform, reference, data.card, quarantine.read(artifact))

    @property
    def types(self) -> dict[str, str]:
        return {column["name"]: column["type"] for column in self.schema["columns"]}

    @property
    def cuts(self) -> Cuts | None:
        cuts = self.schema["cuts"]
        return None if cuts is None else (cuts[0], cuts[1])

    def check_settings(self, target: str, config: DataConfig) -> None:
        """Raise ``UserError`` for a setting with which rows of the base set would move or mean something else."""
        if target != self.schema["target"]:
            raise UserError(f"target: {target!r} is not {self.schema['target']!r}, of which {self.address!r} was made")
        for name in LASTING:
            now, then = value_of(config, name), self.schema["settings"][name]
            if now != then:
                raise UserError(
                    f"data.{name}: {now!r} is not {then!r}, with which data.earlier = {self.address!r} was made; set "
                    "it so, or prepare all files anew without data.earlier"
                )

    def unseen(self, files: dict[str, SourceFile], target: str) -> list[SourceFile]:
        """Of the ``files``, by their paths in the data, those that are new and not empty.

        Raises ``UserError`` if one of the others is not what it was.
        """
        left = dict(files)
        for group in self.schema["sources"]:
            known = [(name, take(left, name, size)) for name, size in group["files"]]
            there = [(name, file) for name, file in known if file is not None]
            gone = [name for name, file in known if file is None]
            if gone and (there or gone[0] in left):
                raise UserError(
                    f"data: {gone[0]!r} is missing or has changed since {self.address!r} was made, which holds its "
                    "rows; expected the same files and new ones, or new ones alone"
                )
            if there and group["fingerprint"] and digest_files(there, target) != group["fingerprint"]:
                raise UserError(
                    f"data: of {len(there)} files, {there[0][0]!r} among them, one has other bytes than when "
                    f"{self.address!r} was made; expected new data in new files"
                )
        return [file for file in left.values() if file.size]

    def declared(self, config: DataConfig, *, text: bool) -> DataConfig:
        """``config`` with the types that columns had. Whole numbers of ``text`` are read as numbers are."""
        names = DECLARED | ({value_types.INTEGER: "number"} if text else {})
        types = {name: names[kind] for name, kind in self.types.items() if kind in names}
        return replace(config, types={**types, **config.types})

    def check_columns(self, found: Mapping[str, str]) -> None:
        differing = sorted(set(found) ^ set(self.types))
        if differing:
            where = "the new files" if differing[0] in found else f"{self.address!r}"
            raise UserError(f"data: the column {differing[0]!r} is only in {where}; expected the same columns")

    def fitted(self, found: ScanResult) -> FittedColumns:
        """The earlier fit. Raises ``UserError`` if no row is left or a class is new."""
        if not sum(found.rows):
            raise UserError("data: no row of the new files is left when the bad ones are set aside")
        labels = Counter[str]()
        for split in found.classes:
            labels.update(split.of)
        new = sorted(set(labels) - set(self.transform.classes)) if self.transform.classes else []
        if new:
            raise UserError(
                f"target {self.transform.target!r}: the class {new[0]!r} of the new files is none of "
                f"{self.address!r}; prepare all files anew without data.earlier"
            )
        roles = {c["name"]: Role(c["role"], c.get("why", "")) for c in self.card["columns"]}
        return FittedColumns(roles, self.transform, [])

    def repeat(self, writer: ArtifactWriter) -> Mapping[str, Any]:
        """Take everything over as it is; what made it."""
        logger("prepare").info("nothing new: all files are in %s, which is taken as it is", self.address)
        self.take_over_segments(writer)
        artifact = self.data.artifact
        for name in artifact.files.keys() - self.segments:
            writer.link(artifact.path(name), name, artifact.files[name])
        return artifact.made_by

    @property
    def segments(self) -> list[str]:
        return [name for split in SPLITS for name in self.data.segments(split)]

    def take_over_segments(self, writer: ArtifactWriter, home: str = "") -> int:
        """Take all rows over as they are; the number that the next segment has.

        If they lie on S3 they are copied there to ``home``; otherwise, or without it, a store's are fetched. Raises
        ``UserError`` if they are not what they were.
        """
        for name in self.segments:
            record = self.data.artifact.files[name]
            if not self.address.startswith(STORES):
                writer.link(self.data.artifact.path(name), name, record)
                continue
            if home and self.address.startswith(S3):
                copy_within_s3(f"{self.address.rstrip('/')}/{name}", f"{home}/{name}")
            elif hash_file(storage_for(self.address).get(name, writer.directory), record.block_bytes) != record:
                raise UserError(f"data.earlier: {self.address}: {name} is not what was written")
            writer.note(name, record)
        return 1 + max(map(segment_number, self.segments))

    def continued(self, card: dict[str, Any], sample: pa.Table) -> dict[str, Any]:
        """The card of the new files as the card of all: rows and classes are added, columns are those of the new files
        with their drift from what the statistics were fitted on."""
        before = self.card
        card["rows"] = {name: count + before["rows"][name] for name, count in card["rows"].items()}
        card["classes"] = {
            label: {split: count + before["classes"][label][split] for split, count in counts.items()}
            for label, counts in card["classes"].items()
        }
        card["earlier"] = {"address": self.address, "fingerprint": self.data.artifact.fingerprint}
        reference = {column["name"]: column for column in self.reference["columns"]}
        for column in card["columns"]:
            if column["name"] not in self.transform.columns:
                continue
            moved = drift_from(reference[column["name"]], sample, column["name"])
            if moved is not None:
                column.setdefault("drift", {})["earlier"] = moved.stability
                card["warnings"] += moved.words
        return card


def value_of(config: DataConfig, name: str) -> Any:
    """A setting as JSON holds it: of a section its fields alone, and nothing else that the instance carries."""
    return to_dict(config)[name]


def take(files: dict[str, SourceFile], path: str, size: int) -> SourceFile | None:
    """Remove from ``files`` the one of this size at this path, or else of this name in another folder."""
    if path in files:
        return files.pop(path) if files[path].size == size else None
    last = path.rsplit("/", 1)[-1]
    alike = (name for name, file in files.items() if file.size == size and file.name == last)
    return files.pop(name) if (name := next(alike, None)) else None


def fetch(address: str, directory: Path) -> Path:
    """All of an artifact in a store but the rows, instead of which there are holes of their size."""
    storage = storage_for(address)
    for name, found in list_names(address).items():
        if name.endswith(ROWS):
            make_hole(directory, name, found.size)
        else:
            storage.get(name, directory)
    return directory


def fingerprint_earlier(address: str) -> str:
    """What identifies a base set: the XXH3-128 (hex) of its manifest; "" without one. Raises ``UserError``."""
    if not address:
        return ""
    if address.startswith(STORES):
        with open_reader(f"{address.rstrip('/')}/{MANIFEST}") as source:
            return xxhash.xxh3_128_hexdigest(source.read())
    path = Path(address) / MANIFEST
    if not path.is_file():
        raise UserError(f"data.earlier: {address!r} is no prepared data; expected a directory with a {MANIFEST}")
    return xxhash.xxh3_128_hexdigest(path.read_bytes())
