"""Tables on a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def aligned(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> str:
    """The lines of a table: columns named in ``left`` begin at its left edge, all others end at its right."""
    lines = [columns, *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )
