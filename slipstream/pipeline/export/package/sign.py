"""Signing of exported models: ``slipstream sign`` (extra ``[sign]``).

The Ed25519 signature (RFC 8032) covers the manifest's bytes and, by its digests, every file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from slipstream.pipeline.export.package.files import MANIFEST, SIGNATURE, BadPackage, check_files, read_file
from slipstream.shared.errors import UserError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


def private_key(path: Path) -> Ed25519PrivateKey:
    """Return the Ed25519 private key in a PEM file.

    Raises ``UserError`` if there is none.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key
    except ModuleNotFoundError:
        raise UserError("signing needs cryptography; install Slipstream with the extra [sign]") from None
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected an Ed25519 private key (PEM)") from None
    except (ValueError, TypeError):
        raise UserError(
            f"{path}: not a private key without a password; expected an Ed25519 private key (PEM)"
        ) from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path}: holds another kind of key; make one with: openssl genpkey -algorithm ed25519")
    return key


def sign_package(directory: Path, key: Path) -> Path:
    """Verify every file and write the signature next to the manifest.

    Raises ``UserError`` for an unusable model or key.
    """
    private = private_key(key)
    try:
        check_files(directory)
    except BadPackage as error:
        raise UserError(f"{error}; only a complete model can be signed") from None
    path = directory / SIGNATURE
    path.write_bytes(private.sign(read_file(directory, MANIFEST)))
    return path


@click.command()
@click.argument("directory", type=click.Path(path_type=Path))
@click.argument("key", type=click.Path(path_type=Path))
def main(directory: Path, key: Path) -> None:
    """Sign the exported model in DIRECTORY with the Ed25519 private key in the file KEY (PEM).

    Example: slipstream sign runs/…/model private.pem
    """
    click.echo(sign_package(directory, key))
