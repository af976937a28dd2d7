"""Exported package opened for scoring or serving."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from slipstream.pipeline.export.package.files import LONGEST_JSON
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.export import SIGNATURE, DeployedSignature
from slipstream.shared.storage import MissingObject, read_below


@dataclass(frozen=True)
class OpenedPackage:
    """Package with lazily read signature and preparation statistics ({} if missing)."""

    directory: Path

    @cached_property
    def signature(self) -> DeployedSignature:
        content = read_below(str(self.directory), SIGNATURE, LONGEST_JSON)
        return from_json(content, DeployedSignature, self.directory / SIGNATURE)

    @cached_property
    def statistics(self) -> dict[str, Any]:
        content = self.read_file("statistics.json")
        if content is None:
            return {}
        statistics: dict[str, Any] = from_json(content, dict[str, Any], self.directory / "statistics.json")
        return statistics

    def read_file(self, name: str) -> bytes | None:
        """Return the content of a file; None if it does not exist.

        Raises ``UserError`` if it is unreadable.
        """
        try:
            return read_below(str(self.directory), name, LONGEST_JSON)
        except MissingObject:
            return None
