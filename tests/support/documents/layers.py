"""Positions for a graph in layers: few crossings, short edges (the method of Sugiyama, Tagawa and Toda, 1981)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

SWEEPS = 40


@dataclass(frozen=True)
class Layout:
    """The layers from top to bottom, left to right. An edge is a chain of nodes, one per layer: its ends and bends."""

    layers: tuple[tuple[str, ...], ...]
    chains: tuple[tuple[str, ...], ...]

    def links(self) -> list[tuple[str, str]]:
        """Return the pairs of neighbours on all chains."""
        return [link for chain in self.chains for link in pairwise(chain)]


def with_bends(layers: Sequence[Sequence[str]], graph: Mapping[str, set[str]]) -> Layout:
    """Return a layout with a bend in every layer that an edge crosses, named after both of its ends."""
    level = {node: number for number, layer in enumerate(layers) for node in layer}
    rows = [list(layer) for layer in layers]
    chains = []
    for node in level:
        for end in sorted(graph[node] & level.keys()):
            bends = [(row, f"{node} {end} {row}") for row in range(level[node] + 1, level[end])]
            for row, bend in bends:
                rows[row].append(bend)
            chains.append((node, *(bend for _, bend in bends), end))
    return Layout(tuple(map(tuple, rows)), tuple(chains))


def crossings(layout: Layout) -> int:
    """Return the number of pairs of links that cross each other."""
    place = {node: (row, column) for row, layer in enumerate(layout.layers) for column, node in enumerate(layer)}
    by_row: dict[int, list[tuple[int, int]]] = {}
    for upper, lower in layout.links():
        by_row.setdefault(place[upper][0], []).append((place[upper][1], place[lower][1]))
    return sum(
        (first[0] - second[0]) * (first[1] - second[1]) < 0
        for links in by_row.values()
        for number, first in enumerate(links)
        for second in links[:number]
    )


def neighbours_of(layout: Layout) -> dict[str, tuple[list[str], list[str]]]:
    """Return the neighbours of every node above and below it."""
    found: dict[str, tuple[list[str], list[str]]] = {node: ([], []) for layer in layout.layers for node in layer}
    for upper, lower in layout.links():
        found[upper][1].append(lower)
        found[lower][0].append(upper)
    return found


def ordered(layout: Layout) -> Layout:
    """Return the layout with the fewest crossings that sweeps find: each sorts all layers by the means of neighbours,
    and then exchanges adjacent nodes while that helps."""
    neighbours = neighbours_of(layout)
    best = layout
    rows = [list(layer) for layer in layout.layers]
    for sweep in range(SWEEPS):
        side = sweep % 2
        for row in rows if side == 0 else reversed(rows):
            place = {node: (number + 0.5) / len(layer) for layer in rows for number, node in enumerate(layer)}
            means = {
                node: sum(place[other] for other in near) / len(near)
                if (near := neighbours[node][side])
                else place[node]
                for node in row
            }
            row.sort(key=means.__getitem__)
        found = exchanged(Layout(tuple(map(tuple, rows)), layout.chains))
        if crossings(found) < crossings(best):
            best = found
    return best


def exchanged(layout: Layout) -> Layout:
    """Exchange adjacent nodes while that removes crossings."""
    best, fewest = layout, crossings(layout)
    improved = True
    while improved:
        improved = False
        for row in range(len(best.layers)):
            for left in range(len(best.layers[row]) - 1):
                layer = list(best.layers[row])
                layer[left], layer[left + 1] = layer[left + 1], layer[left]
                other = Layout((*best.layers[:row], tuple(layer), *best.layers[row + 1 :]), best.chains)
                if (number := crossings(other)) < fewest:
                    best, fewest, improved = other, number, True
    return best


def spread(wanted: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Return the positions nearest to those wanted (least squares) that keep the gaps between neighbours."""
    offsets = [sum(gaps[:number]) for number in range(len(wanted))]
    blocks: list[tuple[float, int]] = []
    for target, offset in zip(wanted, offsets, strict=True):
        mean, size = target - offset, 1
        while blocks and blocks[-1][0] > mean:
            before, count = blocks.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        blocks.append((mean, size))
    flat = [mean for mean, size in blocks for _ in range(size)]
    return [mean + offset for mean, offset in zip(flat, offsets, strict=True)]


def positions(layout: Layout, widths: Mapping[str, float], room: float, bars: Collection[str]) -> dict[str, float]:
    """Return the horizontal centre of every node between 0 and ``room``. ``widths`` include the space between nodes.
    Bars are as wide as the room: edges reach them anywhere."""
    chains = tuple(tuple(node for node in chain if node not in bars) for chain in layout.chains)
    neighbours = neighbours_of(Layout(layout.layers, chains))
    centre = {node: room * (number + 0.5) / len(layer) for layer in layout.layers for number, node in enumerate(layer)}
    for sweep in range(SWEEPS):
        for layer in layout.layers if sweep % 2 == 0 else reversed(layout.layers):
            near = {node: [*neighbours[node][0], *neighbours[node][1]] for node in layer}
            wanted = [
                sum(centre[other] for other in near[node]) / len(near[node]) if near[node] else centre[node]
                for node in layer
            ]
            gaps = [(widths[left] + widths[right]) / 2 for left, right in pairwise(layer)]
            found = spread(wanted, gaps)
            last = [room - widths[layer[-1]] / 2 - sum(gaps[number:]) for number in range(len(layer))]
            first = [widths[layer[0]] / 2 + sum(gaps[:number]) for number in range(len(layer))]
            for node, place, low, high in zip(layer, found, first, last, strict=True):
                centre[node] = min(max(place, low), high)
    return centre
