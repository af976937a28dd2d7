"""Directory of a base in Hugging Face's format, or of an adapter in peft's, local or in a store."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from typing import Any, NamedTuple

import numpy as np

from slipstream.shared.artifacts.hugging_face import ADAPTER, ADAPTER_CONFIG, CONFIG, LONGEST_JSON
from slipstream.shared.errors import UserError
from slipstream.shared.storage import STORES, ObjectInfo, list_objects, open_below, read_range
from slipstream.shared.storage.local import info_of, local_info, local_path


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

    The first chunk starts at offset ``start`` of the file, the others follow every ``stride`` bytes. From a store they
    are read by one request, including the bytes in between. Raises ``UserError`` if the file has changed since it was
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
