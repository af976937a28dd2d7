"""What identifies raw data: a digest of the names and bytes of its files."""

from __future__ import annotations

import numpy as np
import xxhash

from slipstream.source.files import Listing, SourceFile, unchanged

HASH_BYTES = 8 << 20


def fingerprint_source(listing: Listing, target: str = "") -> str:
    """What identifies the raw data: XXH3-128 (hex) over the names and bytes of its files.

    Of an object in a store the key, size and version stand for its bytes. ``target`` is part of the identity, so that
    another target is other data. Raises ``UserError`` if a file changes while it is read.
    """
    if not listing.address:
        pixels, labels = load_digits()
        digest = xxhash.xxh3_128(target.encode() + b"\0")
        digest.update(b"digits\0")
        digest.update(pixels.tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()
    # Of an image the folder is the label, so that it counts; where all of them lie does not.
    with unchanged(listing.files):
        return digest_files([(listing.relative(file), file) for file in listing.files], target)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """The handwritten digits that ship with scikit-learn, the default data: 1,797 real scans. Pixels (uint8
    ``[1797, 1, 8, 8]``, 0 to 16) and labels (int32 ``[1797]``, 0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)


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
