"""What identifies raw data: a digest of the names and bytes of its files."""

from __future__ import annotations

import xxhash

from tasks.preprocess.read.files import SourceFile, find_files, relative

HASH_BYTES = 8 << 20


def fingerprint_source(data: str, target: str = "") -> str:
    """What identifies the raw data: XXH3-128 (hex) over the names and bytes of its files.

    Of an object in S3 the key, size and ETag stand for its bytes. Empty ``data`` means the digits that ship with
    scikit-learn. ``target`` is part of the identity, so that another target is other data.
    """
    if not data:
        from tasks.preprocess.read.digits import load

        pixels, labels = load()
        digest = xxhash.xxh3_128(target.encode() + b"\0")
        digest.update(b"digits\0")
        digest.update(pixels.tobytes())
        digest.update(labels.tobytes())
        return digest.hexdigest()
    # Of an image the folder is the label, so that it counts; where all of them lie does not.
    return digest_files([(relative(file, data), file) for file in find_files(data)], target)


def digest_files(files: list[tuple[str, SourceFile]], target: str) -> str:
    """The fingerprint of these files under these names."""
    digest = xxhash.xxh3_128(target.encode() + b"\0")
    for name, file in files:
        digest.update(f"{name}\0{file.size}\0{file.etag}\0".encode())
        if not file.etag:
            with file.open() as stream:
                while piece := stream.read(HASH_BYTES):
                    digest.update(piece)
    return digest.hexdigest()
