"""What identifies raw data: a digest of the names and bytes of its files."""

from __future__ import annotations

import xxhash

from slipstream.prepare.source.files import Listing, SourceFile, unchanged
from slipstream.prepare.source.images.digits import load

HASH_BYTES = 8 << 20


def fingerprint_source(listing: Listing, target: str = "") -> str:
    """What identifies the raw data: XXH3-128 (hex) over the names and bytes of its files.

    Of an object in a store the key, size and version stand for its bytes. ``target`` is part of the identity, so that
    another target is other data. Raises ``UserError`` if a file changes while it is read.
    """
    if not listing.address:
        pixels, labels = load()
        digest = xxhash.xxh3_128(target.encode() + b"\0")
        digest.update(b"digits\0")
        digest.update(pixels.tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()
    # Of an image the folder is the label, so that it counts; where all of them lie does not.
    with unchanged(listing.files):
        return digest_files([(listing.relative(file), file) for file in listing.files], target)


def digest_files(files: list[tuple[str, SourceFile]], target: str) -> str:
    """The fingerprint of these files under these names."""
    digest = xxhash.xxh3_128(target.encode() + b"\0")
    for name, file in files:
        etag = "" if file.local else file.version
        digest.update(f"{name}\0{file.size}\0{etag}\0".encode())
        if file.local:
            with file.open() as stream:
                while piece := stream.read(HASH_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
