"""What the sections of the page are put together from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tasks.report.markup import Markup, element, join


def card(title: str | None, *children: object, wide: bool = False) -> Markup:
    heading = element("h3", title) if title else None
    return element("section", heading, *children, class_="card wide" if wide else "card")


def section(title: str, lead: object, *cards: Markup) -> Markup:
    return join(element("h2", title), element("p", lead, class_="lead"), element("div", *cards, class_="grid"))


def cells(*values: object, labels: Sequence[str]) -> Markup:
    """A row of a table whose first column is its name and the others are figures."""
    first, *rest = (
        element("td", value, data_label=label, class_="name" if index == 0 else "number")
        for index, (value, label) in enumerate(zip(values, labels, strict=True))
    )
    return join(first, *rest)


def heads(labels: Sequence[str]) -> Markup:
    drawn = (element("th", label, class_="number" if index else None) for index, label in enumerate(labels))
    return element("thead", element("tr", *drawn))


def first_capital(sentence: str) -> str:
    """Names of variants keep their spelling."""
    word = sentence.split(" ", 1)[0]
    return sentence if "-" in word else sentence[:1].upper() + sentence[1:]


def bars(lines: Iterable[tuple[str, float, object]]) -> Markup:
    """Lines of a name, a bar whose length is a share of one, and what stands behind it."""
    parts: list[Markup] = []
    for name, share, value in lines:
        fill = element("i", class_="fill", style=f"width: {100 * share:.1f}%") if share else None
        track = element("span", fill, class_="track")
        parts += [element("span", name, class_="label"), track, element("span", value, class_="value")]
    return element("div", *parts, class_="bars")
