"""Access to the tokenizers library, which only this module imports.

Some ``tokenizer.json`` make the library panic, hang or exhaust memory. So untrusted files are used in a child process
with limits (:class:`TokenizerProcess`).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from slipstream.shared.artifacts.prepared.token_rows import FAST
from slipstream.shared.distributed.limited_process import ENDINGS, CallFailed, CallLimits, LimitedProcess
from slipstream.shared.errors import UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Library

P = ParamSpec("P")
Result = TypeVar("Result")

#: CPU seconds allowed per call, and characters per additional second. Byte-level BPE encodes 1,300,000 characters per
#: second.
SECONDS, CHARACTERS_PER_SECOND = 60, 32 << 10
#: Bytes of memory allowed per call, and per character of its text. Byte tokens take 271 bytes per character.
MEMORY, MEMORY_PER_CHARACTER = 4 << 30, 1 << 10


def tokenizers_library() -> Any:
    """Return the tokenizers library; raises ``UserError`` if it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("data.task: language needs the library tokenizers; pip install -e '.[text]'") from None
    return tokenizers


class SpecialToken(NamedTuple):
    """Id and text of a special token."""

    id: int
    text: str


@dataclass(frozen=True)
class TokenizerEngine:
    """Tokenizer of the library, in the child process; its methods return plain values."""

    tokenizer: Library

    @classmethod
    def read(cls, text: str) -> TokenizerEngine:
        return cls(tokenizers_library().Tokenizer.from_str(text))

    def front(self) -> list[int]:
        """Return the ids that the post-processor puts in front of a text."""
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        return list(encoded.ids[: encoded.special_tokens_mask.index(0)]) if 0 in encoded.special_tokens_mask else []

    def largest_id(self) -> int:
        """Return the largest token id, or -1 for an empty vocabulary; ids may have gaps."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)

    def specials(self) -> list[SpecialToken]:
        added = self.tokenizer.get_added_tokens_decoder().items()
        return [SpecialToken(number, token.content) for number, token in added if token.special]

    def id_of(self, token: str) -> int | None:
        return self.tokenizer.token_to_id(token)

    def encode_texts(self, texts: list[str]) -> tuple[array[int], list[int]]:
        """Return the concatenated ids of all texts (uint32), and the number of ids per text, with the post-processor's.

        Text that spells a special token is encoded as plain text.
        """
        self.tokenizer.encode_special_tokens = True
        ids, counts = array("I"), []
        for encoded in self.tokenizer.encode_batch_fast(texts, add_special_tokens=True):
            ids.extend(encoded.ids)
            counts.append(len(encoded))
        return ids, counts

    def encode_with_specials(self, texts: list[str]) -> tuple[array[int], list[int], array[int]]:
        """Encode texts in which special tokens are recognised; return ids, counts, and start and end of every token.

        Starts and ends are character offsets in the text (uint32); ids and counts are as in :meth:`encode_texts`.
        """
        self.tokenizer.encode_special_tokens = False
        ids, counts, offsets = array("I"), [], array("I")
        for encoded in self.tokenizer.encode_batch(texts, add_special_tokens=False):
            ids.extend(encoded.ids)
            counts.append(len(encoded))
            offsets.extend(offset for both in encoded.offsets for offset in both)
        return ids, counts, offsets

    def text_of(self, number: int) -> str:
        return str(self.tokenizer.id_to_token(number))

    def decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


class TokenizerProcess:
    """Child process, with limits, that holds the :class:`TokenizerEngine` of a ``tokenizer.json``."""

    def __init__(self, text: str) -> None:
        tokenizers_library()  # A missing library has its own message.
        self._text = text
        self._process = LimitedProcess(TokenizerEngine.read, text)

    def call(
        self, size: int, function: Callable[Concatenate[TokenizerEngine, P], Result], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Return ``function(engine, *args)``, limited by ``size`` in characters; raises ``UserError`` on failure."""
        size += len(self._text)
        limits = CallLimits(SECONDS + size // CHARACTERS_PER_SECOND, MEMORY + size * MEMORY_PER_CHARACTER)
        try:
            return self._process.call(limits, function, *args, **kwargs)
        except CallFailed as failure:
            raise UserError(
                f"data.tokenizer: {FAST}: the library tokenizers fails with it: {failure}; expected a tokenizer that "
                "encodes every text; choose another, or set data.tokenizer: train"
            ) from None


@lru_cache(maxsize=1)
def engine_process(text: str) -> TokenizerProcess:
    """Return the child process for the text of a ``tokenizer.json``.

    Only the last process is kept, since each holds a vocabulary.
    """
    return TokenizerProcess(text)


# Tokenizers made here, from settings only


def bytes_bpe(specials: Sequence[str]) -> str:
    """Return the ``tokenizer.json`` with one id per byte, in byte order, then the special tokens."""
    models = tokenizers_library().models
    alphabet = byte_characters()
    engine = byte_level(models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    engine.add_special_tokens(list(specials))
    return with_end_in_front(engine, specials)


def trained_bpe(texts: Iterable[str], vocabulary: int, specials: Sequence[str]) -> str:
    """Return the ``tokenizer.json`` of byte-level BPE trained on ``texts``.

    The same texts give the same file on any number of threads. Raises ``UserError`` if the library fails, and errors of
    the iterator ``texts``.
    """
    tokenizers = tokenizers_library()
    engine = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(specials),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    try:
        engine.train_from_iterator(texts, trainer)
    except (Exception, *ENDINGS):
        raise
    except BaseException as panic:
        raise UserError(f"data.tokenizer: train: the library tokenizers fails with these texts: {panic}") from None
    return with_end_in_front(engine, specials)


def with_end_in_front(engine: Library, specials: Sequence[str]) -> str:
    """Return the ``tokenizer.json`` of a tokenizer that puts the end token, its first special one, before texts."""
    end = specials[0]
    engine.post_processor = tokenizers_library().processors.TemplateProcessing(
        single=f"{end} $A", pair=f"{end} $A $B", special_tokens=[(end, engine.token_to_id(end))]
    )
    return engine.to_str()


def byte_level(model: object) -> Library:
    """Return a tokenizer with the given model that splits text as GPT-2 does."""
    tokenizers = tokenizers_library()
    engine: Library = tokenizers.Tokenizer(model)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def byte_characters() -> list[str]:
    """Return, for every byte, its character in a byte-level vocabulary.

    It is the byte itself if visible, else one from U+0100 on (``bytes_to_unicode`` of GPT-2).
    """
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]
