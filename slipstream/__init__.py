"""Slipstream's engines: one package per stage, and shared packages. Plain Python, independent of Flyte."""

import os
from importlib import import_module
from typing import Any

# Unless this is set before the first import, the wheels of ONNX Runtime send usage data to their maker, with an
# identifier kept in the home directory (its Privacy.md, "Disabling Telemetry").
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
# Torch's C++ code warns on stderr when the reverse look-up of a loopback address fails, as it does wherever /etc/hosts
# does not name it. Its errors still appear.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def load(address: str | os.PathLike[str]) -> Any:
    """Load an exported model; see :func:`slipstream.pipeline.score.loaded.load`."""
    # By name, as an import would make it part of every stage's code version.
    return import_module("slipstream.pipeline.score.loaded").load(address)
