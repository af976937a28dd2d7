"""Distributions of raw columns and predictions over the training rows, for drift checks in scoring.

The rows are a sample spread evenly over the training split. Numbers are decoded from prepared rows in single precision,
so bin edges lie between two such numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from slipstream.pipeline.export.package.raw_columns import FIRST, MISSING, UNSEEN, CategoryInput, raw_columns
from slipstream.pipeline.export.package.samples import decode_rows
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import Bins, Distributions
from slipstream.shared.comparison.stability import fit_numbers, fit_predictions, fit_texts
from slipstream.shared.models.predict import ModelFunction, predict_records

#: Maximum rows and bytes of the sample.
ROWS, BYTES = 1 << 16, 64 << 20


def model_distributions(model: ModelFunction, data: PreparedData) -> Distributions | None:
    """Return the distributions for a model exported with ``data``; None for next-token models, which are not scored."""
    signature = data.signature
    if signature.task == "next token":
        return None
    records = data.sample("train", max(1, min(ROWS, BYTES // signature.record.itemsize)))
    outputs = predict_records(model, signature, records)
    if signature.classes:
        powers = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        outputs = powers / powers.sum(axis=1, keepdims=True)
    predictions = fit_predictions(outputs.reshape(len(records), -1), signature.classes)
    return Distributions(len(records), of_columns(data.artifact.read_json("statistics.json"), records), predictions)


def of_columns(statistics: Mapping[str, Any], records: np.ndarray) -> dict[str, Bins]:
    """Return the bins of every numeric or categorical column; empty if the data are not a table."""
    if "types" not in statistics:
        return {}
    columns = raw_columns(statistics)
    decoded = decode_rows(columns, records)
    found = {name: fit_numbers(decoded[name]) for name in columns.numeric}
    for index, category in enumerate(columns.categories):
        found[category.name] = of_codes(category, records["categorical"][:, index])
    return {name: found[name] for name in columns.types}


def of_codes(category: CategoryInput, codes: np.ndarray) -> Bins:
    counts = np.bincount(codes, minlength=FIRST + len(category.vocabulary)).tolist()
    known = Counter(dict(zip(category.vocabulary, counts[FIRST:], strict=True)))
    return fit_texts(known, counts[MISSING], counts[UNSEEN])
