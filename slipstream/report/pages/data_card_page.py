"""The data card as a page: every column of the prepared data, and the first rows that were set aside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from slipstream.report.pages.rendering import render


def data_card_page(card: Mapping[str, Any], quarantined: Sequence[Mapping[str, Any]], made: datetime) -> str:
    """``card`` is the content of ``card.json``, ``quarantined`` the first rows of ``quarantine.parquet``."""
    totals = {
        split: sum(counts[split] for counts in card["classes"].values()) for split in ("train", "validation", "test")
    }
    return render("data_card.html", card=card, class_totals=totals, quarantined=quarantined, made=made)
