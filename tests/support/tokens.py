"""Small token rows and tokenizers."""

from __future__ import annotations

import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


def word_tokenizer(size: int) -> transformers.PreTrainedTokenizerFast:
    """The words w0, w1 and so on have the ids 0, 1 and so on."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(size)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")
