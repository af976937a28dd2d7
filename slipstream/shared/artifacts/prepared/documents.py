"""Sample of complete, unchanged documents, stored with prepared language.

Models are measured on held-out documents, baselines trained on training documents. Rows of tokens cannot restore the
text: they cut documents, and a tokenizer may lose bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter

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
    """Document with the ``texts`` that count in the loss: all of it, or the answers of a conversation.

    ``tokens`` (int32) of held-out documents start with the context of the first with loss; one without loss is -1 - id.
    Training documents have no tokens.
    """

    name: str
    split: str
    texts: list[str]
    tokens: np.ndarray

    @property
    def bytes(self) -> int:
        return sum(len(text.encode()) for text in self.texts)


def documents_table(documents: Sequence[Document]) -> pa.Table:
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
    """Return the documents of a split in stored order. Raises ``DamagedArtifact`` if the file is damaged."""
    table = pq.read_table(pa.BufferReader(artifact.read_bytes(DOCUMENTS)), filters=[("split", "=", split)])
    return [
        Document(row["name"], row["split"], row["texts"], np.array(row["tokens"], np.int32))
        for row in table.to_pylist()
    ]
