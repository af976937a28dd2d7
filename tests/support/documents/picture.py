"""The picture of the architecture: folders as boxes in layers, and an arrow for every import that no others imply."""

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import jinja2

from slipstream.shared.artifacts.versions import ROOT
from tests.support.documents.imports import group_of, without_implied
from tests.support.documents.layers import Layout, ordered, positions, with_bends

PICTURE = ROOT / "docs/architecture.svg"
TEMPLATE = ROOT / "tests/support/documents/picture.svg.jinja"
MARGIN, BOX_WIDTH, BOX_HEIGHT = 16, 110, 32
#: Between boxes, and for an edge that passes a layer.
GAP, BEND_WIDTH = 6, 14
LAYER_HEIGHT, LEGEND_HEIGHT = 72, 12
#: The length of an arrowhead.
TIP = 6
BARS = {"workflows": "what you run with pyflyte, and launch plans", "tasks": "typed Flyte tasks, one module per stage"}
LEGEND = (
    ("tasks", "imports flytekit", MARGIN),
    ("pipeline", "slipstream/pipeline: stages", 200),
    ("operations", "slipstream/operations: commands around the pipeline", 410),
    ("shared", "slipstream/shared: what they share", 830),
)


def levels(graph: Mapping[str, set[str]], nodes: Iterable[str]) -> list[list[str]]:
    """Return the nodes in layers from top to bottom; a node is one layer above its highest import."""
    inside = set(nodes)

    @cache
    def level(node: str) -> int:
        return max((level(other) + 1 for other in graph[node] & inside), default=0)

    highest = max(map(level, inside))
    return [sorted(node for node in inside if level(node) == number) for number in range(highest, -1, -1)]


def kinds(graph: Mapping[str, set[str]]) -> dict[str, str]:
    """Return the kind of every package of ``slipstream/``: its group, or "tasks" for ``flyte``."""
    return {name: "tasks" if name == "flyte" else group_of(name) for name in graph.keys() - BARS.keys()}


def curve(points: list[tuple[float, float]]) -> str:
    """Return a path through points that leaves and reaches every one of them vertically."""
    parts = [f"M{points[0][0]:.0f} {points[0][1]:.0f}"]
    for (left, top), (right, bottom) in pairwise(points):
        middle = (top + bottom) / 2
        parts.append(
            f"V{bottom:.0f}"
            if round(left) == round(right)
            else f"C{left:.0f} {middle:.0f} {right:.0f} {middle:.0f} {right:.0f} {bottom:.0f}"
        )
    return " ".join(parts)


class Box(NamedTuple):
    """A folder as a rectangle."""

    kind: str
    name: str
    note: str
    x: int
    y: int
    width: int
    height: int


def boxes_of(layout: Layout, kind: Mapping[str, str], centre: Mapping[str, float], room: int) -> dict[str, Box]:
    """Return the box, or the gap of a bend, of every node. The first two layers are as wide as the picture."""
    found = {}
    for number, layer in enumerate(layout.layers):
        for node in layer:
            wide = room if node in BARS else BOX_WIDTH if node in kind else 0
            x = MARGIN if node in BARS else round(centre[node] - wide / 2)
            note = BARS.get(node, "")
            found[node] = Box(kind.get(node, "tasks"), node, note, x, MARGIN + LAYER_HEIGHT * number, wide, BOX_HEIGHT)
    return found


def picture(graph: Mapping[str, set[str]]) -> str:
    """Return the picture of the folders and their imports as SVG. Raise ``ValueError`` if imports form a cycle."""
    reduced = without_implied(graph)
    kind = kinds(graph)
    shared = {node for node, name in kind.items() if name == "shared"}
    layers = [["workflows"], ["tasks"], *levels(reduced, kind.keys() - shared), *levels(reduced, shared)]
    layout = ordered(with_bends(layers, reduced))
    widths = {node: BOX_WIDTH + GAP if node in kind else BEND_WIDTH for layer in layout.layers for node in layer}
    room = max(sum(widths[node] for node in layer) for layer in layout.layers)
    centre = {node: MARGIN + x for node, x in positions(layout, widths, room, BARS).items()}
    boxes = boxes_of(layout, kind, centre, room)
    arrows = []
    for chain in layout.chains:
        start, end = boxes[chain[0]], boxes[chain[-1]]
        x = centre[chain[1]] if start.name in BARS else centre[start.name]
        points = [(x, start.y + start.height)]
        for bend in chain[1:-1]:
            points += [(centre[bend], boxes[bend].y), (centre[bend], boxes[bend].y + BOX_HEIGHT)]
        arrows.append((start.kind, curve([*points, (x if end.name in BARS else centre[end.name], end.y - TIP)])))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        width=room + 2 * MARGIN,
        height=MARGIN + LAYER_HEIGHT * len(layers) + LEGEND_HEIGHT,
        arrows=arrows,
        boxes=[box for box in boxes.values() if box.width],
        legend=LEGEND,
    )
