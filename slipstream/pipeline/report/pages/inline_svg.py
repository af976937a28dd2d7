"""Matplotlib figures as inline SVG with the page's colours and font."""

from __future__ import annotations

import functools
import io
import re
import warnings
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec
from xml.etree import ElementTree

import matplotlib
from cycler import cycler
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Placeholders for the variables of the style sheet. The SVG refers to the variables, so that one drawing serves the
# light and the dark theme.
SERIES = ("#000001", "#000002", "#000003", "#000004")
INK, SOFT, LINE, CARD = "#000005", "#000006", "#000007", "#000008"
VARIABLES = {colour: f"var(--c{number})" for number, colour in enumerate(SERIES)}
VARIABLES |= {INK: "var(--ink)", SOFT: "var(--soft)", LINE: "var(--line)", CARD: "var(--card)"}

#: Size in CSS pixels, as wide as a card on a phone. The drawing grows with the page, so its text stays readable.
WIDTH, HEIGHT = 420, 260
#: In CSS pixels: the larger of the style sheet's two font sizes, so that texts of either size fit.
FONT_SIZE = 13
PIXELS_PER_INCH = 72
STYLE: dict[Any, Any] = {
    "font.size": FONT_SIZE,
    "svg.fonttype": "none",
    # A dollar sign in a label from the data does not start a formula.
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": SOFT,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "axes.labelsize": FONT_SIZE,
    "axes.spines.left": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.autolimit_mode": "round_numbers",
    "axes.xmargin": 0,
    "axes.ymargin": 0,
    "axes.prop_cycle": cycler(color=SERIES),
    "grid.color": LINE,
    "grid.linewidth": 1,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelsize": FONT_SIZE,
    "ytick.labelsize": FONT_SIZE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 9,
    "lines.linewidth": 2,
    "lines.solid_capstyle": "butt",
    "legend.frameon": False,
    "legend.fontsize": FONT_SIZE,
    "legend.labelcolor": SOFT,
    "legend.handlelength": 1.4,
    "legend.borderaxespad": 0,
}
SVG, XLINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}"
TOOLTIP = "tooltip: "
COORDINATES = {"d", "x", "y", "transform"}
DROPPED = ("metadata", "style", "clipPath")
#: Characters that XML forbids, even escaped.
NOT_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
DECIMALS = re.compile(r"-?\d+\.\d+")

P = ParamSpec("P")


def inline_svg(plot: Callable[Concatenate[Axes, P], str]) -> Callable[P, Markup]:
    """Wrap a function that plots on empty axes to return an ``<svg>`` element.

    ``plot`` returns a phrase that describes the chart for screen readers. Equal arguments give equal bytes.
    """

    @functools.wraps(plot)
    def draw(*args: P.args, **kwargs: P.kwargs) -> Markup:
        file = io.StringIO()
        with matplotlib.rc_context(), warnings.catch_warnings():
            # The browser has fonts for scripts that Matplotlib's font lacks.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            matplotlib.rcdefaults()
            matplotlib.rcParams.update({**STYLE, "svg.hashsalt": plot.__name__})
            size = WIDTH / PIXELS_PER_INCH, HEIGHT / PIXELS_PER_INCH
            figure = Figure(size, PIXELS_PER_INCH, frameon=False, layout="constrained")
            axes = figure.add_subplot()
            axes.patch.set_visible(False)
            description = plot(axes, *args, **kwargs)
            figure.savefig(file, format="svg", metadata={"Date": None})
        return themed(file.getvalue(), description)

    return draw


def tooltip(text: str) -> str:
    """Return the ``gid`` that gives a Matplotlib artist the tooltip ``text``."""
    return TOOLTIP + text


def themed(document: str, description: str) -> Markup:
    """Return the root element of Matplotlib's ``document``, reduced to the needs of an HTML page."""
    root = ElementTree.fromstring(printable(document))
    used = {element.get(f"{XLINK}href", "")[1:] for element in root.iter(f"{SVG}use")}
    for element in list(root.iter()):
        simplify(element, used)
    prune(root)
    drawing = ElementTree.Element("svg", {"viewBox": root.get("viewBox", ""), "role": "img"})
    drawing.set("aria-label", printable(description))
    drawing.extend(root)
    return Markup(ElementTree.tostring(drawing, encoding="unicode"))


def printable(text: str) -> str:
    return NOT_XML.sub("\N{REPLACEMENT CHARACTER}", text)


def simplify(element: ElementTree.Element, used: set[str]) -> None:
    """Simplify tag names and numbers, use CSS variables, and drop unreferenced identifiers."""
    element.tag, element.tail = element.tag.removeprefix(SVG), None
    if element.tag != "text":
        element.text = None
    # Clipping is unnecessary: nothing is drawn outside its axes.
    element.attrib.pop("clip-path", None)
    for name in COORDINATES.intersection(element.attrib):
        element.set(name, " ".join(DECIMALS.sub(two_decimals, element.attrib[name]).split()))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if link := element.attrib.pop(f"{XLINK}href", ""):
        element.set("href", link)
    if style := themed_style(element.attrib.pop("style", "")):
        element.set("style", style)
    identifier = element.get("id", "")
    if identifier not in used:
        element.attrib.pop("id", None)
    if identifier.startswith(TOOLTIP):
        title = ElementTree.Element("title")
        title.text = identifier.removeprefix(TOOLTIP)
        element.insert(0, title)


def two_decimals(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def themed_style(style: str) -> str:
    """Replace placeholder colours by CSS variables, and drop font declarations that the style sheet makes."""
    declared = dict(declaration.split(": ", 1) for declaration in style.split("; ") if declaration)
    declared.pop("font-family", None)
    if declared.get("font-size") == f"{FONT_SIZE}px":
        del declared["font-size"]
    return ";".join(f"{name}:{VARIABLES.get(value, value)}" for name, value in declared.items())


def prune(element: ElementTree.Element) -> None:
    """Remove invisible elements, unpack groups without attributes, and move shared styles to the group."""
    children: list[ElementTree.Element] = []
    for child in element:
        prune(child)
        if child.tag == "g" and not child.attrib and (len(child) == 1 or child.find("title") is None):
            children += child
        elif child.tag not in DROPPED and (len(child) or child.tag not in ("g", "defs")):
            children.append(child)
    element[:] = children
    styles = {child.get("style") for child in element}
    if element.tag == "g" and len(element) > 1 and len(styles) == 1 and None not in styles:
        element.set("style", styles.pop() or "")
        for child in element:
            del child.attrib["style"]
