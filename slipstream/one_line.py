"""Messages as one line that a terminal shows and does not obey, whatever names and values they quote."""

from __future__ import annotations

#: A longer message is quoting somebody's data; its beginning says where, its end what to do.
MOST_CHARACTERS = 1500


def one_line(text: str) -> str:
    """``text`` with its white space collapsed, everything unprintable as Python escapes it, and its middle left out if
    it is very long."""
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(line) > MOST_CHARACTERS:
        line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
    return line
