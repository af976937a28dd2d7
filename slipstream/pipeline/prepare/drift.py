"""Drift between the splits of a table, and between new files and a base set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from slipstream.pipeline.prepare.fit.splits import TRAIN
from slipstream.shared.artifacts.prepared.data import SPLITS
from slipstream.shared.comparison.stability import ENOUGH, DriftTest, drift_test


def drift_by_split(binned: np.ndarray, splits: np.ndarray, ordered: bool) -> dict[str, DriftTest]:
    """Return the drift of every held-out split from the training rows; ``binned`` holds the bin of every row.

    If ``ordered``, sparse bins are merged with their neighbours, else all sparse bins are merged into one.
    """
    both = np.bincount(binned * len(SPLITS) + splits, minlength=len(SPLITS) * (int(binned.max(initial=0)) + 1))
    counts = both.reshape(-1, len(SPLITS)).T
    held_out = [split for split in range(len(SPLITS)) if split != TRAIN and counts[split].sum() >= ENOUGH]
    return {SPLITS[split]: drift_test(counts[TRAIN], counts[split], ordered) for split in held_out}


def drift_from(column: dict[str, Any], sample: pa.Table) -> DriftTest | None:
    """Return the drift of the ``sample`` from the ``column`` of an earlier data card, or None if it is unknown.

    Bins are those of the card's histogram, or its most frequent texts and one bin for all other texts.
    """
    values = sample[column["name"]].drop_null()
    if "histogram" in column:
        numbers = values.to_numpy()
        edges = np.array(column["histogram"]["edges"])
        before = np.array(column["histogram"]["counts"], float)
        now = np.histogram(numbers[(numbers >= edges[0]) & (numbers <= edges[-1])], edges)[0].astype(float)
        # The histogram excludes up to 0.5 % on each side.
        exceeds = [column.get("min", -np.inf) < edges[0], column.get("max", np.inf) > edges[-1]]
        outside = np.array(exceeds) * (0.005 / 0.99 * before.sum())
        beyond = [np.sum(numbers < edges[0]), np.sum(numbers > edges[-1])]
        before = np.concatenate([outside[:1], before, outside[1:]])
        now = np.concatenate([beyond[:1], now, beyond[1:]])
    elif column.get("top"):
        top = [text for text, _ in column["top"]]
        indices = pc.index_in(values.combine_chunks(), value_set=pa.array(top))
        binned = pc.fill_null(indices, len(top)).to_numpy(zero_copy_only=False)
        before = np.array([count for _, count in column["top"]] + [column.get("rest", 0)], float)
        now = np.bincount(binned, minlength=len(top) + 1)
    else:
        return None
    return drift_test(before, now, ordered="histogram" in column) if now.sum() >= ENOUGH else None
