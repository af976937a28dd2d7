"""Evaluation of a language model on held-out documents: bits per byte, perplexity and three continuations.

The baseline is the base before fine-tuning, or a count-based model; a compressor is a further reference.
"""

from __future__ import annotations

import lzma
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.prepared.documents import Document, read_documents
from slipstream.shared.artifacts.prepared.token_rows import FILES, TOKENIZER, not_learned, read_tokens
from slipstream.shared.artifacts.results.evaluation import (
    BaselineScores,
    Continuation,
    Gain,
    LanguageFigures,
    Reference,
    Scores,
)
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import NO_LIMIT
from slipstream.shared.language.tokenizer import Tokenizer
from slipstream.shared.models.predict import ModelFunction, predict_records

#: Bytes of context of the count-based baseline.
CONTEXT = 5
NAME, BASE = f"Kneser-Ney, {CONTEXT} bytes of context", "the base"
LZMA = "lzma after the training text"
#: Training text in bytes, the last of it, that primes lzma: about 1 MB is compressed per second.
PRIMED_BYTES = 8 << 20
#: Smallest window of lzma in bytes.
LEAST_WINDOW = 4096
CONTINUATIONS, PROMPT_TOKENS, MOST_TOKENS = 3, 32, 96
#: Largest exponent of e that fits a float.
LARGEST_EXPONENT = 700.0


@dataclass(frozen=True)
class LanguageScores:
    model: Scores
    baseline: BaselineScores
    gain: Gain
    figures: LanguageFigures


@dataclass(frozen=True)
class DocumentGrades:
    """Grades of a model by document, both float64 ``[documents]``.

    ``right`` counts the target tokens that the model ranks first, ``bits`` is the negative log2 likelihood of all of
    them.
    """

    right: np.ndarray
    bits: np.ndarray


def held_out_documents(data: PreparedData) -> list[Document]:
    """Return the test split's documents; raise ``UserError`` if the prepared data have none."""
    if documents := read_documents(data.artifact, "test"):
        return documents
    raise UserError("data.split.test: the test split has no documents for the evaluation; raise it, or add data")


def evaluate_language(run: ModelFunction, data: PreparedData, base: DocumentGrades | None = None) -> LanguageScores:
    """Score the model against ``base`` (the grades before fine-tuning) or, if None, a count-based model.

    Raise ``UserError`` if no held-out document was kept or the outputs are not finite.
    """
    signature, documents = data.signature, held_out_documents(data)
    sizes = np.array([document.bytes for document in documents], np.float64)
    learned = sum(int((document.tokens[1:] >= 0).sum()) for document in documents)
    graded = graded_documents(run, signature, documents)
    trained = read_documents(data.artifact, "train")
    train = [text.encode() for each in trained for text in each.texts]
    test = [text.encode() for document in documents for text in document.texts]
    counted = beside_bits(KneserNey(train, CONTEXT), documents)
    references = [Reference(LZMA, lzma_bits_per_byte(b"".join(train), b"".join(test)))]
    if base:
        theirs = base.bits
        beside = BaselineScores(name=BASE, rows_trained=0, **vars(scores_of(base, sizes, learned)))
        references.insert(0, Reference(NAME, bits_per_byte(counted, sizes)))
    else:
        theirs = counted
        beside = BaselineScores(name=NAME, rows_trained=len(trained), bits_per_byte=bits_per_byte(theirs, sizes))
    return LanguageScores(
        model=scores_of(graded, sizes, learned),
        baseline=beside,
        gain=bits_per_byte_gain(theirs, graded.bits, sizes),
        figures=LanguageFigures(
            documents=len(documents),
            bytes=int(sizes.sum()),
            tokens=learned,
            continuations=document_continuations(run, signature, documents, tokenizer_of(data)),
            references=references,
        ),
    )


def scores_of(graded: DocumentGrades, sizes: np.ndarray, learned: int) -> Scores:
    log_loss = float(graded.bits.sum()) * math.log(2) / learned
    return Scores(
        accuracy=float(graded.right.sum()) / learned,
        log_loss=log_loss,
        bits_per_byte=bits_per_byte(graded.bits, sizes),
        perplexity=math.exp(min(log_loss, LARGEST_EXPONENT)),
    )


def graded_documents(run: ModelFunction, signature: Signature, documents: list[Document]) -> DocumentGrades:
    """Grade documents, cutting those longer than a row into several rows.

    Every further row sees only the last token of the previous row. Raise ``UserError`` if the outputs are not finite.
    """
    (length,), end = signature.inputs[0].shape, max(signature.document_end, 0)
    rows, counts = [], list[int]()
    for document in documents:
        count = -(-(len(document.tokens) - 1) // length)
        filled = np.full(count * length + 1, not_learned(end), signature.inputs[0].dtype)
        filled[: len(document.tokens)] = document.tokens
        rows.append(np.lib.stride_tricks.sliding_window_view(filled, length + 1)[::length])
        counts.append(count)
    records = np.ascontiguousarray(np.concatenate(rows)).view(signature.record).reshape(-1)
    of_rows = predict_records(run, signature, records).sum(axis=1, dtype=np.float64)
    right, likelihood = np.add.reduceat(of_rows, starts_of(counts), axis=0).T
    return DocumentGrades(right, -likelihood / math.log(2))


def beside_bits(model: KneserNey, documents: list[Document]) -> np.ndarray:
    """Return each document's bits under the count-based model, to which every answer is a document."""
    bits = model.bits([text.encode() for document in documents for text in document.texts])
    return np.add.reduceat(bits, starts_of([len(document.texts) for document in documents]))


def lzma_bits_per_byte(train: bytes, test: bytes) -> float:
    """Return lzma's bits per byte of ``test`` after the last ``PRIMED_BYTES`` of ``train``: both, less the latter."""
    primed = train[-PRIMED_BYTES:]
    window = {"id": lzma.FILTER_LZMA2, "dict_size": max(LEAST_WINDOW, len(primed) + len(test))}
    before, both = (len(lzma.compress(text, lzma.FORMAT_RAW, filters=[window])) for text in (primed, primed + test))
    return 8 * (both - before) / len(test)


def starts_of(counts: list[int]) -> np.ndarray:
    """Return the first indices (int64) of consecutive groups with these ``counts``."""
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)


def tokenizer_of(data: PreparedData) -> Tokenizer:
    stored = [name for name in FILES if f"{TOKENIZER}/{name}" in data.artifact.files]
    return Tokenizer({name: data.artifact.read_bytes(f"{TOKENIZER}/{name}").decode() for name in stored})


def document_continuations(
    run: ModelFunction, signature: Signature, documents: list[Document], tokenizer: Tokenizer
) -> list[Continuation]:
    """Return the starts (or questions) of some evenly spaced documents, with the model's continuations."""
    chosen = [documents[place] for place in np.unique(np.linspace(0, len(documents) - 1, CONTINUATIONS).astype(int))]
    prompts = [prompt_of(document, signature.inputs[0].shape[0]) for document in chosen]
    drawn = sample_continuations(run, signature, prompts, MOST_TOKENS, tokenizer.special_ids)
    return [
        Continuation(document.name, tokenizer.decode(prompt), tokenizer.decode(ids))
        for document, prompt, ids in zip(chosen, prompts, drawn, strict=True)
    ]


def prompt_of(document: Document, length: int) -> list[int]:
    """Return the ids before a chat's first answer, or a document's first ids, at most half of a row."""
    tokens = document.tokens
    ids, _ = read_tokens(tokens)
    if tokens[0] < 0:
        return ids[: int(np.argmax(tokens >= 0))].tolist()
    return ids[: min(PROMPT_TOKENS, length // 2, len(ids) - 1)].tolist()


def sample_continuations(
    run: ModelFunction,
    signature: Signature,
    prompts: Sequence[Sequence[int]],
    most: int,
    stops: Collection[int],
    seed: int = 0,
) -> list[list[int]]:
    """Return at most ``most`` ids sampled after each prompt, up to and excluding the first of ``stops``.

    Ids are drawn with the model's probabilities; equal seeds give equal results. The model sees the last ids that fit
    in a row.
    """
    (length,), draw = signature.inputs[0].shape, np.random.default_rng(seed)
    drawn: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    for _ in range(most):
        if not going:
            break
        rows = np.zeros((len(going), length), signature.inputs[0].dtype)
        ends = []
        # Later positions are padding, which causal attention ignores.
        for row, number in zip(rows, going, strict=True):
            ids = [*prompts[number], *drawn[number]][-length:]
            row[: len(ids)] = ids
            ends.append(len(ids) - 1)
        logits = run([rows])[np.arange(len(going)), ends].astype(np.float64)
        shares = np.cumsum(np.exp(logits - logits.max(axis=1, keepdims=True)), axis=1)
        for number, share, place in zip(list(going), shares, draw.random(len(going)), strict=True):
            token = min(int(np.searchsorted(share, place * share[-1], side="right")), len(share) - 1)
            if token in stops:
                going.remove(number)
            else:
                drawn[number].append(token)
    return drawn


# Documents are independent, the bytes within a document are not. The gain is a ratio of two sums over documents, so its
# interval is the ratio estimator's (Cochran, "Sampling Techniques", 3rd edition, section 2.11): Student's interval of
# the mean residual, a document's saved bits less the gain times its bytes.
LEVEL = 0.95


def bits_per_byte(bits: np.ndarray, sizes: np.ndarray) -> float:
    """Return the bits per byte of all documents; ``bits`` and ``sizes`` (bytes) are ``[documents]``."""
    return float(bits.sum() / sizes.sum())


def bits_per_byte_gain(before: np.ndarray, after: np.ndarray, sizes: np.ndarray) -> Gain:
    """Return the bits per byte that ``after`` saves over ``before``, with a 95 % interval.

    Both are bits ``[documents]``. A single document's interval is unbounded.
    """
    from scipy.stats import t

    less, documents = before - after, len(sizes)
    value = bits_per_byte(less, sizes)
    if documents < 2:
        return Gain(value, -NO_LIMIT, NO_LIMIT)
    beyond = less - value * sizes
    deviation = math.sqrt(documents * float((beyond**2).sum()) / (documents - 1)) / float(sizes.sum())
    half = float(t.ppf((1 + LEVEL) / 2, documents - 1)) * deviation
    return Gain(value, value - half, value + half)


# Method: Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling", 1998, section 3. The
# probability of a byte after k bytes is its discounted share of the counts in that context. The discounted mass is
# distributed by the model of k - 1 bytes, in which a byte counts once per distinct byte before it. Below the model of 0
# bytes is the uniform distribution. A document is preceded by edge symbols and ends with an edge symbol.
#: Edge symbol, which stands before and after documents, and number of symbols.
EDGE, SYMBOLS = 256, 257
#: Bits per symbol in a gram: a number that holds a context and the next symbol.
BITS = 9
#: Longest context in bytes that fits uint64.
MOST_CONTEXT = 6
#: Count from which discounts are equal; and discounts by count if they cannot be estimated (as in KenLM, Heafield
#: 2011).
DISCOUNTED, FALLBACK = 3, np.array([0.0, 0.5, 1.0, 1.5])


@dataclass(frozen=True)
class ContextModel:
    """Model of one context length.

    ``grams`` (uint64, ascending) are contexts with the next byte, ``discounted`` their discounted counts. ``contexts``
    (ascending) have ``totals`` (all counts) and ``left``, the sum of the discounts.
    """

    grams: np.ndarray
    discounted: np.ndarray
    contexts: np.ndarray
    totals: np.ndarray
    left: np.ndarray


class KneserNey:
    """Model with at most ``context`` bytes of context; raises ``ValueError`` beyond ``MOST_CONTEXT``."""

    def __init__(self, documents: Sequence[bytes], context: int) -> None:
        if not 0 <= context <= MOST_CONTEXT:
            raise ValueError(f"a context of {context} bytes; expected 0 to {MOST_CONTEXT}")
        grams, counts = np.unique(all_grams(documents, context), return_counts=True)
        orders = [order_of(grams, counts)]
        for length in range(context - 1, -1, -1):
            # A shorter one counts once per distinct symbol before it.
            grams, counts = np.unique(grams & symbols_mask(length + 1), return_counts=True)
            orders.append(order_of(grams, counts))
        #: Models by context length, from 0 bytes on.
        self.orders = orders[::-1]

    def bits(self, documents: Sequence[bytes]) -> np.ndarray:
        """Return the bits that each document with its end has under the model, float64 ``[documents]``."""
        grams = all_grams(documents, len(self.orders) - 1)
        probabilities = np.full(len(grams), 1 / SYMBOLS)
        for length, order in enumerate(self.orders):
            probabilities = interpolated_probabilities(order, grams & symbols_mask(length + 1), probabilities)
        ends = np.cumsum([len(document) + 1 for document in documents])
        return np.add.reduceat(-np.log2(probabilities), np.concatenate([[0], ends[:-1]]))


def symbols_mask(symbols: int) -> np.uint64:
    return np.uint64((1 << BITS * symbols) - 1)


def all_grams(documents: Iterable[bytes], context: int) -> np.ndarray:
    """Return every byte and end of all documents with its context: uint64, the symbol in the lowest bits."""
    edges = np.full(context, EDGE, np.uint64)
    parts = []
    for document in documents:
        symbols = np.concatenate([edges, np.frombuffer(document, np.uint8).astype(np.uint64), [np.uint64(EDGE)]])
        grams = np.zeros(len(document) + 1, np.uint64)
        for place in range(context + 1):
            grams = (grams << np.uint64(BITS)) | symbols[place : place + len(grams)]
        parts.append(grams)
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def order_of(grams: np.ndarray, counts: np.ndarray) -> ContextModel:
    """Build the model of one context length from distinct ``grams``, ascending, and their counts."""
    discounts = discounts_of(counts)[np.minimum(counts, DISCOUNTED)]
    contexts, first = np.unique(grams >> np.uint64(BITS), return_index=True)
    return ContextModel(
        grams=grams,
        discounted=counts - discounts,
        contexts=contexts,
        totals=np.add.reduceat(counts, first).astype(np.float64),
        left=np.add.reduceat(discounts, first),
    )


def discounts_of(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2, and 3 or more (float64 ``[4]``), or ``FALLBACK``.

    They are estimated from the numbers of counts 1 to 4 (Chen and Goodman, equation 26).
    """
    of = [int(np.count_nonzero(counts == count)) for count in range(1, DISCOUNTED + 2)]
    if not all(of):
        return FALLBACK
    share = of[0] / (of[0] + 2 * of[1])
    found = [count - (count + 1) * share * of[count] / of[count - 1] for count in range(1, DISCOUNTED + 1)]
    # A discount of 0 would leave unseen bytes no probability.
    good = all(0 < discount <= count for count, discount in enumerate(found, 1))
    return np.array([0.0, *found]) if good else FALLBACK


def interpolated_probabilities(order: ContextModel, grams: np.ndarray, shorter: np.ndarray) -> np.ndarray:
    """Return the probabilities of ``grams``, interpolated with ``shorter``, those for a shorter context.

    For an unseen context they are ``shorter``.
    """
    place, seen = found_in(order.contexts, grams >> np.uint64(BITS))
    which, known = found_in(order.grams, grams)
    counted = np.where(known, order.discounted[which], 0.0)
    mixed = (counted + order.left[place] * shorter) / order.totals[place]
    return np.where(seen, mixed, shorter)


def found_in(ascending: np.ndarray, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index in ``ascending`` of each number ``wanted``, and True where it is present."""
    # Sorted queries look up neighbouring positions: three times as fast.
    order = np.argsort(wanted)
    place = np.empty(len(wanted), np.int64)
    place[order] = np.searchsorted(ascending, wanted[order])
    place = np.minimum(place, len(ascending) - 1)
    return place, ascending[place] == wanted
