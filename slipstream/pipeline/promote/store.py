"""Registry: exported models by version, in a directory or under a store's prefix, and their promotions.

``versions/<version>/`` holds a package, its manifest written last. ``promoted/<number>.json`` are the promotions. Each
is written once, and only if its number is free, so one of two concurrent runs gets it. The highest is the model in
service, the others are the history. A killed run leaves the promoted model unchanged.
"""

from __future__ import annotations

import re
import tempfile
import uuid
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from slipstream.pipeline.export.package.copies import copy_package
from slipstream.pipeline.export.package.files import SIGNATURE, BadPackage, check_files, read_file
from slipstream.pipeline.export.package.sign import sign_package
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.records import decode_record, to_json
from slipstream.shared.artifacts.workspaces import put_in_place, temporary_workspace
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import numbered_line
from slipstream.shared.storage import (
    STORES,
    Storage,
    cannot_write,
    check_conditional_writes,
    check_name,
    read_below,
    storage_for,
    try_create,
)
from slipstream.shared.storage.local import LocalStorage
from slipstream.shared.storage.names import number_as_name, number_in_name

VERSIONS, PROMOTED = "versions", "promoted"
#: Maximum size of a promotion's record in bytes.
LONGEST_POINTER = 1 << 20
POINTER = re.compile(rf"{PROMOTED}/([0-9]+)\.json")


@dataclass(frozen=True)
class PromotionPointer:
    """Record of a promotion: number from 1 on, version, SHA-256 of the package's manifest, reason and time.

    ``version`` becomes part of a path. ``run`` makes every run's record unique, so that a run can tell whether the
    store accepted its record.
    """

    number: int
    version: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    manifest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    why: str
    at: str
    run: str


@dataclass(frozen=True)
class Registry:
    """Registry at ``uri``. All methods may raise ``UserError`` and ``StorageUnavailable``."""

    uri: str

    def __post_init__(self) -> None:
        if not self.uri:
            raise UserError("registry: is empty; expected a directory or a store's address")

    @property
    def storage(self) -> Storage:
        return storage_for(self.uri)

    def check(self) -> None:
        """Raise ``UserError`` if promotions cannot be written; called before the work that leads to a promotion."""
        self.promoted()
        if self.uri.startswith(STORES):
            check_conditional_writes(self.storage)

    def promoted(self) -> PromotionPointer | None:
        """Return the promotion in effect, or None."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def history(self) -> list[PromotionPointer]:
        return [self.read(number) for number in self.numbers()]

    def numbers(self) -> list[int]:
        """Return the sorted numbers of all promotions, ignoring other files."""
        matches = map(POINTER.fullmatch, self.storage.list(f"{PROMOTED}/"))
        return sorted(number for match in matches if match and (number := number_in_name(match[1], 8)) is not None)

    def read(self, number: int) -> PromotionPointer:
        key = pointer_key(number)
        pointer = decode_record(read_below(self.uri, key, LONGEST_POINTER), PromotionPointer)
        if pointer and pointer.number == number:
            return pointer
        raise UserError(f"{self.uri}/{key}: not a record of a promotion; delete it")

    def fetch(self, pointer: PromotionPointer, directory: Path) -> Path:
        """Copy a promoted model to the fresh ``directory``, every byte verified, and return it."""
        below = f"{VERSIONS}/{pointer.version}"
        where = f"{self.uri}/{below}"
        try:
            copy_package(self.uri, directory, check_name(below, self.uri))
        except BadPackage as error:
            raise UserError(f"{where}: the promoted model is damaged: {error}; restore it") from None
        if manifest_digest(directory) != pointer.manifest:
            raise UserError(f"{where}: the model was changed after it was promoted; restore it")
        return directory

    def add(self, package: Path, key: Path | None = None) -> str:
        """Store a package, signed with the private ``key`` if there is one, and return its version.

        Files of this version that are already stored are replaced; intact files by the same bytes.
        """
        version = package_version(package)
        storage, prefix = self.storage, f"{VERSIONS}/{version}/"
        with scratch_of(storage) as scratch:
            copy = Path(scratch, version)
            try:
                copy_package(str(package), copy)
            except BadPackage as error:
                raise UserError(f"{package}: {error}") from None
            except OSError as error:
                raise cannot_write(storage.scratch(), error) from None
            if key:
                sign_package(copy, key)
            files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
            strays = {stored for stored in storage.list(prefix) if stored.removeprefix(prefix) not in files}
            storage.delete(sorted(strays - {f"{prefix}{SIGNATURE}"}))
            for name in sorted(files, key=lambda name: (name == MANIFEST, name)):
                storage.put(f"{prefix}{name}", copy / name)
        return version

    def point(self, number: int, version: str, manifest: str, why: str) -> PromotionPointer | None:
        """Promote ``version`` as the promotion ``number``; return None if another run has taken that number."""
        pointer = PromotionPointer(
            number, version, manifest, why, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", uuid.uuid4().hex
        )
        return pointer if try_create(self.storage, pointer_key(number), to_json(pointer)) else None


def scratch_of(storage: Storage) -> AbstractContextManager[Path | str]:
    """Return a context manager of a temporary directory.

    On a disk it is in the storage's directory, where a later run removes it if this process is killed.
    """
    if isinstance(storage, LocalStorage):
        return temporary_workspace(storage.scratch())
    return tempfile.TemporaryDirectory(dir=storage.scratch())


def manifest_digest(package: Path) -> str:
    return sha256(read_file(package, MANIFEST)).hexdigest()


def package_version(package: Path) -> str:
    """Return the version of a package, a digest over its files. Raises ``UserError`` if they are damaged."""
    try:
        check_files(package)
    except BadPackage as error:
        raise UserError(str(error)) from None
    return manifest_digest(package)[:16]


def pointer_key(number: int) -> str:
    return f"{PROMOTED}/{number_as_name(number, 8)}.json"


@click.command()
@click.argument("registry")
@click.option("--fetch", type=click.Path(path_type=Path), help="Fetch the promoted model into this new directory.")
def main(registry: str, fetch: Path | None) -> None:
    """List the promotions of the REGISTRY (a directory, or a store's address), the one in service last.

    Example: slipstream registry s3://models/churn --fetch model/
    """
    models = Registry(registry)
    in_service = models.promoted()
    if in_service is None:
        raise UserError(f"{registry}: no model was promoted yet; expected a registry that train_and_promote has filled")
    for number in models.numbers():
        try:
            pointer = models.read(number)
        except UserError as error:  # of an earlier promotion
            click.echo(numbered_line(number, [error.message]))
        else:
            click.echo(numbered_line(number, (pointer.at, pointer.version, pointer.why)))
    if fetch:
        if fetch.exists():
            raise UserError(f"--fetch: {fetch} already exists; expected a directory that does not")
        try:
            fetch.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=fetch.parent, prefix=".fetch-") as scratch:
                put_in_place(models.fetch(in_service, Path(scratch, "model")), fetch)
        except OSError as error:
            raise cannot_write(fetch.parent, error) from None
        click.echo(f"in service: {fetch}")
