"""Charts as inline SVG: axes, lines, bands and points. Colours and fonts come from the page's style sheet.

A chart is drawn for its width on a phone and grows with the page, so its text is readable everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tasks.report.markup import Markup, element, join

WIDTH, HEIGHT = 420, 250
LEFT, RIGHT, BOTTOM = 48, 12, 38
TOP, TOP_UNDER_LABEL = 10, 26
TICKS = 5
LARGEST_CELL = 84.0


@dataclass(frozen=True)
class Axis:
    """One axis: its name (empty if the chart's title says it), how it spells a value, its range (None: the data's)."""

    label: str
    spell: Callable[[float], str]
    low: float | None = None
    high: float | None = None
    #: 0 for a linear scale; otherwise a tick at every power of this (and the range as given, if it is).
    log: int = 0


@dataclass(frozen=True)
class Series:
    """Points to connect, or with ``dots`` to leave apart. ``colour`` is a number of the style sheet's palette."""

    label: str
    colour: int
    xs: Sequence[float]
    ys: Sequence[float]
    dots: bool = False
    dashed: bool = False
    #: The low and high end of a band around the line, if it has one.
    band: tuple[Sequence[float], Sequence[float]] | None = None
    #: Indices of points to mark, each with what its tooltip says, and how large the marks are.
    marks: dict[int, str] = field(default_factory=dict)
    radii: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Scale:
    """From values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    log: int
    ticks: tuple[float, ...]

    def __call__(self, value: float) -> float:
        low, high, value = (self.transform(v) for v in (self.low, self.high, value))
        return self.start + (self.end - self.start) * (value - low) / (high - low)

    def transform(self, value: float) -> float:
        return math.log(max(value, 1e-12)) if self.log else value


def chart(series: Sequence[Series], x: Axis, y: Axis, title: str, width: int = WIDTH, height: int = HEIGHT) -> Markup:
    """A figure with a legend, if there is more than one series, and ``title`` for those who cannot see it."""
    across = scale(x, [v for s in series for v in s.xs], LEFT, width - RIGHT)
    bands = [v for s in series if s.band for side in s.band for v in side]
    up = scale(y, [*(v for s in series for v in s.ys), *bands], height - BOTTOM, TOP_UNDER_LABEL if y.label else TOP)
    drawn = element(
        "svg",
        element("title", title),
        *axes(across, up, x, y, width, height),
        *(draw(one, across, up) for one in series),
        viewBox=f"0 0 {width} {height}",
        role="img",
    )
    return element("figure", legend(series) if len(series) > 1 else None, drawn, class_="chart")


def legend(series: Sequence[Series]) -> Markup:
    entries = [
        element("span", element("i", class_=f"key c{s.colour}{' dashed' if s.dashed else ''}"), s.label) for s in series
    ]
    return element("figcaption", *entries, class_="legend")


def scale(axis: Axis, values: Sequence[float], start: float, end: float) -> Scale:
    low = axis.low if axis.low is not None else min(values, default=0.0)
    high = axis.high if axis.high is not None else max(values, default=1.0)
    if axis.log:
        ticks = powers(low, high, axis.log)
        if axis.low is None or axis.high is None or not axis.high > axis.low:
            return Scale(ticks[0], ticks[-1], start, end, axis.log, thinned(ticks))
        within = tuple(tick for tick in ticks if low * 0.98 <= tick <= high * 1.02)
        return Scale(low, high, start, end, axis.log, thinned(within))
    if not high > low:
        low, high = low - (abs(low) or 1) / 2, high + (abs(high) or 1) / 2
    step = nice_step(low, high)
    low = low if axis.low is not None else step * math.floor(low / step + 1e-9)
    high = high if axis.high is not None else step * math.ceil(high / step - 1e-9)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return Scale(low, high, start, end, 0, tuple(round(step * index, 12) for index in range(first, last + 1)))


def nice_step(low: float, high: float) -> float:
    """A round distance (1, 2 or 5 times a power of ten) that gives about ``TICKS`` ticks.

    After Heckbert, "Nice numbers for graph labels", Graphics Gems, 1990.
    """
    raw = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    return power * next(nice for nice, limit in ((1, 1.5), (2, 3), (5, 7), (10, 11)) if raw / power < limit)


def powers(low: float, high: float, base: int) -> tuple[float, ...]:
    """The powers of ``base`` that cover the range, at least two."""
    first = math.floor(math.log(max(low, 1e-12), base) + 1e-9)
    last = max(math.ceil(math.log(max(high, 1e-12), base) - 1e-9), first + 1)
    return tuple(float(base) ** exponent for exponent in range(first, last + 1))


def thinned(ticks: tuple[float, ...], most: int = 8) -> tuple[float, ...]:
    return ticks[:: -(-len(ticks) // most)]


def axes(across: Scale, up: Scale, x: Axis, y: Axis, width: int, height: int) -> list[Markup]:
    bottom, middle = height - BOTTOM, (LEFT + width - RIGHT) / 2
    parts = []
    for tick in up.ticks:
        at = up(tick)
        parts.append(element("line", x1=LEFT, x2=width - RIGHT, y1=at, y2=at, class_="grid"))
        parts.append(element("text", y.spell(tick), x=LEFT - 6, y=at + 3.5, class_="tick end"))
    for tick in across.ticks:
        at = across(tick)
        parts.append(element("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
        parts.append(element("text", x.spell(tick), x=at, y=bottom + 15, class_="tick middle"))
    parts.append(element("line", x1=LEFT, x2=width - RIGHT, y1=bottom, y2=bottom, class_="axis"))
    parts.append(element("text", x.label, x=middle, y=height - 5, class_="title middle"))
    if y.label:
        parts.append(element("text", y.label, x=0, y=11, class_="title"))
    return parts


def draw(series: Series, across: Scale, up: Scale) -> Markup:
    points = [(across(a), up(b)) for a, b in zip(series.xs, series.ys, strict=True)]
    parts = []
    if series.band:
        low, high = ([(across(a), up(b)) for a, b in zip(series.xs, side, strict=True)] for side in series.band)
        parts.append(element("polygon", points=coordinates([*low, *reversed(high)]), class_="band"))
    if series.dots:
        parts += [element("circle", cx=a, cy=b, r=2, class_="dot") for a, b in points]
    else:
        parts.append(element("polyline", points=coordinates(points), class_="dashed" if series.dashed else "line"))
    for index, tip in series.marks.items():
        a, b = points[index]
        parts.append(
            element("circle", element("title", tip), cx=a, cy=b, r=series.radii.get(index, 3.2), class_="mark")
        )
    return element("g", *parts, class_=f"c{series.colour}")


def coordinates(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in points)


@dataclass(frozen=True)
class Cell:
    """One cell of a matrix: how dark it is (0 to 1), what it says, and whether it is as it should be."""

    shade: float
    text: str
    good: bool
    tip: str


def matrix(cells: Sequence[Sequence[Cell]], labels: Sequence[str], rows: str, columns: str, title: str) -> Markup:
    """A square of cells with the same labels on both sides; ``rows`` and ``columns`` say what the sides are."""
    depth = min(110.0, 26 + 6.2 * max(len(label) for label in labels))
    step = min(LARGEST_CELL, (WIDTH - RIGHT - depth) / len(labels))
    side = step * len(labels)
    # What is left of the width goes to both sides.
    margin = depth + (WIDTH - RIGHT - depth - side) / 2
    size = max(6.0, min(14.0, step * 0.36))
    upright = step < 6.5 * max(len(label) for label in labels)
    foot = depth - 6 if upright else 34.0
    parts = []
    for r, line in enumerate(cells):
        for c, cell in enumerate(line):
            a, b = margin + c * step, 8 + r * step
            box = element(
                "rect",
                element("title", cell.tip),
                x=a + 0.5,
                y=b + 0.5,
                width=step - 1,
                height=step - 1,
                rx=2,
                class_="good" if cell.good else "bad",
                fill_opacity=f"{cell.shade:.3f}",
            )
            parts.append(box)
            if cell.text:
                tone = "over" if cell.shade > 0.55 else "cell"
                middle = {"x": a + step / 2, "y": b + step / 2 + size * 0.36}
                parts.append(element("text", cell.text, **middle, font_size=size, class_=f"{tone} middle"))
    for index, label in enumerate(labels):
        at = index * step + step / 2
        parts.append(element("text", label, x=margin - 6, y=8 + at + 3.5, class_="tick end"))
        turned = f"translate({margin + at + 3.5:.1f} {8 + side + 6:.1f}) rotate(-90)"
        below = {"transform": turned, "class_": "tick end"}
        across = {"x": margin + at, "y": 8 + side + 14, "class_": "tick middle"}
        parts.append(element("text", label, **(below if upright else across)))
    height = 8 + side + foot
    turned = f"translate({margin - depth:.1f} {8 + side / 2:.1f}) rotate(-90)"
    parts.append(element("text", rows, transform=turned, class_="title middle"))
    parts.append(element("text", columns, x=margin + side / 2, y=height - 4, class_="title middle"))
    drawn = element("svg", element("title", title), join(*parts), viewBox=f"0 0 {WIDTH} {height:.0f}", role="img")
    return element("figure", drawn, class_="chart")
