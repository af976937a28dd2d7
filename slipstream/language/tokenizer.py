"""Tokenizers: trained on the data, the bytes themselves, or one that the user has, all as Hugging Face's files.

A tokenizer is held as the contents of its files, so that it is read once and travels with what is made by it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from slipstream.artifacts.hugging_face import CONFIG, LONGEST_JSON
from slipstream.artifacts.prepared.token_rows import FILES
from slipstream.errors import UserError
from slipstream.storage import STORES, MissingObject, list_names, open_reader, storage_for

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

#: The contents of a tokenizer's files by their names.
TokenizerFiles: TypeAlias = dict[str, str]
FAST, SETTINGS, SPECIAL, TEMPLATE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
#: Those of its files that are read here, all of them texts.
READ = (FAST, SETTINGS, SPECIAL, TEMPLATE)
#: The end token of tokenizers that are made here, and what begins and ends a turn of a conversation.
END, TURN, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"


def library() -> Any:
    """The library of tokenizers. Raises ``UserError`` where it is not installed."""
    try:
        import tokenizers
    except ImportError:
        raise UserError("data.task: language needs the library tokenizers; pip install 'slipstream[text]'") from None
    return tokenizers


class Tokenizer:
    """``end`` is the id that ends a document, ``vocabulary`` the number of ids; ``specials`` are the texts of the
    special tokens, ``special_ids`` their ids."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Raises ``UserError`` for files that are no tokenizer, or name no end token."""
        self.files = dict(files)
        try:
            self._engine: Engine = library().Tokenizer.from_str(files[FAST])
        except UserError:
            raise
        except Exception as error:  # the library raises no class of its own
            raise UserError(f"data.tokenizer: {FAST} is no tokenizer of Hugging Face's tokenizers: {error}") from None
        self.end = self.id_of(end_token(files))
        # Ids need not be without gaps.
        self.vocabulary = 1 + max(self._engine.get_vocab(with_added_tokens=True).values())
        special = {i: t.content for i, t in self._engine.get_added_tokens_decoder().items() if t.special}
        self.specials, self.special_ids = list(special.values()), frozenset({*special, self.end})

    def id_of(self, token: str) -> int:
        number = self._engine.token_to_id(token)
        if number is None:
            raise UserError(f"data.tokenizer: the token {token!r} of {SETTINGS} has no id in {FAST}")
        return int(number)

    def documents(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """The ids (int64) of each text, in which even the spelling of a special token is only text."""
        self._engine.encode_special_tokens = True
        for encoded in self._engine.encode_batch_fast(list(texts), add_special_tokens=False):
            yield np.array(encoded.ids, np.int64)

    def conversation(self, text: str, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """The tokens (int64) of a rendered conversation, -1 - id of those that are not learned: that do not begin in
        one of the ``spans`` (characters). A token that an answer shares with what goes before it is not its own."""
        self._engine.encode_special_tokens = False
        encoded = self._engine.encode(text, add_special_tokens=False)
        ids, begins = np.array(encoded.ids, np.int64), np.array([begin for begin, _ in encoded.offsets], np.int64)
        learned = np.zeros(len(ids), bool)
        for first, last in spans:
            learned |= (begins >= first) & (begins < last)
        return np.where(learned, ids, -1 - ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._engine.decode(list(ids), skip_special_tokens=True))


def read_tokenizer(address: str) -> TokenizerFiles:
    """The tokenizer in a directory, here or in a store. Raises ``UserError`` if there is none."""
    if address.startswith(STORES):
        with tempfile.TemporaryDirectory() as scratch:
            storage, there = storage_for(address), list_names(address)
            paths = [storage.get(name, Path(scratch)) for name in FILES if name in there]
            return texts_of(paths, address)
    if not Path(address).is_dir():
        raise UserError(
            f"data.tokenizer: {address!r} is no directory; expected train, bytes, or a directory with {FAST}"
        )
    return texts_of([path for name in FILES if (path := Path(address, name)).is_file()], address)


def vocabulary_beside(address: str) -> int:
    """The token ids of the model that lies beside the tokenizer in a directory, here or in a store, as its config.json
    states: they may be more than the tokenizer has. 0 if it states none. Raises ``UserError`` for one that is no
    JSON, or states no number."""
    where = f"{address.rstrip('/')}/{CONFIG}"
    try:
        with open_reader(where) as file:
            text = file.read(LONGEST_JSON + 1)
        if len(text) > LONGEST_JSON:
            raise ValueError(f"more than {LONGEST_JSON} bytes are too many")
        content = json.loads(text)
    except MissingObject:
        return 0
    except UserError:
        raise
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {where} cannot be read as JSON: {error}") from None
    stated = content.get("vocab_size") if isinstance(content, dict) else None
    if stated is not None and type(stated) is not int:
        raise UserError(f"data.tokenizer: {where}: vocab_size: {stated!r:.40} is not allowed; expected an integer")
    return stated or 0


def texts_of(paths: Iterable[Path], address: str) -> TokenizerFiles:
    files = {}
    for path in paths:
        try:
            files[path.name] = path.read_bytes().decode()
        except UnicodeDecodeError:
            continue  # tokenizer.model, which is not read here
    if FAST not in files:
        raise UserError(
            f"data.tokenizer: {address} holds no {FAST}; expected one, as Hugging Face's libraries write it"
        )
    return files


def end_token(files: Mapping[str, str]) -> str:
    """The text of the end token. Raises ``UserError`` if none is named."""
    for name in (SETTINGS, SPECIAL):
        token = entry(files, name, "eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str) and token:
            return token
    raise UserError(f"data.tokenizer: names no end token; expected eos_token in {SETTINGS}")


def entry(files: Mapping[str, str], name: str, key: str) -> object:
    """What a JSON file of the tokenizer says for a key. Raises ``UserError`` for a file that is no JSON object."""
    if name not in files:
        return None
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise UserError(f"data.tokenizer: {name} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"data.tokenizer: {name} is no JSON object")
    return content.get(key)


def bytes_tokenizer(*, turns: bool) -> TokenizerFiles:
    """One id for each byte, in their order, then the special tokens; those of ``turns``, too, if there are any."""
    tokenizers = library()
    alphabet = byte_characters()
    engine = byte_level(tokenizers.models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[]))
    engine.add_special_tokens(specials(turns=turns))
    return made(engine)


def train_tokenizer(texts: Iterable[str], vocabulary: int, *, turns: bool) -> TokenizerFiles:
    """Byte-level BPE (Sennrich, Haddow and Birch 2016; Radford et al. 2019, "GPT-2") of at most ``vocabulary`` ids: of
    little text there are fewer. The same texts give the same files, on any number of threads."""
    tokenizers = library()
    engine = byte_level(tokenizers.models.BPE())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=specials(turns=turns),
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    engine.train_from_iterator(texts, trainer)
    return made(engine)


def specials(*, turns: bool) -> list[str]:
    return [END, TURN, TURN_ENDS] if turns else [END]


def byte_level(model: object) -> Engine:
    tokenizers = library()
    engine: Engine = tokenizers.Tokenizer(model)
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    return engine


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if it can be seen, else one from
    U+0100 on (``bytes_to_unicode`` of GPT-2)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in seen else chr(next(others)) for byte in range(256)]


def made(engine: Engine) -> TokenizerFiles:
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "bos_token": END,
        "clean_up_tokenization_spaces": False,
    }
    return {FAST: engine.to_str(), SETTINGS: json.dumps(settings, indent=2)}
