"""Some documents of prepared language, whole and as they were: held-out ones with their tokens, by which a trained
model is measured, and training ones, which a model of another kind can learn from.

The rows cannot give them back: they cut documents, and a tokenizer need not keep every byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.artifacts.format import Artifact, ArtifactWriter

DOCUMENTS = "documents.parquet"
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("split", pa.string()),
        ("texts", pa.list_(pa.large_string())),
        ("tokens", pa.list_(pa.int32())),
    ]
)


@dataclass(frozen=True)
class Document:
    """What is learned of one document: its text, or the answers of a conversation.

    ``tokens`` (int32) begin with what goes before the first that is learned, and are -1 - id where they are not
    learned; there are none of a training document.
    """

    name: str
    split: str
    texts: list[str]
    tokens: np.ndarray

    @property
    def bytes(self) -> int:
        """Of the texts, in UTF-8."""
        return sum(len(text.encode()) for text in self.texts)


def table_of(documents: Sequence[Document]) -> pa.Table:
    columns = {
        "name": [each.name for each in documents],
        "split": [each.split for each in documents],
        "texts": [each.texts for each in documents],
        "tokens": [each.tokens for each in documents],
    }
    return pa.Table.from_pydict(columns, SCHEMA)


def write_documents(writer: ArtifactWriter, tables: Sequence[pa.Table]) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.concat_tables(tables), sink, compression="zstd")
    writer.write_bytes(DOCUMENTS, sink.getvalue().to_pybytes())


def has_documents(artifact: Artifact) -> bool:
    return DOCUMENTS in artifact.files


def read_documents(artifact: Artifact, split: str) -> list[Document]:
    """Those of a split, in the order in which they were read. Raises ``DamagedArtifact`` for a file that is damaged."""
    table = pq.read_table(pa.BufferReader(artifact.read_bytes(DOCUMENTS)), filters=[("split", "=", split)])
    return [
        Document(row["name"], row["split"], row["texts"], np.array(row["tokens"], np.int32))
        for row in table.to_pylist()
    ]
