"""A fingerprint of the user's own model code, without running it: an edited factory is new work."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import xxhash

from tasks.models.config import ModelConfig


def fingerprint_model(config: ModelConfig) -> str:
    """XXH3-128 of the source file that holds the factory; empty for the built-in networks or if there is none.

    Only that file counts; what it imports in turn does not.
    """
    module, colon, _ = config.name.partition(":")
    if not colon:
        return ""
    import_from_here()
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return ""
    origin = Path(spec.origin) if spec and spec.origin else None
    return xxhash.xxh3_128_hexdigest(origin.read_bytes()) if origin and origin.is_file() else ""


def import_from_here() -> None:
    """Let the working directory be a place to import from, as it is for ``python -m``."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
