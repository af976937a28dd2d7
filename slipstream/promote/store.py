"""The registry: exported models by version in a directory or under a store's prefix, and which one is promoted.

``versions/<version>/`` holds a package, its manifest written last. ``promoted/<number>.json`` are the promotions, each
written once and if nobody else took its number: the highest is the model in service, and the others are its history. A
run that is killed leaves the promoted model as it is; of two that promote at once one takes the number.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import uuid
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import click
from pydantic import Field

from slipstream.artifacts.format import MANIFEST, DamagedArtifact
from slipstream.artifacts.records import from_json, to_json
from slipstream.artifacts.workspaces import put_in_place, workspace
from slipstream.errors import UserError
from slipstream.export.check import SIGNATURE, BadPackage, check_files
from slipstream.export.package.sign import sign
from slipstream.storage import AlreadyThere, Storage, cannot_write, path_below, storage_for
from slipstream.storage.local import LocalStorage
from slipstream.text_table import numbered

VERSIONS, PROMOTED = "versions", "promoted"
POINTER = re.compile(rf"{PROMOTED}/(\d{{8,}})\.json")


@dataclass(frozen=True)
class Pointer:
    """A promotion: its number from 1 on, the version, the SHA-256 of its manifest, why and when.

    The version becomes part of a path. ``run`` makes the bytes of each run's its own, so that a store can tell whose it
    took.
    """

    number: int
    version: Annotated[str, Field(pattern="^[0-9a-f]{16}$")]
    manifest: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    why: str
    at: str
    run: str


@dataclass(frozen=True)
class Registry:
    """A registry at ``uri``. All methods raise ``UserError`` and ``StorageUnavailable``."""

    uri: str

    def __post_init__(self) -> None:
        if not self.uri:
            raise UserError("registry: is empty; expected a directory or a store's address")

    @property
    def storage(self) -> Storage:
        return storage_for(self.uri)

    def promoted(self) -> Pointer | None:
        """The promotion that counts; None if there is none yet."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def history(self) -> list[Pointer]:
        return [self.read(number) for number in self.numbers()]

    def numbers(self) -> list[int]:
        """The numbers of all promotions, sorted. Whatever else lies there is not ours."""
        matches = map(POINTER.fullmatch, self.storage.list(f"{PROMOTED}/"))
        return sorted(number for match in matches if match and pointer_key(number := int(match[1])) == match[0])

    def read(self, number: int) -> Pointer:
        key = pointer_key(number)
        with tempfile.TemporaryDirectory() as scratch:
            text = self.storage.get(key, Path(scratch)).read_bytes()
        with suppress(DamagedArtifact):
            pointer = from_json(text, Pointer, key)
            if pointer.number == number:
                return pointer
        raise UserError(f"{self.uri}/{key}: no promotion; expected what a promotion writes, so delete it")

    def fetch(self, pointer: Pointer, directory: Path) -> Path:
        """A copy of a promoted model in the fresh ``directory``, every byte verified."""
        self.copy(pointer.version, directory)
        try:
            check_files(directory)
        except BadPackage as error:
            reason = str(error).replace(f"{directory}/", "").replace(f"{directory}: ", "")
            where = f"{self.uri}/{VERSIONS}/{pointer.version}"
            raise UserError(f"{where}: the promoted model is damaged: {reason}; restore it") from None
        if manifest_digest(directory) != pointer.manifest:
            where = f"{self.uri}/{VERSIONS}/{pointer.version}"
            raise UserError(f"{where}: the promoted model is not the one that was promoted; restore it")
        return directory

    def copy(self, version: str, directory: Path) -> None:
        """Copy what lies there of a version, whole or not, into the fresh ``directory``."""
        storage, prefix = self.storage, f"{VERSIONS}/{version}/"
        with tempfile.TemporaryDirectory() as scratch:
            for key in storage.list(prefix):
                target = path_below(directory, key.removeprefix(prefix), f"{self.uri}/{prefix}")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(storage.get(key, Path(scratch)), target)

    def add(self, package: Path, key: Path | None = None) -> str:
        """Store a package, signed with the private ``key`` if there is one, and return its version. Of one that lies
        there each file is replaced, by the same bytes if it is whole."""
        version = version_of(package)
        storage, prefix = self.storage, f"{VERSIONS}/{version}/"
        with scratch_of(storage) as scratch:
            copy = Path(scratch, version)
            try:
                shutil.copytree(package, copy)
            except OSError as error:
                raise cannot_write(storage.scratch(), error) from None
            if key:
                sign(copy, key)
            files = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
            strays = {stored for stored in storage.list(prefix) if stored.removeprefix(prefix) not in files}
            storage.delete(sorted(strays - {f"{prefix}{SIGNATURE}"}))
            for name in sorted(files, key=lambda name: (name == MANIFEST, name)):
                storage.put(f"{prefix}{name}", copy / name)
        return version

    def point(self, number: int, version: str, manifest: str, why: str) -> Pointer | None:
        """Promote ``version`` as the promotion ``number``; None if another run has taken that number."""
        pointer = Pointer(number, version, manifest, why, f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}", uuid.uuid4().hex)
        try:
            self.storage.create(pointer_key(number), to_json(pointer))
        except AlreadyThere:
            return None
        return pointer


def scratch_of(storage: Storage) -> AbstractContextManager[Path | str]:
    """A directory for a copy. Beside a registry on a disk a later run removes it if this process is killed; for a store
    it is the system's temporary one."""
    if isinstance(storage, LocalStorage):
        return workspace(storage.scratch())
    return tempfile.TemporaryDirectory(dir=storage.scratch())


def manifest_digest(package: Path) -> str:
    return sha256((package / MANIFEST).read_bytes()).hexdigest()


def version_of(package: Path) -> str:
    """The version of a package is the digest over its files. Raises ``UserError`` if it is not whole."""
    try:
        check_files(package)
    except BadPackage as error:
        raise UserError(str(error)) from None
    return manifest_digest(package)[:16]


def pointer_key(number: int) -> str:
    return f"{PROMOTED}/{number:08d}.json"


@click.command()
@click.argument("registry")
@click.option("--fetch", type=click.Path(path_type=Path), help="A fresh directory for the promoted model.")
def main(registry: str, fetch: Path | None) -> None:
    """List the promotions of the REGISTRY (a directory, or a store's address), the one in service last.

    Example: slipstream registry s3://models/churn --fetch model/
    """
    models = Registry(registry)
    history = models.history()
    if not history:
        raise UserError(f"{registry}: no model was promoted yet; expected a registry that train_and_promote has filled")
    for pointer in history:
        click.echo(numbered(pointer.number, (pointer.at, pointer.version, pointer.why)))
    if fetch:
        if fetch.exists():
            raise UserError(f"--fetch: {fetch} is there already; expected a directory that is not")
        try:
            fetch.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=fetch.parent, prefix=".fetch-") as scratch:
                put_in_place(models.fetch(history[-1], Path(scratch, "model")), fetch)
        except OSError as error:
            raise cannot_write(fetch.parent, error) from None
        click.echo(f"in service: {fetch}")
