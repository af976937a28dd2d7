"""Model for scoring, fetched and verified: the one in service in a registry, or a package."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from slipstream.pipeline.export.package.copies import copy_package
from slipstream.pipeline.export.package.files import BadPackage, check_signature
from slipstream.pipeline.export.package.opened import OpenedPackage
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.promote.store import PromotionPointer, Registry, manifest_digest
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.scoring import DISTRIBUTIONS, Distributions
from slipstream.shared.errors import UserError
from slipstream.shared.source.columns.transform import Transform
from slipstream.shared.source.columns.value_types import TIME

#: What the model's inputs are made from: raw columns, columns after the package's preparation, or images.
RAW, PREPARED, IMAGES = "raw columns", "prepared columns", "images"


@dataclass(frozen=True)
class ModelAddress:
    """Address of a model: ``promoted`` in ``registry``, or an exported ``package``.

    ``manifest`` is the SHA-256 of its manifest.
    """

    registry: str
    package: str
    promoted: PromotionPointer | None
    manifest: str

    @property
    def version(self) -> str:
        return self.manifest[:16]

    def fetch(self, directory: Path, key: Path | None) -> ServedModel:
        """Copy the model to the fresh ``directory`` and verify it.

        Raises ``UserError`` if the model is damaged, or not signed by ``key``, if given.
        """
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
    """Return the address of the package, or of the model in service in the registry.

    Raises ``UserError`` if there is none, or unless exactly one argument is given.
    """
    if bool(registry) == bool(package):
        raise UserError("registry: expected either a registry or, with --model, an exported package")
    if not registry:
        with tempfile.TemporaryDirectory() as scratch:
            fetch_package(package, Path(scratch, "model"))
            return ModelAddress("", package, None, manifest_digest(Path(scratch, "model")))
    promoted = Registry(registry).promoted()
    if promoted is None:
        raise UserError(f"{registry}: no model was promoted yet; expected a registry that train_and_promote has filled")
    return ModelAddress(registry, "", promoted, promoted.manifest)


def fetch_package(address: str, directory: Path) -> None:
    """Copy an exported package to the fresh ``directory`` and verify it.

    Raises ``UserError`` on failure.
    """
    try:
        copy_package(address, directory)
    except BadPackage as error:
        raise UserError(f"{address}: {error}") from None
    except OSError as error:
        raise UserError(f"{address}: no exported model can be read there ({error.strerror or error})") from None


@dataclass(frozen=True)
class ServedModel(OpenedPackage):
    """Verified package, opened for scoring."""

    @cached_property
    def by(self) -> str:
        """``RAW``, ``PREPARED`` or ``IMAGES``.

        Raises ``UserError`` if rows cannot become the model's inputs.
        """
        if self.signature.task == "next token":
            raise UserError(
                "registry: the model predicts tokens; expected a model that predicts classes or values of rows"
            )
        if [each.name for each in self.signature.inputs] == ["image"]:
            return IMAGES
        with self.described_by_statistics():
            columns = read_columns(self.statistics)
        raw = self.signature.raw
        # The raw model recognises a missing text only by a mark. Times that are read already need not be written.
        if raw and isinstance(columns, RawColumns) and (columns.missing or not columns.categories):
            dtypes = {given.name: given.dtype for given in raw.inputs}
            if all(kind != TIME or dtypes.get(name) != "string" for name, kind in columns.types.items()):
                return RAW
        self.transform  # noqa: B018
        return PREPARED

    @cached_property
    def transform(self) -> Transform:
        """The package's preparation.

        Raises ``UserError`` if its outputs are not the model's inputs.
        """
        with self.described_by_statistics():
            transform = Transform.from_json(self.statistics)
            made = [(each.name, each.dtype, each.shape) for each in transform.signature.inputs]
        inputs = [(each.name, each.dtype, tuple(each.shape[1:])) for each in self.signature.inputs]
        if inputs != made:
            raise self.no_way(f"its preparation makes {made}, but it takes {inputs}")
        return transform

    @contextmanager
    def described_by_statistics(self) -> Iterator[None]:
        """Raise ``UserError`` if the block finds that ``statistics.json`` describes no table."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError):
            raise self.no_way("its statistics.json describes no table") from None

    def no_way(self, why: str) -> UserError:
        raw = self.signature.no_raw or "an earlier version exported it"
        return UserError(
            f"registry: the model {manifest_digest(self.directory)[:16]} has no raw columns ({raw}), and {why}; export "
            "it again from prepared data of a table"
        )

    @property
    def types(self) -> dict[str, str]:
        """Types of the raw input columns, by name."""
        return {name: self.transform.types[name] for name in self.transform.columns}

    @cached_property
    def distributions(self) -> Distributions | None:
        """Distributions of the training rows; None in older packages."""
        content = self.read_file(DISTRIBUTIONS)
        return from_json(content, Distributions, self.directory / DISTRIBUTIONS) if content is not None else None
