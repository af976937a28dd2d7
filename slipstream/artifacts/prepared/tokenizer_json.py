"""Contents of a ``tokenizer.json``, read as JSON without the tokenizers library."""

from __future__ import annotations

import json
from typing import Any

#: The file's name, as Hugging Face's libraries write it.
FAST = "tokenizer.json"
#: Most token ids of a tokenizer. Models allocate an embedding for every id.
MOST_IDS = 1 << 24
#: Entries that a tokenizer keeps from its use before it was saved, with neutral values.
STATE = {"truncation": None, "padding": None}
#: Entries of its model that make encoding random.
RANDOM = {"dropout": None}


def parse(text: str) -> dict[str, Any]:
    """Return the object in a ``tokenizer.json``. Raises ``ValueError`` for anything else."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def reset(text: str) -> str:
    """Return a ``tokenizer.json`` without truncation, padding and dropout.

    The library obeys these entries in every encoding: it would cut or pad documents, and encode them at random. A file
    without them is returned unchanged. Raises ``ValueError`` unless the text is a JSON object.
    """
    content = parse(text)
    model = content.get("model")
    parts = [(content, STATE), (model, RANDOM)] if isinstance(model, dict) else [(content, STATE)]
    if not any(part.get(name) != value for part, entries in parts for name, value in entries.items()):
        return text
    for part, entries in parts:
        part |= {name: value for name, value in entries.items() if name in part}
    return json.dumps(content, ensure_ascii=False)


def largest_id(text: str) -> int:
    """Return the largest token id of a ``tokenizer.json``, -1 without any. Raises ``ValueError`` if it states none."""
    content = parse(text)
    try:
        stored = content["model"]["vocab"]  # ids by token, or a list whose indices are the ids
        ids = [*(stored.values() if isinstance(stored, dict) else range(len(stored)))]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r}") from None
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("its ids are not integers of at least 0")
    return max(ids, default=-1)
