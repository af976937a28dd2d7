"""Digests of the files of a base and of a start adapter."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import lru_cache

import xxhash

from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.hugging_face import ADAPTER, ADAPTER_CONFIG, CONFIG
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import START, BaseDirectory, read_pieces
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import STORES, ObjectInfo

BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class BaseRecord:
    """Base from which a model was fine-tuned: its address and :func:`fingerprint_base`."""

    address: str
    digest: str

    def check(self) -> None:
        """Raise ``UserError`` if the base is missing or has changed, ``StorageUnavailable``."""
        try:
            found = fingerprint_base(self.address)
        except UserError as error:
            raise UserError(f"{error.message} (the base of a model that was fine-tuned)") from None
        if found != self.digest:
            raise UserError(
                f"model.base: {self.address}: no longer holds the model that was fine-tuned; expected its original "
                f"files, with the digest {self.digest}"
            )


def fingerprint_base(address: str) -> str:
    """Return the XXH3-128 digest of config.json and all safetensors in the directory ``address``.

    It covers names, sizes and bytes; in a store etags instead of bytes. Returns "" for an empty address. Raises
    ``UserError``, ``StorageUnavailable``.
    """
    if not address:
        return ""
    directory = BaseDirectory.list(address)
    names = {name for name in directory.files if name == CONFIG or name.endswith(".safetensors")}
    return fingerprint_files(directory, names)


def fingerprint_origin(model: ModelConfig) -> str:
    """Return :func:`fingerprint_base` of a model's base, followed by the digest of its start adapter, if any.

    Raises like :func:`fingerprint_base`.
    """
    base = fingerprint_base(model.base)
    if not model.lora.start:
        return base
    directory = BaseDirectory.list(model.lora.start, START)
    return f"{base} {fingerprint_files(directory, {ADAPTER_CONFIG, ADAPTER} & directory.files.keys())}"


def fingerprint_files(directory: BaseDirectory, names: Set[str]) -> str:
    entries = {name: [directory.files[name].size, content_of(directory.files[name])] for name in sorted(names)}
    return xxhash.xxh3_128_hexdigest(canonical_json(entries))


def content_of(info: ObjectInfo) -> str:
    return info.etag if info.uri.startswith(STORES) else cached_file_digest(info.uri, info.size, info.etag)


@lru_cache(maxsize=1024)
def cached_file_digest(uri: str, size: int, etag: str) -> str:
    """Return the digest of a local file, cached per process until its size or ``etag`` changes."""
    found, info = xxhash.xxh3_128(), ObjectInfo(uri, size, etag)
    for start in range(0, size, BLOCK_BYTES):
        width = min(BLOCK_BYTES, size - start)
        found.update(read_pieces(info, start, width, width, 1)[0].data)
    return found.hexdigest()
