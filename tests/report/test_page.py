"""The page: nothing of the data can become markup, nothing is loaded, and it fits on a phone."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tasks.config import RunConfig
from tasks.preprocess.quarantine import BadRow
from tasks.report.engine import build
from tasks.settings import to_dict
from tests.support.report_runs import STAGES, results

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;"
KINDS = {
    "two classes": ["<=50K", ">50K"],
    "ten classes": list("0123456789"),
    "long names": [f"a-rather-long-name-without-any-space-{n}" for n in range(20)],
    "many classes": [f"species-{n:03d}" for n in range(150)],
    "regression": [],
}
TAGS = {
    *("html", "head", "meta", "style", "title", "body", "div", "main", "section", "footer", "h1", "h2", "h3", "p"),
    *(
        "a",
        "small",
        "b",
        "span",
        "i",
        "code",
        "dl",
        "dt",
        "dd",
        "ul",
        "li",
        "table",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
    ),
    *(
        "details",
        "summary",
        "figure",
        "figcaption",
        "svg",
        "g",
        "line",
        "text",
        "polyline",
        "polygon",
        "circle",
        "rect",
    ),
}


class Parsed(HTMLParser):
    """Every tag, every attribute and all the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


def page_of(directory: Path, classes: list[str], hostile: str = "", world: int = 2) -> str:
    bad = [BadRow(f"{hostile}file.csv", 3, f"{hostile}column", f"{hostile}reason", "raw")]
    found = results(
        directory / "in", classes, target=f"{hostile}target", bad=bad, warnings=[f"{hostile}warning"], world=world
    )
    found.card["source"] = f"{hostile}source"
    for column in found.card["columns"]:
        column["name"] = f"{hostile}{column['name']}"
    config = {
        "inputs": {"data": hostile},
        **to_dict(RunConfig()),
        "model": {"name": hostile, "arguments": {hostile: hostile}},
    }
    summary = build(directory / "runs", found, STAGES, config)
    return Path(summary.directory, summary.report).read_text(encoding="utf-8")


@pytest.mark.parametrize("classes", [2, 3, 30])
def test_names_and_labels_from_the_data_stay_text(tmp_path: Path, classes: int) -> None:
    page = page_of(tmp_path, [f"{HOSTILE}{n}" for n in range(classes)], HOSTILE)
    parsed = Parsed(page)
    assert parsed.tags <= TAGS
    assert not [name for name in parsed.attributes if name.startswith("on")]
    for named in ("source", "target", "warning", "reason", "column", "file.csv", "age"):
        assert f"{HOSTILE}{named}" in parsed.text
    assert "<script" not in page


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_loaded(tmp_path: Path, kind: str) -> None:
    page = page_of(tmp_path, KINDS[kind])
    assert not Parsed(page).attributes & {"src", "srcset", "data", "xlink:href", "action", "poster"}
    # A link loads nothing until it is followed, and this one leads to the file beside the page.
    assert set(re.findall(r"<(\w+) [^>]*href=\"([^\"]*)\"", page)) == {("a", "card.html")}
    assert not re.search(r"url\(|@import|https?:|//[a-z]", page)
    assert len(page) < 300_000


def test_what_was_lost_to_interruptions_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, next(iter(KINDS.values())))
    assert "2 attempts; 10 of 130 steps executed were lost; steps that were kept took 76% of 12.6 s" in page


@pytest.mark.parametrize("kind", KINDS)
def test_every_count_of_a_small_confusion_matrix_is_on_the_page(tmp_path: Path, kind: str) -> None:
    found = results(tmp_path / "in", KINDS[kind])
    summary = build(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    drawn = re.findall(r'class="(?:cell|over) middle">([\d,]+)<', page)
    counts = [n for line in found.evaluation.get("confusion", []) for n in line if n]
    assert sorted(map(int, drawn)) == (sorted(counts) if 2 <= len(KINDS[kind]) <= 20 else [])


def test_a_perfect_model_of_many_classes_has_no_mistakes(tmp_path: Path) -> None:
    found = results(tmp_path / "in", KINDS["many classes"])
    found.evaluation["confusion"] = [[4 * (r == c) for c in range(150)] for r in range(150)]
    summary = build(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert "No row was taken for another class." in page


def test_a_variant_that_could_not_be_made_says_why(tmp_path: Path) -> None:
    found = results(tmp_path / "in", KINDS["two classes"])
    first, second, third = found.export["variants"]
    failed = {
        "name": third["name"],
        "file": None,
        "bytes": None,
        "verdict": "could not be made: <odd>",
        "chosen": False,
    }
    found.export["variants"] = [first, second | {"chosen": True}, failed]
    found.export["chosen"] = second["name"]
    summary = build(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert "Could not be made: &lt;odd&gt;" in page
    assert Path(summary.directory, summary.model_file).read_bytes() == b"fp32 weights"


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the width of a page is what a browser makes of it")
def test_no_page_is_wider_than_the_screen(tmp_path: Path) -> None:
    widths = (320, 390, 768, 940, 1280)
    pages = {kind: page_of(tmp_path / kind.replace(" ", "-"), classes) for kind, classes in KINDS.items()}
    pages["hostile"] = page_of(tmp_path / "hostile", [f"{HOSTILE}{n}" for n in range(3)], HOSTILE.replace(" ", ""))
    frames = "".join(
        f'<iframe title="{kind} at {width}" srcdoc="{html.escape(page)}" width="{width}" height="800"></iframe>'
        for kind, page in pages.items()
        for width in widths
    )
    script = """<script>onload = () => { document.body.textContent = [...document.querySelectorAll("iframe")].map(
        f => `${f.title}: ${f.contentDocument.documentElement.scrollWidth} of ${f.width}`).join("\\n"); }</script>"""
    wrapper = tmp_path / "wrapper.html"
    wrapper.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{script}", encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", wrapper.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    found = re.findall(r"(.+) at (\d+): (\d+) of \d+", dumped)
    assert len(found) == len(pages) * len(widths)
    assert [line for line in found if int(line[2]) > int(line[1])] == []
