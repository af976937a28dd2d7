"""Files of an exported model that others may have changed: read with limits, and verified against the manifest."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.one_line import one_line
from slipstream.shared.source.npz import DAMAGED
from slipstream.shared.untrusted_files import RefusedFile, open_untrusted, read_untrusted

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

#: File with the ``sha256sum`` line of the manifest. It covers all files, since the manifest holds their digests.
DIGEST = "manifest.sha256"
SIGNATURE = "manifest.sig"
MANIFEST, DEPLOYED = "manifest.json", "signature.json"
#: Maximum size in bytes of a file that is read into memory.
LONGEST_JSON = 256 << 20
#: Errors of content that no export writes.
UNEXPECTED = (ArithmeticError, AttributeError, LookupError, TypeError, *DAMAGED)


class BadPackage(Exception):
    """Error for a directory that is not an exported model or was changed; the message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def digest_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


@contextmanager
def errors_as_bad_package(path: Path) -> Iterator[None]:
    """Raise ``BadPackage`` if the block cannot read ``path`` or finds unexpected content."""
    try:
        yield
    except OSError as error:
        raise BadPackage(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
    except MemoryError as error:
        raise BadPackage(f"{path}: takes more memory than this process may have") from error
    except UNEXPECTED as error:
        raise BadPackage(f"{path}: not a file that an export of this version writes ({error!r:.200})") from None


def read_file(directory: Path, name: str) -> bytes:
    """Return the content of a file of at most ``LONGEST_JSON`` bytes, opened by :func:`open_file`."""
    with refused_is_bad(directory / name):
        return read_untrusted(directory, name, LONGEST_JSON)


def open_file(directory: Path, name: str) -> BufferedReader:
    """Open a regular file for reading.

    Raises ``BadPackage`` for a symbolic link or any other type of file.
    """
    with refused_is_bad(directory / name):
        return open_untrusted(directory, name)


@contextmanager
def refused_is_bad(path: Path) -> Iterator[None]:
    """Raise ``BadPackage`` for a symbolic link and for ``RefusedFile`` in the block."""
    check_no_link(path)
    try:
        yield
    except RefusedFile as refused:
        raise BadPackage(str(refused)) from None


def check_no_link(path: Path) -> None:
    """Raise ``BadPackage`` if ``path`` is a symbolic link, whose target may change."""
    if path.is_symlink():
        raise BadPackage(
            f"{path}: a symbolic link; expected the file or directory itself. Export or copy the model again"
        )


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest; raise ``BadPackage`` unless it is an export's and matches its digest."""
    path = directory / MANIFEST
    with errors_as_bad_package(path):
        if not path.is_file():
            raise BadPackage(f"{directory}: not an exported model; expected a directory with a {MANIFEST}")
        raw, digest = read_file(directory, MANIFEST), directory / DIGEST
        if not digest.is_file():
            raise BadPackage(f"{digest}: missing; without it a changed {MANIFEST} is not found. Export the model again")
        if read_file(directory, DIGEST) != digest_line(raw).encode():
            raise BadPackage(f"{path}: its SHA-256 differs from the one in {DIGEST}: one of the two was changed")
    try:
        manifest = parse_json(raw)
        if (manifest["kind"], manifest["format"]) != ("export", 1) or not isinstance(manifest["files"], dict):
            found = f"{manifest['kind']!r:.40}, format {manifest['format']!r:.40}"
            raise BadPackage(f"{path}: holds {found}; expected 'export', 1")
    except (ValueError, KeyError, TypeError):
        raise BadPackage(f"{path}: not the manifest of an exported model") from None
    return manifest


def files_below(directory: Path) -> set[str]:
    """Return the names of all files.

    Raises ``BadPackage`` for a symbolic link.
    """
    paths = sorted(directory.rglob("*"))
    for path in paths:
        check_no_link(path)
    return {path.relative_to(directory).as_posix() for path in paths if not path.is_dir()}


def check_files(directory: Path) -> str:
    """Compare all files with the manifest.

    Raises ``BadPackage`` for a missing, changed or additional file.
    """
    records = read_manifest(directory)["files"]
    with errors_as_bad_package(directory / MANIFEST):
        compare_files(directory, records)
    if DEPLOYED in records:
        with errors_as_bad_package(directory / DEPLOYED):
            check_deployed(directory, records)
    return f"files      {len(records)}, each with its SHA-256"


def compare_files(directory: Path, records: Mapping[str, Mapping[str, object]]) -> None:
    there = files_below(directory)
    for name, record in records.items():
        # Open only names that were found here: a manifest may also list ../../etc/passwd.
        if name not in there:
            raise BadPackage(f"{directory}/{name}: missing, though the manifest lists it")
        path = directory / name
        with open_file(directory, name) as file:
            if (size := os.fstat(file.fileno()).st_size) != record["size"]:
                raise BadPackage(f"{path}: {size} bytes, the manifest says {record['size']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                raise BadPackage(f"{path}: its SHA-256 differs from the manifest's: it was changed")
    if extra := sorted(there - {*records, MANIFEST, DIGEST, SIGNATURE}):
        raise BadPackage(f"{directory / extra[0]}: not part of the exported model; remove it")


def check_deployed(directory: Path, records: Mapping[str, object]) -> None:
    """Raise ``BadPackage`` if ``signature.json`` names a model that the manifest does not list."""
    deployed = parse_json(read_file(directory, DEPLOYED))
    for one in filter(None, (deployed, deployed["raw"])):
        weights_alone = one["model"] == "" and one.get("no_onnx")
        if one["model"] not in records and not weights_alone:
            raise BadPackage(f"{directory / DEPLOYED}: names the model {one['model']!r}, which is not in the manifest")


def check_signature(directory: Path, key: Path | None) -> list[str]:
    """Verify the manifest's Ed25519 signature (RFC 8032), if signed.

    Raises ``BadPackage`` for a wrong signature, a signature without ``key``, or ``key`` without a signature.
    """
    path = directory / SIGNATURE
    if not path.exists():
        if key:
            raise BadPackage(f"{path}: missing: the model is not signed; sign it, or check it without --key")
        return []
    if not key:
        raise BadPackage(f"{path}: signed, but no key was given; check it with --key and its signer's public key (PEM)")
    public = load_key(key)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(read_file(directory, SIGNATURE), read_file(directory, MANIFEST))
    except InvalidSignature:
        raise BadPackage(f"{path}: {key} did not sign this model, or the model was changed since") from None
    return [f"signature  of {key}"]


def load_key(path: Path) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ModuleNotFoundError:
        raise BadPackage(f"{path}: a signature needs the package cryptography; pip install cryptography") from None
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise BadPackage(f"{path}: cannot be read ({error.strerror}); expected a public key (PEM)") from None
    except ValueError:
        raise BadPackage(f"{path}: not a public key; expected an Ed25519 public key (PEM)") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadPackage(f"{path}: {type(key).__name__} is not an Ed25519 key")
    return key
