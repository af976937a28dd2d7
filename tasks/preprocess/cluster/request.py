"""Which table several machines prepare."""

from __future__ import annotations

from dataclasses import dataclass

from tasks.preprocess.config import DataConfig


@dataclass(frozen=True)
class TableRequest:
    """The table at ``data``, to predict its column ``target``; ``source`` is the fingerprint of what ``data`` names."""

    data: str
    target: str
    config: DataConfig
    source: str
