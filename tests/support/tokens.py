"""Small token rows, tokenizers and transformers."""

from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.artifacts.prepared.data import TARGET, PreparedData
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.toys import as_artifact

LENGTH, VOCABULARY = 16, 48
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def word_tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """The words w0, w1 and so on have the ids 0, 1 and so on."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")


def data_with_words(directory: Path) -> PreparedData:
    """Write :func:`token_data` and a tokenizer."""
    word_tokenizer(VOCABULARY).save_pretrained(directory / "words")
    return token_data(directory / "data", directory / "words")


def token_data(directory: Path, tokenizer: Path | None = None) -> PreparedData:
    """Rows that count on from a random token, in steps of one, two or three."""
    random = np.random.default_rng(0)

    def rows(count: int) -> np.ndarray:
        starts, steps = random.integers(0, VOCABULARY, (count, 1)), random.integers(1, 4, (count, 1))
        return (starts + steps * np.arange(LENGTH + 1)) % VOCABULARY

    splits = {"train": rows(400), "validation": rows(40), "test": rows(200)}
    return write_token_rows(directory, splits, VOCABULARY, tokenizer=tokenizer)


def small_transformer(directory: Path, data: PreparedData, steps: int = 0) -> Artifact:
    """Return the artifact of a small transformer, trained for ``steps`` steps on the training split."""
    config = ModelConfig("transformer", SIZES)
    model = build_model(config, data.signature, seed=0)
    rows = data.split("train")
    tokens, targets = (torch.from_numpy(np.array(rows[name])).long() for name in ("tokens", TARGET))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimiser.step()
    return as_artifact(directory, config, data, model.state_dict())
