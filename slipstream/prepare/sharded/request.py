"""Which table several machines prepare, and how they divide the work."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from slipstream.prepare.config import DataConfig
from slipstream.prepare.source.files import Listing


@dataclass(frozen=True)
class TableRequest:
    """The table at ``data``, to predict its column ``target``; ``source`` is the fingerprint of what ``data`` names."""

    data: Listing
    target: str
    config: DataConfig
    source: str


class Division(StrEnum):
    """How machines share the work."""

    NONE = "none"
    """One machine does it all: images, and a base set to which nothing is new."""
    UNITS = "units"
    """Each reads some of the units: row groups and batches of Parquet and Arrow, or groups of text documents."""
    FILES = "files"
    """Each first parses some of the files: CSV and JSON Lines."""
