"""Texts to numbers that a model can embed: words and pairs of words, each hashed to one of ``BUCKETS`` ids.

There is no vocabulary to fit or to carry along, so a text has the same ids whatever else is in the data (Weinberger et
al. 2009, Feature Hashing; the pairs as in Joulin et al. 2016, Bag of Tricks for Efficient Text Classification).
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from slipstream.prepare.columns.hashing import splitmix64

BUCKETS = 1 << 16
PADDING = 0
BETWEEN_WORDS = r"[\s\p{P}\p{S}\p{C}]+"
#: Of a long text as many characters per token are looked at; what is beyond would hardly be used.
CHARACTERS_PER_TOKEN = 64


def tokenise(texts: pa.Array, length: int) -> np.ndarray:
    """int32 ``[rows, length]`` of texts: the ids of the first words, each followed by that of its pair with the next
    word; then ``PADDING``. Upper and lower case and the forms of Unicode (NFKC) are the same; a missing text is empty.
    """
    cut = pc.utf8_slice_codeunits(pc.fill_null(texts.cast(pa.string()), ""), 0, CHARACTERS_PER_TOKEN * length)
    plain = pc.utf8_lower(pc.utf8_normalize(cut, form="NFKC"))
    words = pc.split_pattern_regex(plain, BETWEEN_WORDS)
    flat = pc.list_flatten(words)
    rows = pc.list_parent_indices(words).to_numpy().astype(np.int64)
    there = pc.not_equal(pc.binary_length(flat), 0)
    hashes = hash_words(flat.filter(there))
    rows = rows[there.to_numpy(zero_copy_only=False)]
    begins = np.searchsorted(rows, np.arange(len(texts)))
    places = 2 * (np.arange(len(rows)) - begins[rows])
    out = np.full((len(texts), length), PADDING, np.int32)
    put(out, rows, places, hashes)
    # A pair is told from its reverse by the rotation of its first word.
    pairs = splitmix64(np.bitwise_or(hashes[:-1] << np.uint64(1), hashes[:-1] >> np.uint64(63)) ^ hashes[1:])
    together = rows[1:] == rows[:-1]
    put(out, rows[:-1][together], places[:-1][together] + 1, pairs[together])
    return out


def hash_words(words: pa.Array) -> np.ndarray:
    """uint64 of each word."""
    encoded = words.dictionary_encode()
    distinct = [xxhash.xxh3_64_intdigest(word.encode()) for word in encoded.dictionary.to_pylist()]
    return np.array(distinct, np.uint64)[encoded.indices.to_numpy()] if distinct else np.empty(0, np.uint64)


def put(out: np.ndarray, rows: np.ndarray, places: np.ndarray, hashes: np.ndarray) -> None:
    fits = places < out.shape[1]
    ids = 1 + (splitmix64(hashes[fits]) % np.uint64(BUCKETS - 1)).astype(np.int32)
    out[rows[fits], places[fits]] = ids
