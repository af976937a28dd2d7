"""Which code a stage's result depends on: one function behind Flyte's cache version and the local store's key."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

#: For each stage, the rooms whose code it runs and the libraries whose version can change its numbers.
DEPENDS_ON: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "prepare": (("preprocess",), ("numpy", "pandas", "pillow", "pyarrow", "scikit-learn")),
    "train": (("train", "preprocess"), ("torch", "numpy")),
    "evaluate": (("evaluate", "train", "preprocess"), ("torch", "numpy", "scikit-learn")),
    "export": (
        ("export", "evaluate", "train", "preprocess"),
        ("torch", "numpy", "scipy", "scikit-learn", "onnx", "onnxruntime", "onnxscript"),
    ),
    "collectives": (("collectives",), ("torch",)),
}


@cache
def code_version(stage: str) -> str:
    """A digest of the source of the stage's rooms, of what all rooms share, and of its libraries' versions."""
    rooms, libraries = DEPENDS_ON[stage]
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.glob("*.py"), *(path for room in rooms for path in (root / room).rglob("*.py"))]):
        digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
        digest.update(path.read_bytes())
    for library in libraries:
        digest.update(f"{library}=={installed(library)}\0".encode())
    return digest.hexdigest()[:16]


def installed(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "absent"
