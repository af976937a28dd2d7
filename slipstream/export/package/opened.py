"""An exported package in a directory, as those read it that run it later."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.artifacts.records import from_json
from slipstream.artifacts.results.export import SIGNATURE, DeployedSignature


@dataclass(frozen=True)
class OpenedPackage:
    """Its signature, and how its rows were prepared: empty if it does not say."""

    directory: Path

    @cached_property
    def signature(self) -> DeployedSignature:
        path = self.directory / SIGNATURE
        return from_json(path.read_bytes(), DeployedSignature, path)

    @cached_property
    def statistics(self) -> dict[str, Any]:
        path = self.directory / "statistics.json"
        if not path.is_file():
            return {}
        statistics: dict[str, Any] = from_json(path.read_bytes(), dict[str, Any], path)
        return statistics
