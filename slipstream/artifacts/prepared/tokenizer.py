"""The files of a tokenizer, as Hugging Face's libraries write them beside a model."""

from __future__ import annotations

import json
from pathlib import Path

from slipstream.errors import UserError

#: Any of these is a tokenizer; the others only complete one.
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
OTHERS = ("merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
FILES = (*VOCABULARIES, *OTHERS)


def tokenizer_files(directory: Path, vocabulary: int) -> list[Path]:
    """The files of the tokenizer in ``directory``.

    Raises ``UserError`` if there is none, or if its ``tokenizer.json`` has ids that a model of ``vocabulary`` tokens
    does not know.
    """
    found = [directory / name for name in FILES if (directory / name).is_file()]
    if not any(path.name in VOCABULARIES for path in found):
        raise UserError(f"{directory}: holds no tokenizer; expected one of {', '.join(VOCABULARIES)} in it")
    fast = directory / "tokenizer.json"
    if fast in found and (largest := largest_id(fast)) >= vocabulary:
        raise UserError(f"{fast}: has the token id {largest}; the model knows 0 to {vocabulary - 1}")
    return found


def largest_id(path: Path) -> int:
    """The largest token id of a ``tokenizer.json``. Raises ``UserError`` if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        stored = content["model"]["vocab"]  # ids by token, or a list in which a token's place is its id
        ids = stored.values() if isinstance(stored, dict) else range(len(stored))
        return max([*ids, *(token["id"] for token in content.get("added_tokens") or ())], default=-1)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no tokenizer of Hugging Face's tokenizers: {error!r}") from None
