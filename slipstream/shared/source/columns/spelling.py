"""Spelling of categories, decided by all present training values of a column and stored with its vocabulary.

Formats spell the same categories differently: 1, 1.0 and 1e+0, or true and True.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from decimal import Decimal

import pyarrow as pa
import pyarrow.compute as pc

#: Rules: integers without a fraction, shortest decimals, booleans in lower case, and texts in Unicode's normal form C,
#: where only Arrow's large floats lose their exponents. Vocabularies of earlier versions have the rule "", under which
#: every text stands for itself.
WHOLE, DECIMAL, BOOLEAN, AS_TEXT = "whole", "decimal", "boolean", "text"
#: Rule of a vocabulary of an earlier version under ``AS_TEXT`` that knows texts with Arrow's exponents.
COMPOSED = "composed"
DIGITS = r"((0|[1-9]\d*)(\.\d*)?|\.\d+)"
PATTERNS = {WHOLE: r"^[+-]?(0|[1-9]\d*)(\.0*)?$", DECIMAL: f"^[+-]?{DIGITS}$", BOOLEAN: r"(?i)^(true|false)$"}
#: Numbers with exponents that are written without by a rule; under ``AS_TEXT`` only floats from 1e10 as Arrow writes.
AS_ARROW = r"^-?[1-9](\.\d*[1-9])?e\+\d{2,3}$"
NUMERIC = rf"^[+-]?{DIGITS}[eE][+-]?\d{{1,3}}$"
EXPONENTS = {WHOLE: NUMERIC, DECIMAL: NUMERIC, AS_TEXT: AS_ARROW}
WITHOUT_FRACTION = (r"^([+-]?\d+)\.0*$", r"\1")
REPLACED = {
    WHOLE: [WITHOUT_FRACTION],
    DECIMAL: [
        (r"^([+-]?)\.", r"\10."),
        WITHOUT_FRACTION,
        (r"^([+-]?\d+\.\d*[1-9])0+$", r"\1"),
        (r"^(\+|-(0)$)", r"\2"),
    ],
}


def spelling_rules(texts: pa.Array) -> set[str]:
    """Return the rules that all of the texts, which are clean and not null, allow."""
    plain = without_exponents(texts, NUMERIC)
    return {rule for rule, pattern in PATTERNS.items() if pc.all(pc.match_substring_regex(plain, pattern)).as_py()}


def narrowest_rule(rules: Iterable[str]) -> str:
    return next((rule for rule in PATTERNS if rule in rules), AS_TEXT)


def rule_of(spelled: Iterable[str]) -> str:
    """Return the narrowest rule by which all of the texts are spelled, or ""."""
    texts = pa.array(spelled, pa.string())
    rules = (narrowest_rule(spelling_rules(texts)), AS_TEXT, COMPOSED)
    return next((rule for rule in rules if respell(texts, rule).equals(texts)), "")


def rule_in_force(rule: str, vocabulary: Iterable[str]) -> str:
    """Return the rule that changes no text of a stored vocabulary."""
    known = pc.match_substring_regex(pa.array(vocabulary, pa.string()), AS_ARROW)
    return COMPOSED if rule == AS_TEXT and pc.any(known).as_py() else rule


def respell(texts: pa.Array, rule: str) -> pa.Array:
    """Return clean texts as ``rule`` spells them."""
    if rule in EXPONENTS:
        texts = without_exponents(texts, EXPONENTS[rule])
    for pattern, replacement in REPLACED.get(rule, ()):
        texts = pc.replace_substring_regex(texts, pattern, replacement)
    if rule == BOOLEAN:
        return pc.if_else(pc.match_substring_regex(texts, PATTERNS[BOOLEAN]), pc.utf8_lower(texts), texts)
    if rule in (AS_TEXT, COMPOSED) and pc.all(pc.string_is_ascii(texts)).as_py() is False:
        return pc.utf8_normalize(texts, form="NFC")
    return texts


def without_exponents(texts: pa.Array, pattern: str) -> pa.Array:
    found = texts.filter(pc.match_substring_regex(texts, pattern)).unique()
    if not len(found):
        return texts
    plain = pa.array([format(Decimal(text), "f") for text in found.to_pylist()], pa.string())
    return pc.coalesce(plain.take(pc.index_in(texts, value_set=found)), texts)


def other_spellings(vocabulary: Iterable[str], rule: str) -> dict[str, str]:
    """Return other texts for those of a vocabulary, as Arrow, pandas and Python write the values."""
    texts = pa.array(vocabulary, pa.string())
    if rule == BOOLEAN:
        return {other: text for text in texts.to_pylist() for other in (text.title(), text.upper())}
    numbers = texts.filter(pc.match_substring_regex(texts, PATTERNS[DECIMAL])).to_pylist()
    arrow = pa.array(map(float, numbers), pa.float64()).cast(pa.string()).to_pylist()
    pairs = [
        (other, number)
        for number, short in zip(numbers, arrow, strict=True)
        for other in (short, repr(float(number)), f"{Decimal(number):.1f}", f"{Decimal(number):.2f}")
    ]
    spelled = respell(pa.array([other for other, _ in pairs], pa.string()), rule).to_pylist()
    return {other: number for (other, number), text in zip(pairs, spelled, strict=True) if text == number != other}


def respell_counts(counts: Mapping[str, int], rule: str) -> dict[str, int]:
    """Return the counts of texts as ``rule`` spells them; those of equal texts are added."""
    spelled: dict[str, int] = {}
    for text, count in zip(respell(pa.array(counts, pa.string()), rule).to_pylist(), counts.values(), strict=True):
        spelled[text] = spelled.get(text, 0) + count
    return spelled
