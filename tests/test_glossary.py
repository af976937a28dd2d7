"""The glossary's words are used, and what it replaces is gone from names, messages and documents."""

import io
import re
import tokenize
from pathlib import Path

from slipstream.shared.artifacts.versions import ROOT

GLOSSARY = ROOT / "docs/glossary.md"
SUFFIXES = (".py", ".md", ".html", ".toml")


def rows() -> list[tuple[str, ...]]:
    table = re.findall(r"^\| (.*?) \| (.*?) \| ?(.*?) ?\|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
    return [row for row in table if row[0] not in ("term", "---")]


def texts() -> dict[Path, str]:
    """What is read of the project, in lower case and with single spaces."""
    folders = ("slipstream", "tasks", "workflows", "benchmarks", "tests", "docs")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    paths = [path for path in (*paths, ROOT / "README.md") if path not in (GLOSSARY, Path(__file__))]
    return {path: re.sub(r"\s+(?:#:? )?", " ", path.read_text(encoding="utf-8").lower()) for path in paths}


def test_terms_are_sorted_and_have_one_row() -> None:
    terms = [term for term, *_ in rows()]
    assert len(terms) > 20 and terms == sorted(set(terms))


def test_every_term_is_used() -> None:
    words = " ".join(texts().values()).replace("_", " ").replace("-", " ")
    assert not [term for term, *_ in rows() if term.replace("-", " ") not in words]


def test_what_was_replaced_is_gone() -> None:
    replaced = [word.lower() for _, _, words in rows() for word in words.split(", ") if word]
    assert len(replaced) >= 9
    found = [f"{path.relative_to(ROOT)}: {word}" for path, text in texts().items() for word in replaced if word in text]
    assert not found


#: Words and phrases that a reader stumbles over, in comments, docstrings, messages, templates and documents.
BANNED = (
    *("so many", "anew", "mend", "mends", "mended", "nobody", "is said", "is told", "beside", "of which", "as it is"),
    *("one that", "for ever", "begins with", "whoever", "sign of life", "signs of life", "takes leave"),
)
PHRASES = re.compile(rf"(?<![\w.`{{])({'|'.join(BANNED)})(?![\w(=])")
#: The same phrases over several lines of code, and such as are no prose.
WORDS = re.compile(rf"(?<!\w)({'|'.join(phrase.replace(' ', r'[^a-z0-9]+f?[^a-z0-9]*') for phrase in BANNED)})(?!\w)")


def prose(path: Path) -> str:
    """Return the comments and strings of a Python file, or all of another one, on one line in lower case.

    A Python file without the words of any phrase is not divided into tokens, which takes most of the time.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py" and WORDS.search(text.lower()):
        kinds = {"COMMENT", "STRING", "FSTRING_MIDDLE"}
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        text = " ".join(token.string for token in tokens if tokenize.tok_name[token.type] in kinds)
    return re.sub(r'\s+(?:#:? |f?")?', " ", text.lower())


def test_phrases_that_readers_stumble_over_are_absent() -> None:
    folders = ("slipstream", "tasks", "workflows", "benchmarks", "tests", "docs", "images", "monitoring", "examples")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    paths = [path for path in (*paths, ROOT / "README.md", ROOT / "SECURITY.md") if path != Path(__file__)]
    found = [f"{path.relative_to(ROOT)}: {each[0]}" for path in paths for each in PHRASES.finditer(prose(path))]
    assert not found
