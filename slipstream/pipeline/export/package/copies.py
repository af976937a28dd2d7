"""Copies of exported packages, limited to the files of a verified manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from slipstream.pipeline.export.package.files import (
    DIGEST,
    LONGEST_JSON,
    MANIFEST,
    SIGNATURE,
    BadPackage,
    check_files,
    read_manifest,
)
from slipstream.shared.errors import UserError
from slipstream.shared.storage import STORES, ObjectInfo, list_names, path_below, read_below, storage_for
from slipstream.shared.storage.local import local_path
from slipstream.shared.untrusted_files import RefusedFile, copy_untrusted

#: Files of a package that its manifest does not list.
UNLISTED = (MANIFEST, DIGEST, SIGNATURE)
#: Number of parallel downloads.
REQUESTS = 8


def copy_package(address: str, directory: Path, below: str = "") -> None:
    """Copy the package at ``address``/``below``, local or in a store, into the fresh ``directory``.

    A local package is verified before copying. A store's listing is compared with the manifest before other files are
    fetched. The copy is verified, too. Raises ``BadPackage`` naming a missing or changed file, ``UserError`` if there
    is no package, and ``OSError`` or ``StorageUnavailable`` if reading fails.
    """
    source = f"{address.rstrip('/')}/{below}" if below else address
    local = not address.startswith(STORES)
    there = list_names(source) if not local else {}
    if not there and not (local and local_path(source).is_dir()):
        raise UserError(f"{source}: no exported model can be read there (no such directory); check the address")
    directory.mkdir(parents=True)
    with named_within(str(local_path(source)) if local else source), named_within(str(directory)):
        if local:
            copy_local(local_path(address), below, directory)
        else:
            fetch_listed(source, there, directory)
        check_files(directory)


def copy_local(root: Path, below: str, directory: Path) -> None:
    """Copy the local package at ``root``/``below``."""
    package = root / below
    check_files(package)
    records = read_manifest(package)["files"]
    sizes = {name: (package / name).stat().st_size for name in UNLISTED if (package / name).exists()}
    for name, size in {**sizes, **{name: record["size"] for name, record in records.items()}}.items():
        target = path_below(directory, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            copy_untrusted(root, f"{below}/{name}" if below else name, target, size)
        except RefusedFile as refused:
            raise BadPackage(str(refused)) from None


def fetch_listed(source: str, there: Mapping[str, ObjectInfo], directory: Path) -> None:
    """Fetch a package from a store; ``there`` lists its files."""
    for name in UNLISTED:
        if name in there:
            (directory / name).write_bytes(read_below(source, name, LONGEST_JSON))
    records = read_manifest(directory)["files"]
    for name, record in records.items():
        if name not in there:
            raise BadPackage(f"{name}: missing, though the manifest lists it")
        if there[name].size != record["size"]:
            raise BadPackage(f"{name}: {there[name].size} bytes, the manifest says {record['size']}")
    if extra := sorted(there.keys() - records.keys() - set(UNLISTED)):
        raise BadPackage(f"{extra[0]}: not part of the exported model; remove it")
    storage = storage_for(source)
    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(lambda name: storage.get(name, directory), records))


@contextmanager
def named_within(root: str) -> Iterator[None]:
    """Make paths below ``root`` relative in the messages of ``BadPackage`` errors from the block."""
    try:
        yield
    except BadPackage as error:
        raise BadPackage(str(error).replace(f"{root}/", "").replace(f"{root}: ", "")) from None
