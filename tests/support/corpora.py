"""Small corpora: words that follow each other by a rule, as files, tables and conversations."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.pipeline.prepare.engine import prepare
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.language.tokenizer import bytes_tokenizer
from slipstream.shared.source.config import DataConfig

WORDS = ["alpha", "beta", "gamma", "delta", "épsilon", "zeta", "eta", "theta"]


def story(number: int) -> str:
    """Return a story of some hundred words; every word follows from one of the previous two.

    No two stories are equal.
    """
    draw = np.random.default_rng(number)
    place, words = int(draw.integers(len(WORDS))), [f"story {number}:"]
    for step in draw.integers(1, 3, int(draw.integers(20, 120))).tolist():
        place = (place + step) % len(WORDS)
        words.append(WORDS[place])
    return " ".join(words) + ".\n"


def write_stories(folder: Path, count: int = 60) -> Path:
    """Files in folders of their own."""
    for number in range(count):
        path = folder / f"part-{number % 3}" / f"{number}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(story(number), encoding="utf-8")
    return folder


def write_lines(path: Path, rows: list[Any]) -> Path:
    """Write JSON Lines; a text is written verbatim."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def prepare_language(directory: Path, data: Path | str, workers: int = 1, **settings: Any) -> PreparedData:
    config = DataConfig.from_dict({"task": "language", "tokenizer": "bytes", "length": 32, **settings})
    prepare(directory, str(data), "", config, {}, workers)
    return PreparedData.open(directory)


def rows_of(data: PreparedData, split: str) -> np.ndarray:
    """The stored tokens of a split, ``[rows, length + 1]``."""
    stored = data.split(split)
    return np.concatenate([stored["tokens"], stored["target"][:, -1:]], axis=1)


def own_tokenizer(directory: Path, template: str | None, **settings: Any) -> str:
    """Write a tokenizer of the bytes with a chat template, and return its address."""
    files = bytes_tokenizer(turns=True)
    directory.mkdir()
    content = json.loads(files["tokenizer_config.json"]) | settings
    (directory / "tokenizer.json").write_text(files["tokenizer.json"])
    (directory / "tokenizer_config.json").write_text(json.dumps(content))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return str(directory)
