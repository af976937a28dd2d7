"""Spelling of categories, decided by all present training values of a column and stored with its vocabulary.

The same categories are spelled differently by CSV, Parquet and JSON Lines: 1, 1.0 and 1.00, or true and True.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

#: Rules: integers without a fraction, booleans in lower case, and texts in Unicode's normal form C. Vocabularies of
#: earlier versions have the rule "", under which every text stands for itself.
WHOLE, BOOLEAN, AS_TEXT = "whole", "boolean", "text"
PATTERNS = {WHOLE: r"^[+-]?(0|[1-9]\d*)(\.0*)?$", BOOLEAN: r"(?i)^(true|false)$"}


def spelling_rules(texts: pa.Array) -> set[str]:
    """Return the rules that all of the texts, which are clean and not null, allow."""
    return {rule for rule, pattern in PATTERNS.items() if pc.all(pc.match_substring_regex(texts, pattern)).as_py()}


def narrowest_rule(rules: Iterable[str]) -> str:
    return next((rule for rule in PATTERNS if rule in rules), AS_TEXT)


def rule_of(spelled: Iterable[str]) -> str:
    """Return the rule by which all of the texts are spelled, or ""."""
    texts = pa.array(spelled, pa.string())
    rule = narrowest_rule(spelling_rules(texts))
    return rule if respell(texts, rule).equals(texts) else ""


def respell(texts: pa.Array, rule: str) -> pa.Array:
    """Return clean texts as ``rule`` spells them."""
    if rule == WHOLE:
        return pc.replace_substring_regex(texts, r"^([+-]?\d+)\.0*$", r"\1")
    if rule == BOOLEAN:
        return pc.if_else(pc.match_substring_regex(texts, PATTERNS[BOOLEAN]), pc.utf8_lower(texts), texts)
    if rule == AS_TEXT and pc.all(pc.string_is_ascii(texts)).as_py() is False:
        return pc.utf8_normalize(texts, form="NFC")
    return texts


def respell_counts(counts: Mapping[str, int], rule: str) -> dict[str, int]:
    """Return the counts of texts as ``rule`` spells them; those of equal texts are added."""
    spelled: dict[str, int] = {}
    for text, count in zip(respell(pa.array(counts, pa.string()), rule).to_pylist(), counts.values(), strict=True):
        spelled[text] = spelled.get(text, 0) + count
    return spelled
