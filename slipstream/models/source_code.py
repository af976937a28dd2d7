"""A digest of the user's own model code, which is read but not executed, so that an edited factory is trained anew."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import xxhash

from slipstream.models.config import ModelConfig


def fingerprint_model(config: ModelConfig) -> str:
    """XXH3-128 of the factory's source file, without the modules that it imports; empty for the built-in networks, or
    if there is no such file."""
    if not config.factory:
        return ""
    module = config.factory.partition(":")[0]
    import_from_working_directory()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    origin = Path(spec.origin) if spec and spec.origin else None
    return xxhash.xxh3_128_hexdigest(origin.read_bytes()) if origin and origin.is_file() else ""


def import_from_working_directory() -> None:
    """Put the working directory on the import path, as ``python -m`` does."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
