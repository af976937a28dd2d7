"""Plan of a scoring: data, model and table, decided once and passed to all workers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.model import IMAGES, ModelAddress, ServedModel, find_model
from slipstream.pipeline.score.table_rows import deciding_files
from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.settings import counted_settings
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig, Format
from slipstream.shared.source.files import IMAGE_FORMATS, Listing, SourceFile, format_of_all, list_source
from slipstream.shared.source.resolved import TEXT, ResolvedSource, fingerprint_source, one_format
from slipstream.shared.storage import STORES, check_conditional_writes, storage_for
from slipstream.shared.storage.local import local_path

LOG = logger("score")
#: Maximum bytes and files of a part, unless it is one larger file. The sizes do not depend on the workers.
PART_BYTES, PART_FILES = 64 << 20, 4096
#: Version of the table's format, which is part of its key.
FORM = 2
#: Settings of the section "data" that come from the model, so that rows are read like its training rows.
OF_THE_MODEL = ("decimal", "thousands", "missing")
#: Names of columns written in addition to the kept ones.
LABEL, VALUE, PROBABILITY, VERSION, FILE, ROW = "label", "value", "probability_", "model_version", "file", "row"


@dataclass(frozen=True)
class ScoringPortion:
    """Files of the data that become one part of the table."""

    number: int
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class ScoringPlan:
    """Plan of one scoring, or a worker's share of it.

    ``by`` is what the model's inputs are made from, ``key`` identifies the table, and ``deciding`` are the files that
    decide the types of kept columns.
    """

    source: ResolvedSource
    fingerprint: str
    model: ModelAddress
    by: str
    config: ScoringConfig
    output: str
    key: str
    portions: tuple[ScoringPortion, ...]
    deciding: dict[str, SourceFile]

    @property
    def size(self) -> int:
        return sum(file.size for portion in self.portions for file in portion.files)

    def shares(self, number: int) -> list[ScoringPlan]:
        """Split the plan into at most ``number`` plans of consecutive portions.

        Their sizes are about equal unless a portion is too large.
        """
        cuts: list[list[ScoringPortion]] = [[] for _ in range(number)]
        done = 0
        for portion in self.portions:
            size = sum(file.size for file in portion.files)
            cuts[(2 * done + size) * number // (2 * self.size) if self.size else 0].append(portion)
            done += size
        return [replace(self, portions=tuple(cut)) for cut in cuts if cut]


def plan_scoring(
    registry: str, package: str, data: str, output: str, reading: DataConfig, config: ScoringConfig
) -> ScoringPlan:
    """Inspect model and files and return the plan.

    Raises ``UserError`` if they or the settings are invalid.
    """
    if not output:
        raise UserError("output: is empty; expected a directory or a store's address for the scored tables")
    check_apart(data, output)
    address = find_model(registry, package)
    listing = list_source(data, "", reading)
    check_none_inside(listing, output)
    with TemporaryDirectory() as scratch:
        model = address.fetch(Path(scratch, "model"), public_key(config))
        check_kept(config.keep, model)
        source = resolve_format(listing, as_the_model(reading, model), model)
    if output.startswith(STORES):
        check_conditional_writes(storage_for(output))
    for warning in source.listing.warnings:
        LOG.warning(warning)
    fingerprint = fingerprint_source(source.listing)
    key = table_key(fingerprint, address.manifest, source.config, config)
    portions = tuple(ScoringPortion(number, files) for number, files in enumerate(portion_files(source.files)))
    return ScoringPlan(
        source,
        fingerprint,
        address,
        model.by,
        config,
        output,
        key,
        portions or (ScoringPortion(0, ()),),
        deciding_files(source, config.keep),
    )


def table_key(data: str, model: str, reading: DataConfig, config: ScoringConfig) -> str:
    """Return the key of the table that a model makes of data, both given by their digests."""
    made_of = {"form": FORM, "data": data, "model": model, **table_settings(reading, config)}
    return hashlib.sha256(canonical_json(made_of)).hexdigest()[:16]


def table_settings(reading: DataConfig, config: ScoringConfig) -> dict[str, dict[str, object]]:
    """Return the settings in a table's key and manifest; younger settings at their defaults leave keys unchanged."""
    scoring = {name: value for name, value in counted_settings(config).items() if name != "public_key"}
    # Other digests have had ``dates`` from its first release on.
    younger = () if reading.dates else ("dates",)
    return {
        "reading": {name: value for name, value in counted_settings(reading).items() if name not in younger},
        "scoring": scoring,
    }


def public_key(config: ScoringConfig) -> Path | None:
    return Path(config.public_key) if config.public_key else None


def check_apart(data: str, output: str) -> None:
    """Raise ``UserError`` if the output lies in the data, since the next run would score it."""
    inside, outside = absolute_address(output), absolute_address(data)
    if data and f"{inside.rstrip('/')}/".startswith(f"{outside.rstrip('/')}/"):
        raise UserError(f"output: {output!r} is inside the data, {data!r}; expected a place outside of them")


def check_none_inside(listing: Listing, output: str) -> None:
    """Raise ``UserError`` if the data, which may be a pattern, include a file in the output."""
    below = f"{absolute_address(output).rstrip('/')}/"
    for file in listing.files:
        if (str(Path(file.uri).absolute()) if file.local else file.uri).startswith(below):
            raise UserError(
                f"data: {file.uri!r} is inside the output, {output!r}; expected an output outside of the data"
            )


def absolute_address(address: str) -> str:
    return address if address.startswith(STORES) else str(local_path(address).resolve())


def as_the_model(reading: DataConfig, model: ServedModel) -> DataConfig:
    """Return the user's reading settings with the model's notation of numbers and missing values.

    Raises ``UserError`` if the user set another notation.
    """
    if model.by == IMAGES:
        return reading
    transform, plain = model.transform, DataConfig()
    theirs = {name: getattr(transform, name) for name in OF_THE_MODEL}
    for name, value in theirs.items():
        if getattr(reading, name) not in (getattr(plain, name), value):
            raise UserError(
                f"data.{name}: is {getattr(reading, name)!r}, but the model was trained with {value!r}; expected the "
                "same; remove the setting"
            )
    return replace(reading, **theirs)


def check_kept(keep: list[str], model: ServedModel) -> None:
    """Raise ``UserError`` for a column that cannot be kept."""
    if keep and model.by == IMAGES:
        raise UserError("scoring.keep: images have no columns; remove the setting, the file name is always written")
    own = {VERSION, LABEL, *map(PROBABILITY.__add__, model.signature.classes), VALUE}
    for name in keep:
        if name in own:
            raise UserError(f"scoring.keep: {name!r} is a column that scoring writes; rename it in the data")


def resolve_format(listing: Listing, config: DataConfig, model: ServedModel) -> ResolvedSource:
    """Resolve the data's format.

    Raises ``UserError`` if the model takes images and the data are a table, or the reverse.
    """
    if not listing.files:
        source = ResolvedSource(listing, "digits", (), "", config)
    else:
        declared = format_for(listing, config, model)
        listing = listing.with_underscores(declared)
        images = declared in IMAGE_FORMATS
        files = listing.files if images else tuple(file for file in listing.files if file.size)
        format = one_format(listing, files, replace(config, format="text") if declared == "text" else config)
        source = ResolvedSource(listing, format, files, "", replace(config, format=format))
    takes, has = ("images", "a table") if model.by == IMAGES else ("a table", "images")
    if (source.kind == "images") != (model.by == IMAGES):
        raise UserError(f"data: {listing.address or 'the digits'!r} holds {has}, but the model takes {takes}")
    if source.format == "json" and (config.columns or not config.header):
        raise UserError("data.columns, data.header: are for CSV; JSON names its values itself, so remove both")
    return source


def format_for(listing: Listing, config: DataConfig, model: ServedModel) -> Format:
    """Return the format by :func:`format_of_all`, but accept texts without class folders."""
    texts = model.by != IMAGES and model.types == {TEXT: value_types.TEXT}
    if config.format == "auto" and texts and all(file.name.lower().endswith(".txt") for file in listing.files):
        return "text"
    return format_of_all(listing, "", config)


def portion_files(files: Iterable[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    """Yield the files of every part: consecutive files, with small ones grouped."""
    together: list[SourceFile] = []
    size = 0
    for file in files:
        if together and (size + file.size > PART_BYTES or len(together) == PART_FILES):
            yield tuple(together)
            together, size = [], 0
        together.append(file)
        size += file.size
    if together:
        yield tuple(together)
