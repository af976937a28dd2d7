"""Which table several machines prepare."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.preprocess.config import DataConfig
from tasks.preprocess.read.files import Listing


@dataclass(frozen=True)
class TableRequest:
    """The table at ``data``, to predict its column ``target``; ``source`` is the fingerprint of what ``data`` names."""

    data: Listing
    target: str
    config: DataConfig
    source: str
