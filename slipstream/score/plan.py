"""What is to be scored, by which model, into which table: decided once, and handed to whoever scores a share of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from slipstream.artifacts.format import canonical_json
from slipstream.errors import UserError
from slipstream.score.config import ScoringConfig
from slipstream.score.model import IMAGES, ModelAddress, ServedModel, find_model
from slipstream.settings import to_dict
from slipstream.source.columns import value_types
from slipstream.source.config import DataConfig, Format
from slipstream.source.files import IMAGE_FORMATS, Listing, SourceFile, list_source
from slipstream.source.fingerprint import fingerprint_source
from slipstream.source.resolved import TEXT, ResolvedSource, format_of_all, one_format
from slipstream.storage import STORES, check_conditional_writes, storage_for
from slipstream.storage.local import local_path

#: A part of the table is made of so many bytes of the data's files, or one file: whoever scores it, it is the same.
PART_BYTES, PART_FILES = 64 << 20, 4096
#: Of another number the tables have another form, and other keys.
FORM = 1
#: Settings of the section data that a model brings along: rows are read as its training rows were.
OF_THE_MODEL = ("decimal", "thousands", "missing")
#: Names of columns that are written beside those that are kept.
LABEL, VALUE, PROBABILITY, VERSION, FILE, ROW = "label", "value", "probability_", "model_version", "file", "row"


@dataclass(frozen=True)
class Portion:
    """Files of the data that become one part of the table."""

    number: int
    files: tuple[SourceFile, ...]


@dataclass(frozen=True)
class ScoringPlan:
    """One scoring: the resolved data and its fingerprint, the model, how rows become its inputs, the settings, where
    the table is published, and the key of it. ``portions`` are those to score: all of them, or one share."""

    source: ResolvedSource
    fingerprint: str
    model: ModelAddress
    by: str
    config: ScoringConfig
    output: str
    key: str
    portions: tuple[Portion, ...]

    @property
    def size(self) -> int:
        """Bytes to read."""
        return sum(file.size for portion in self.portions for file in portion.files)

    def shares(self, number: int) -> list[ScoringPlan]:
        """At most ``number`` plans of consecutive portions, of about the same size if none is too large for that."""
        cuts: list[list[Portion]] = [[] for _ in range(number)]
        done = 0
        for portion in self.portions:
            size = sum(file.size for file in portion.files)
            cuts[(2 * done + size) * number // (2 * self.size) if self.size else 0].append(portion)
            done += size
        return [replace(self, portions=tuple(cut)) for cut in cuts if cut]


def plan_scoring(
    registry: str, package: str, data: str, output: str, reading: DataConfig, config: ScoringConfig
) -> ScoringPlan:
    """Look at the model and at the files. Raises ``UserError`` for what they and the settings show to be wrong."""
    if not output:
        raise UserError("output: is empty; expected a directory or a store's address for the scored tables")
    check_apart(data, output)
    address = find_model(registry, package)
    listing = list_source(data)
    check_none_inside(listing, output)
    with TemporaryDirectory() as scratch:
        model = address.fetch(Path(scratch, "model"), public_key(config))
        check_kept(config.keep, model)
        source = resolve(listing, as_the_model(reading, model), model)
    if output.startswith(STORES):
        check_conditional_writes(storage_for(output))
    fingerprint = fingerprint_source(listing)
    made_of = {"form": FORM, "data": fingerprint, "model": address.manifest, **settings_of(source.config, config)}
    key = hashlib.sha256(canonical_json(made_of)).hexdigest()[:16]
    portions = tuple(Portion(number, files) for number, files in enumerate(portioned(source.files)))
    return ScoringPlan(source, fingerprint, address, model.by, config, output, key, portions or (Portion(0, ()),))


def settings_of(reading: DataConfig, config: ScoringConfig) -> dict[str, dict[str, object]]:
    """The settings on which a table depends."""
    scoring = {name: value for name, value in to_dict(config).items() if name != "public_key"}
    return {"reading": to_dict(reading), "scoring": scoring}


def public_key(config: ScoringConfig) -> Path | None:
    return Path(config.public_key) if config.public_key else None


def check_apart(data: str, output: str) -> None:
    """Raise ``UserError`` if the table would lie among the rows: the next run would score it, too."""
    inside, outside = whole(output), whole(data)
    if data and f"{inside.rstrip('/')}/".startswith(f"{outside.rstrip('/')}/"):
        raise UserError(f"output: {output!r} lies in the data, {data!r}; expected a place outside of it")


def check_none_inside(listing: Listing, output: str) -> None:
    """Raise ``UserError`` for a file that scoring has written, which a pattern may find."""
    below = f"{whole(output).rstrip('/')}/"
    for file in listing.files:
        if (str(Path(file.uri).absolute()) if file.local else file.uri).startswith(below):
            raise UserError(f"data: {file.uri!r} lies in the output, {output!r}; expected a place outside of the data")


def whole(address: str) -> str:
    return address if address.startswith(STORES) else str(local_path(address).resolve())


def as_the_model(reading: DataConfig, model: ServedModel) -> DataConfig:
    """How rows are read: as the user says, with the marks of numbers and of missing values that the model was trained
    with. Raises ``UserError`` if the user says others."""
    if model.by == IMAGES:
        return reading
    transform, plain = model.transform, DataConfig()
    theirs = {name: getattr(transform, name) for name in OF_THE_MODEL}
    for name, value in theirs.items():
        if getattr(reading, name) not in (getattr(plain, name), value):
            raise UserError(
                f"data.{name}: is {getattr(reading, name)!r}, and the model was trained with {value!r}; expected the "
                "same, or the setting left out"
            )
    return replace(reading, **theirs)


def check_kept(keep: list[str], model: ServedModel) -> None:
    """Raise ``UserError`` for a column that cannot be kept."""
    if keep and model.by == IMAGES:
        raise UserError("scoring.keep: images have no columns; leave it out, the file of each is written anyway")
    own = {VERSION, LABEL, *map(PROBABILITY.__add__, model.signature.classes), VALUE}
    for name in keep:
        if name in own:
            raise UserError(f"scoring.keep: {name!r} is a column that scoring writes; rename it in the data")


def resolve(listing: Listing, config: DataConfig, model: ServedModel) -> ResolvedSource:
    """What the data is. Raises ``UserError`` if the model takes something else."""
    if not listing.files:
        source = ResolvedSource(listing, "digits", (), "", config)
    else:
        declared = config.format if config.format != "auto" else format_for(listing, model)
        images = declared in IMAGE_FORMATS
        files = listing.files if images else tuple(file for file in listing.files if file.size)
        format = one_format(listing, files, replace(config, format="text") if declared == "text" else config)
        source = ResolvedSource(listing, format, files, "", replace(config, format=format))
    takes, has = ("images", "a table") if model.by == IMAGES else ("a table", "images")
    if (source.kind == "images") != (model.by == IMAGES):
        raise UserError(f"data: {listing.address or 'the digits'!r} holds {has}, and the model takes {takes}")
    if source.format == "json" and (config.columns or not config.header):
        raise UserError("data.columns, data.header: are for CSV; JSON names its values itself, so leave both out")
    return source


def format_for(listing: Listing, model: ServedModel) -> Format:
    """As :func:`format_of_all`; but texts to be scored need lie in no class folders."""
    texts = model.by != IMAGES and model.types == {TEXT: value_types.TEXT}
    if texts and all(file.name.lower().endswith(".txt") for file in listing.files):
        return "text"
    return format_of_all(listing, "")


def portioned(files: Iterable[SourceFile]) -> Iterator[tuple[SourceFile, ...]]:
    """Consecutive files that become one part each time: small ones together."""
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
