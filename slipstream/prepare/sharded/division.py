"""How machines share the work on raw data."""

from __future__ import annotations

from enum import StrEnum


class Division(StrEnum):
    """Kept apart from what finds it out, as workflows read it whenever they are imported."""

    NONE = "none"
    """One machine does it all: images, and a base set to which nothing is new."""
    UNITS = "units"
    """Each reads some of the units: row groups and batches of Parquet and Arrow, or groups of text documents."""
    FILES = "files"
    """Each first parses some of the files: CSV and JSON Lines."""
