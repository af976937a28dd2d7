"""Fingerprint of raw data: a digest of the names and bytes of its files."""

from __future__ import annotations

import numpy as np
import xxhash

from slipstream.shared.source.files import Listing, SourceFile, files_unchanged

HASH_BYTES = 8 << 20


def fingerprint_source(listing: Listing, target: str = "") -> str:
    """Return the fingerprint of raw data: XXH3-128 (hex) of the names and bytes of its files, and of ``target``.

    For objects in a store, key, size and version replace the bytes. Raise ``UserError`` if a file changes while it is
    read.
    """
    if not listing.address:
        pixels, labels = load_digits()
        digest = xxhash.xxh3_128(target.encode() + b"\0")
        digest.update(b"digits\0")
        digest.update(pixels.tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()
    # The folder of an image is its label, so it counts; the location of the whole set does not.
    with files_unchanged(listing.files):
        return digest_files([(listing.relative(file), file) for file in listing.files], target)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's handwritten digits, the default data: 1,797 real scans.

    Pixels are uint8 ``[1797, 1, 8, 8]`` (0 to 16), labels int32 ``[1797]`` (0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn import datasets

    digits = datasets.load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)


def digest_files(files: list[tuple[str, SourceFile]], target: str) -> str:
    digest = xxhash.xxh3_128(target.encode() + b"\0")
    for name, file in files:
        etag = "" if file.local else file.version
        digest.update(f"{name}\0{file.size}\0{etag}\0".encode())
        if file.local:
            with file.open() as stream:
                while piece := stream.read(HASH_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
