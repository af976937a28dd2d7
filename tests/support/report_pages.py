"""Tests of pages: markup as a browser reads it, and the page's width on a screen."""

import html
import re
import shutil
import subprocess
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
HOSTILE = "<script>alert(1)</script><img src=x onerror='alert(2)'>\"&amp;{{ 7 * 7 }}$\\frac{$\x01"
TAGS = {
    *("html", "head", "meta", "style", "title", "body", "div", "main", "section", "footer", "h1", "h2", "h3", "p", "a"),
    *("small", "b", "span", "i", "code", "dl", "dt", "dd", "ul", "li", "details", "summary", "figure"),
    *("table", "thead", "tbody", "tr", "th", "td", "pre", "svg", "g", "defs", "path", "use", "text"),
}
#: Files of a run to which its page links.
LINKS = {
    *("card.html", "MODEL_CARD.md", "prepared", "trained", "model/model.onnx", "model/model.raw.onnx"),
    *("model/hugging-face", "model/adapter"),
}


class Parsed(HTMLParser):
    """Every tag, every attribute with its values, and all the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: dict[str, set[str]] = {}
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, set()).add(value or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def assert_is_inert(page: str) -> None:
    """No tag beyond those of the templates and the charts, no script, and nothing that a browser would fetch."""
    parsed = Parsed(page)
    assert parsed.tags <= TAGS
    assert not [name for name in parsed.attributes if name.startswith("on")]
    assert not parsed.attributes.keys() & {"src", "srcset", "data", "xlink:href", "action", "poster"}
    links = {link for link in parsed.attributes.get("href", set()) if not link.startswith("#")}
    # A link loads nothing until it is followed, and these lead to files in the page's directory.
    assert links <= LINKS
    assert not re.search(r"url\(|@import|https?:|//[a-z]", page)


def too_wide(pages: Mapping[str, str], widths: tuple[int, ...], directory: Path) -> list[str]:
    """The pages that a browser would have to scroll sideways at one of the ``widths`` (CSS pixels)."""
    frames = "".join(
        f'<iframe title="{name} at {width}" srcdoc="{html.escape(page)}" width="{width}" height="800"></iframe>'
        for name, page in pages.items()
        for width in widths
    )
    # A card cuts nothing off either: no element may end beyond the page.
    script = """<script>onload = () => { document.body.textContent = [...document.querySelectorAll("iframe")].map(f => {
        const page = f.contentDocument, ends = [...page.querySelectorAll("main *")].filter(e => !e.closest("svg"))
            .map(e => e.getBoundingClientRect().right);
        return `${f.title}: ${Math.ceil(Math.max(page.documentElement.scrollWidth, ...ends))} of ${f.width}`;
    }).join("\\n"); }</script>"""
    wrapper = directory / "wrapper.html"
    wrapper.write_text(f"<!doctype html><meta charset=utf-8><body>{frames}{script}", encoding="utf-8")
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", wrapper.as_uri()]
    dumped = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    found = re.findall(r"(.+) at (\d+): (\d+) of \d+", dumped)
    assert len(found) == len(pages) * len(widths)
    return [" ".join(line) for line in found if int(line[2]) > int(line[1])]
