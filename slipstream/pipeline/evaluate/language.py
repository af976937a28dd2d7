"""Evaluation of a language model on held-out documents: bits per byte, perplexity and three continuations.

The baseline is the base before fine-tuning; without a base, it is a count-based model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from slipstream.pipeline.evaluate.kneser_ney import KneserNey
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.prepared.documents import Document, read_documents
from slipstream.shared.artifacts.prepared.token_rows import FILES, TOKENIZER, not_learned, read_tokens
from slipstream.shared.artifacts.results.evaluation import BaselineScores, Continuation, Gain, LanguageFigures, Scores
from slipstream.shared.errors import UserError
from slipstream.shared.formatting import NO_LIMIT
from slipstream.shared.language.tokenizer import Tokenizer
from slipstream.shared.models.predict import ModelFunction, predict_records

#: Bytes of context of the count-based baseline.
CONTEXT = 5
NAME, BASE = f"Kneser-Ney, {CONTEXT} bytes of context", "the base"
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
    if base:
        theirs = base.bits
        beside = BaselineScores(name=BASE, rows_trained=0, **vars(scores_of(base, sizes, learned)))
    else:
        train = read_documents(data.artifact, "train")
        theirs = beside_bits(KneserNey([text.encode() for each in train for text in each.texts], CONTEXT), documents)
        beside = BaselineScores(name=NAME, rows_trained=len(train), bits_per_byte=bits_per_byte(theirs, sizes))
    return LanguageScores(
        model=scores_of(graded, sizes, learned),
        baseline=beside,
        gain=bits_per_byte_gain(theirs, graded.bits, sizes),
        figures=LanguageFigures(
            documents=len(documents),
            bytes=int(sizes.sum()),
            tokens=learned,
            continuations=document_continuations(run, signature, documents, tokenizer_of(data)),
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
    """Return the bits of each document under the count-based model, which sees every answer as a document."""
    bits = model.bits([text.encode() for document in documents for text in document.texts])
    return np.add.reduceat(bits, starts_of([len(document.texts) for document in documents]))


def starts_of(counts: list[int]) -> np.ndarray:
    """Return the start index (int64) of each of several consecutive groups with these ``counts``."""
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
    in a row. Later positions are padding, which causal attention ignores.
    """
    (length,), draw = signature.inputs[0].shape, np.random.default_rng(seed)
    drawn: list[list[int]] = [[] for _ in prompts]
    going = list(range(len(prompts)))
    for _ in range(most):
        if not going:
            break
        rows = np.zeros((len(going), length), signature.inputs[0].dtype)
        ends = []
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

    Both are bits ``[documents]``. For a single document the interval is unbounded.
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
