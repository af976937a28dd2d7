"""Contents of a ``tokenizer.json``, read as JSON without the tokenizers library."""

from __future__ import annotations

import json
from typing import Any

#: The file's name, as Hugging Face's libraries write it.
FAST = "tokenizer.json"
#: Largest vocabulary of a tokenizer; models allocate an embedding per id.
MOST_IDS = 1 << 24
#: Entries that change encoding because of earlier use of the tokenizer, with values that disable them.
STATE = {"truncation": None, "padding": None}
#: Entry of the tokenizer's model that makes encoding random, with the value that disables it.
RANDOM = {"dropout": None}


def parse_tokenizer_json(text: str) -> dict[str, Any]:
    """Parse a ``tokenizer.json``. Raises ``ValueError`` if it is not a JSON object."""
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    return content


def disable_padding_and_truncation(text: str) -> str:
    """Return a ``tokenizer.json`` with truncation, padding and dropout disabled; unchanged if none was set.

    The tokenizers library would otherwise cut or pad documents and encode them at random. Raises ``ValueError`` if
    ``text`` is not a JSON object.
    """
    content = parse_tokenizer_json(text)
    model = content.get("model")
    parts = [(content, STATE), (model, RANDOM)] if isinstance(model, dict) else [(content, STATE)]
    if not any(part.get(name) != value for part, entries in parts for name, value in entries.items()):
        return text
    for part, entries in parts:
        part |= {name: value for name, value in entries.items() if name in part}
    return json.dumps(content, ensure_ascii=False)


def largest_id(text: str) -> int:
    """Return the largest token id of a ``tokenizer.json``, or -1 if it has none. Raises ``ValueError`` if malformed."""
    content = parse_tokenizer_json(text)
    try:
        stored = content["model"]["vocab"]  # ids by token, or a list whose indices are the ids
        ids = [*(stored.values() if isinstance(stored, dict) else range(len(stored)))]
        ids += [token["id"] for token in content.get("added_tokens") or ()]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{error!r}") from None
    if not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError("its ids are not integers of at least 0")
    return max(ids, default=-1)
