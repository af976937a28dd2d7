"""The model that scores: the one in service in a registry, or an exported package; fetched, verified, understood."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.artifacts.records import from_json
from slipstream.artifacts.results.distributions import DISTRIBUTIONS, Distributions
from slipstream.errors import UserError
from slipstream.export.check import BadPackage, check_signature
from slipstream.export.package.copies import copy_package
from slipstream.export.package.opened import OpenedPackage
from slipstream.export.package.raw_columns import RawColumns, read_columns
from slipstream.promote.store import Pointer, Registry, manifest_digest
from slipstream.source.columns.transform import Transform

#: How rows become the model's inputs: the raw model takes them as they are; the package's preparation stands in for
#: it; or they are images.
RAW, PREPARED, IMAGES = "raw columns", "prepared columns", "images"


@dataclass(frozen=True)
class ModelAddress:
    """A certain model: promoted in the ``registry``, or the package at an address, whose manifest has this SHA-256."""

    registry: str
    package: str
    promoted: Pointer | None
    manifest: str

    @property
    def version(self) -> str:
        return self.manifest[:16]

    def fetch(self, directory: Path, key: Path | None) -> ServedModel:
        """A verified copy in the fresh ``directory``, signed by ``key`` if that is given. Raises ``UserError``."""
        if self.promoted:
            Registry(self.registry).fetch(self.promoted, directory)
            where = f"{self.registry}: the promoted model {self.version}"
        else:
            fetch_package(self.package, directory)
            where = self.package
        try:
            if key:
                check_signature(directory, key)
        except BadPackage as error:
            raise UserError(f"{where}: {str(error).replace(f'{directory}/', '')}") from None
        if manifest_digest(directory) != self.manifest:
            raise UserError(f"{where}: was replaced while rows were scored; start again")
        return ServedModel(directory)


def find_model(registry: str, package: str) -> ModelAddress:
    """The model in service now. Raises ``UserError`` if there is none, or not one of both is named."""
    if bool(registry) == bool(package):
        raise UserError("registry: name a registry, or with --model an exported package; expected one of both")
    if not registry:
        with tempfile.TemporaryDirectory() as scratch:
            fetch_package(package, Path(scratch, "model"))
            return ModelAddress("", package, None, manifest_digest(Path(scratch, "model")))
    promoted = Registry(registry).promoted()
    if promoted is None:
        raise UserError(f"{registry}: no model was promoted yet; expected a registry that train_and_promote has filled")
    return ModelAddress(registry, "", promoted, promoted.manifest)


def fetch_package(address: str, directory: Path) -> None:
    """Put a verified copy of an exported package into the fresh ``directory``. Raises ``UserError``."""
    try:
        copy_package(address, directory)
    except BadPackage as error:
        raise UserError(f"{address}: {error}") from None
    except OSError as error:
        raise UserError(f"{address}: no exported model can be read there ({error.strerror or error})") from None


@dataclass(frozen=True)
class ServedModel(OpenedPackage):
    """A verified package, as it scores."""

    @cached_property
    def by(self) -> str:
        """How rows become its inputs. Raises ``UserError`` if they cannot."""
        if self.signature.task == "next token":
            raise UserError("registry: the model predicts tokens; expected one of classes or values, which rows have")
        if [each.name for each in self.signature.inputs] == ["image"]:
            return IMAGES
        with self.described_by_statistics():
            columns = read_columns(self.statistics)
        # The raw model knows a missing text by a mark only.
        if self.signature.raw and isinstance(columns, RawColumns) and (columns.missing or not columns.categories):
            return RAW
        self.transform  # noqa: B018
        return PREPARED

    @cached_property
    def transform(self) -> Transform:
        """The preparation that came with the model. Raises ``UserError`` if it cannot stand in."""
        with self.described_by_statistics():
            transform = Transform.from_json(self.statistics)
        inputs = [(each.name, each.dtype, tuple(each.shape[1:])) for each in self.signature.inputs]
        made = [(each.name, each.dtype, each.shape) for each in transform.signature.inputs]
        if inputs != made:
            raise self.no_way(f"its preparation makes {made}, and it takes {inputs}")
        return transform

    @contextmanager
    def described_by_statistics(self) -> Iterator[None]:
        """Raise ``UserError`` if the block finds that ``statistics.json`` is not that of a table."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError):
            raise self.no_way("its statistics.json describes no table") from None

    def no_way(self, why: str) -> UserError:
        raw = self.signature.no_raw or "an earlier version exported it"
        return UserError(
            f"registry: the model {manifest_digest(self.directory)[:16]} has no raw columns ({raw}), and {why}; export "
            "it again from prepared data of a table"
        )

    @property
    def types(self) -> dict[str, str]:
        """The types of the raw columns that it takes."""
        return {name: self.transform.types[name] for name in self.transform.columns}

    @cached_property
    def distributions(self) -> Distributions | None:
        """How its training rows are distributed; None if the package is from before that was said."""
        content = self.read_file(DISTRIBUTIONS)
        return from_json(content, Distributions, self.directory / DISTRIBUTIONS) if content is not None else None
