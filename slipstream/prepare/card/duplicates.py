"""Rows that differ in nothing but their identifier and lie on both sides of a split: held out, but already learned."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from slipstream.prepare.columns.hashing import hash_rows
from slipstream.prepare.fit.scan import SPLIT
from slipstream.prepare.fit.splits import TRAIN

#: From this share of the held-out rows on it is called a leak: in tables of few values some rows are alike by chance.
MANY = 0.01


def duplicates(sample: pa.Table, columns: list[str]) -> dict[str, int]:
    """Of the held-out ``rows`` of the sample, how many have the values of a training row in all ``columns``."""
    splits = sample[SPLIT].to_numpy()
    hashes = hash_rows([(name, sample[name].combine_chunks()) for name in columns], sample.num_rows)
    held_out = hashes[splits != TRAIN]
    return {"rows": len(held_out), "duplicates": int(np.isin(held_out, hashes[splits == TRAIN]).sum())}


def duplicate_warnings(found: dict[str, int]) -> list[str]:
    rows, alike = found["rows"], found["duplicates"]
    if alike <= MANY * rows:
        return []
    return [
        f"{alike:,} of {rows:,} held-out rows looked at ({alike / rows:.1%}) have the values of a training row under "
        "another identifier: if they are the same thing, name in data.group the column that tells so, or remove them"
    ]
