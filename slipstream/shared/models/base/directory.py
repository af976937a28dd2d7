"""Directory of a base in Hugging Face's format, or of an adapter in peft's, local or in a store."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from io import FileIO
from typing import Any, NamedTuple

import numpy as np
import xxhash

from slipstream.shared.artifacts.format import canonical_json
from slipstream.shared.artifacts.prepared.token_rows import ADAPTER, ADAPTER_CONFIG, CONFIG, LONGEST_JSON
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import STORES, ObjectInfo, list_objects, open_below, read_range
from slipstream.shared.storage.local import info_of, lasting_address, local_info, local_path


class DirectoryPurpose(NamedTuple):
    """Use of a directory: the setting that names it, the file that identifies it, and a text for messages."""

    setting: str
    config: str
    expected: str


BASE = DirectoryPurpose(
    "model.base", CONFIG, f"expected a directory, here or in a store, with Hugging Face's {CONFIG} and safetensors"
)
START = DirectoryPurpose(
    "model.lora.start",
    ADAPTER_CONFIG,
    f"expected a directory, here or in a store, with peft's {ADAPTER_CONFIG} and {ADAPTER}",
)


#: Hugging Face's default settings of generation.
GENERATION = "generation_config.json"
#: Files of a base that a trained model holds, and their directory in it.
SETTINGS, INHERITED = (CONFIG, GENERATION), "base"


@dataclass(frozen=True)
class BaseDirectory:
    """Directory at ``address`` with its files by name, without subdirectories."""

    address: str
    files: Mapping[str, ObjectInfo]
    purpose: DirectoryPurpose = BASE

    @classmethod
    def list(cls, address: str, purpose: DirectoryPurpose = BASE) -> BaseDirectory:
        """List a directory; raises ``UserError`` if it or its configuration is missing, ``StorageUnavailable``."""
        where = f"{purpose.setting}: {address}"
        if address.startswith(STORES):
            root = address.rstrip("/") + "/"
            listed = ((info.uri.removeprefix(root), info) for info in list_objects(root))
            files = {name: info for name, info in listed if "/" not in name}
        else:
            try:
                files = {path.name: local_info(path) for path in local_path(address).iterdir() if path.is_file()}
            except (FileNotFoundError, NotADirectoryError):
                raise UserError(f"{where}: no such directory; {purpose.expected}") from None
            except OSError as error:
                raise UserError(f"{where}: cannot be listed ({error.strerror})") from None
        if purpose.config not in files:
            raise UserError(f"{where}: holds no {purpose.config}; {purpose.expected}")
        return cls(address, files, purpose)

    def inherited(self) -> dict[str, bytes]:
        """Return the files for a trained model from which an export takes the base's settings."""
        return {f"{INHERITED}/{name}": canonical_json(self.json(name)) for name in SETTINGS if name in self.files}

    def where(self, name: str) -> str:
        """Return a file's name for messages, with setting and address."""
        return f"{self.purpose.setting}: {self.address.rstrip('/')}/{name}"

    def json(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a file; raises ``UserError``, ``StorageUnavailable``."""
        info = self.files[name]
        try:
            if info.size > LONGEST_JSON:
                raise ValueError(f"{info.size} bytes are too many")
            content = json.loads(read_pieces(info, 0, info.size, info.size, 1)[0].tobytes())
        except (ValueError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{self.where(name)}: cannot be read as JSON: {error}") from None
        if not isinstance(content, dict):
            raise UserError(f"{self.where(name)}: expected a JSON object, as Hugging Face's libraries write it")
        return content


def read_pieces(info: ObjectInfo, start: int, width: int, stride: int, count: int) -> tuple[np.ndarray, int]:
    """Read ``count`` chunks of ``width`` bytes; return them (uint8) and the stride between them in the result.

    The first chunk starts at offset ``start`` of the file, the others follow every ``stride`` bytes. From a store one
    request reads them, including the bytes in between. Raises ``UserError`` if the file has changed since it was
    listed, ``StorageUnavailable``.
    """
    if not width * count:
        return np.empty(0, np.uint8), stride
    if info.uri.startswith(STORES):
        content = bytearray(read_range(info, start, start + (count - 1) * stride + width))
        return np.frombuffer(content, np.uint8), stride
    if width == stride:
        return read_file(info, [start], width * count), width
    return read_file(info, range(start, start + count * stride, stride), width), width


def read_file(info: ObjectInfo, places: Sequence[int], length: int) -> np.ndarray:
    """Read ``length`` bytes at every offset in ``places`` of a local file, and concatenate them."""
    found = np.empty(len(places) * length, np.uint8)
    directory, name = os.path.split(info.uri)
    with open_below(directory, name) as buffered, FileIO(buffered.fileno(), closefd=False) as file:
        if info_of(info.uri, os.fstat(file.fileno())).etag != info.etag:
            raise UserError(f"{info.uri}: was replaced while it was read; start again")
        for number, place in enumerate(places):
            file.seek(place)
            left = found.data[number * length : (number + 1) * length]
            while left:
                read = file.readinto(left)
                if not read:
                    raise UserError(
                        f"{info.uri}: ends before its byte {place + length}; expected the size that was listed; start "
                        "again"
                    )
                left = left[read:]
    return found


#: Names of models on Hugging Face's hub, most with an owner.
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def base_address(given: str) -> str:
    """Return a base's absolute address; of a model's name, its directory in Hugging Face's local cache.

    Nothing is downloaded. Raises ``UserError``.
    """
    if not given or given.startswith(STORES) or local_path(given).exists() or not HUB_NAME.fullmatch(given):
        return lasting_address(given)
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise UserError(
            f"model.base: {given}: no such directory; {BASE.expected}; names of models need pip install -e '.[text]'"
        ) from None
    try:
        return snapshot_download(given, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        raise UserError(
            f"model.base: {given}: no such directory, and no model of this name in Hugging Face's cache; "
            f"{BASE.expected}, or the name of a cached model: hf download {given}"
        ) from None


def with_lasting_addresses(model: ModelConfig) -> ModelConfig:
    start = lasting_address(model.lora.start)
    return replace(model, base=base_address(model.base), lora=replace(model.lora, start=start))


BLOCK_BYTES = 16 << 20


class ModelOrigin:
    """Base and start adapter of a model, opened when they are first needed and then kept."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    @cached_property
    def base(self) -> BaseDirectory:
        """Listed base. Raises like :meth:`BaseDirectory.list`."""
        return BaseDirectory.list(self.model.base)

    @cached_property
    def start(self) -> BaseDirectory:
        """Listed start adapter. Raises like :meth:`BaseDirectory.list`."""
        return BaseDirectory.list(self.model.lora.start, START)

    @cached_property
    def base_digest(self) -> str:
        """XXH3-128 of the base's config.json and safetensors; "" without a base.

        It covers names, sizes and bytes; in a store etags instead of bytes. Raises ``UserError``,
        ``StorageUnavailable``.
        """
        if not self.model.base:
            return ""
        names = {name for name in self.base.files if name == CONFIG or name.endswith(".safetensors")}
        return fingerprint_files(self.base, names)

    @property
    def digest(self) -> str:
        if not self.model.lora.start:
            return self.base_digest
        names = {ADAPTER_CONFIG, ADAPTER} & self.start.files.keys()
        return f"{self.base_digest} {fingerprint_files(self.start, names)}"


@dataclass(frozen=True)
class BaseRecord:
    """Base from which a model was fine-tuned: its address and :attr:`ModelOrigin.base_digest`."""

    address: str
    digest: str

    def check(self, origin: ModelOrigin) -> None:
        """Raise ``UserError`` if the base, opened as ``origin``, is missing or has changed, ``StorageUnavailable``."""
        try:
            found = origin.base_digest
        except UserError as error:
            raise UserError(f"{error.message} (the base of a model that was fine-tuned)") from None
        if found != self.digest:
            raise UserError(
                f"model.base: {self.address}: no longer holds the model that was fine-tuned; expected its original "
                f"files, with the digest {self.digest}"
            )


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
