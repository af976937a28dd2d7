"""Prepared data whose rows carry their numbers, so that a test can identify them."""

from pathlib import Path

import numpy as np

from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND, TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record

SIGNATURE = Signature(
    inputs=(
        TensorSpec("numeric", "float32", (3,)),
        TensorSpec("categorical", "int32", (2,)),
        TensorSpec("image", "uint8", (1, 3, 3)),
    ),
    task="classification",
    target="y",
    classes=("a", "b", "c"),
)


def records(rows: int) -> np.ndarray:
    """``rows`` records of :data:`SIGNATURE` whose first category is the number of the row; all else is random."""
    draw = np.random.default_rng(0)
    made = np.zeros(rows, SIGNATURE.record)
    made["numeric"] = draw.normal(size=(rows, 3))
    made["categorical"][:, 0] = np.arange(rows)
    made["categorical"][:, 1] = draw.integers(0, 9, rows)
    made["image"] = draw.integers(0, 256, (rows, 1, 3, 3))
    made[TARGET] = draw.integers(0, 3, rows)
    return made


def write(
    directory: Path, splits: dict[str, list[np.ndarray]], block_rows: int, signature: Signature = SIGNATURE
) -> PreparedData:
    """Prepared data whose splits have the given segments."""
    writer = ArtifactWriter(directory)
    for split, segments in splits.items():
        for number, segment in enumerate(segments):
            name = f"{split}-{number:05d}.rows"
            with writer.create(name, block_bytes=block_rows * signature.record.itemsize) as file:
                file.write(np.ascontiguousarray(segment).view(np.uint8))
    write_record(writer, "signature.json", signature)
    writer.finish(KIND, {})
    return PreparedData.open(directory)


def flip_bit(path: Path, byte: int) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(byte)
        value = file.read(1)[0]
        file.seek(byte)
        file.write(bytes([value ^ 4]))
