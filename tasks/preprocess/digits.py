"""The handwritten digits that ship with scikit-learn: 1,797 real scans of 8 x 8 pixels, the default data."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tasks.artifact import ArtifactWriter
from tasks.preprocess import quarantine
from tasks.preprocess.card import row_counts
from tasks.preprocess.config import DataConfig
from tasks.preprocess.hashing import hash_rows
from tasks.preprocess.merging import merge_splits
from tasks.preprocess.page import write_card
from tasks.preprocess.prepared import SPLITS, TARGET, Signature, TensorSpec
from tasks.preprocess.shards import RunWriter, order_keys
from tasks.preprocess.split import TRAIN, assign
from tasks.preprocess.workplace import Workplace


def load() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (uint8 ``[1797, 1, 8, 8]``, 0 to 16) and labels (int32 ``[1797]``, 0 to 9).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998, CC BY 4.0.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    return digits.images.astype(np.uint8)[:, None], digits.target.astype(np.int32)


def prepare_digits(writer: ArtifactWriter, place: Workplace, config: DataConfig) -> None:
    pixels, labels = load()
    flat = pixels.reshape(len(pixels), -1)
    hashes = hash_rows([(str(place), pa.array(flat[:, place])) for place in range(flat.shape[1])], len(flat))
    splits = assign(hashes, config.split)
    train = pixels[splits == TRAIN].astype(np.float64)
    classes = tuple(str(digit) for digit in range(10))
    signature = Signature(
        inputs=(TensorSpec("image", "uint8", pixels.shape[1:]),),
        task="classification",
        target="digit",
        classes=classes,
        image_mean=(float(train.mean()),),
        image_std=(float(train.std()),),
    )
    records = np.zeros(len(pixels), signature.record)
    records["image"], records[TARGET] = pixels, labels
    order = order_keys(0, len(pixels), len(pixels), config.shuffle)
    with RunWriter(place.root / "run") as runs:
        for split in range(len(SPLITS)):
            runs.add(split, np.flatnonzero(splits == split), order, records)
    merge_splits(writer, place, runs.runs, signature.record.itemsize)
    quarantine.write(writer, [])
    counts = np.array([[np.sum((splits == s) & (labels == c)) for s in range(len(SPLITS))] for c in range(10)])
    column = {"name": "image", "type": "uint8 1x8x8", "missing": 0, "min": int(pixels.min()), "max": int(pixels.max())}
    writer.write_json("signature.json", signature.to_json())
    writer.write_json("statistics.json", {"image_mean": signature.image_mean, "image_std": signature.image_std})
    writer.write_json(
        "schema.json", {"columns": [{"name": "image", "type": "image", "role": "image"}], "target": "digit"}
    )
    card = {
        "source": "handwritten digits (scikit-learn)",
        "rows": row_counts(len(pixels), counts.sum(axis=0).tolist(), 0),
        "task": signature.task,
        "target": signature.target,
        "columns": [column | {"role": "image", "mean": float(train.mean()), "std": float(train.std())}],
        "classes": {
            name: dict(zip(SPLITS, row, strict=True)) for name, row in zip(classes, counts.tolist(), strict=True)
        },
        "warnings": [],
    }
    write_card(writer, card, [])
