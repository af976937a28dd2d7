"""Tables on a terminal, with sizes and ages as text."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from slipstream.shared.errors import one_line

DAY_S = 86400.0


def aligned_table(columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str]) -> str:
    """Return the lines of a table; columns named in ``left`` are left-aligned, all others right-aligned.

    Cells may hold names from untrusted files, so line breaks and control characters in them are escaped.
    """
    lines = [columns, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in lines
    )


def numbered_line(number: int, cells: Iterable[str]) -> str:
    """Return a line of a numbered list, with cells as in :func:`aligned_table`."""
    return "  ".join([f"{number:>4}", *map(one_line, cells)])


def size_text(number: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} GiB"


def age_text(seconds: float) -> str:
    for unit, length in (("d", DAY_S), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
