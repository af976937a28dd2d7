"""Messages as one printable line, whatever names and values they quote."""

from __future__ import annotations

#: Maximum length of a message. Longer messages quote user data; their start says where, their end what to do.
MOST_CHARACTERS = 1500


def one_line(text: str) -> str:
    """Return ``text`` on one line, safe for terminals.

    White space is collapsed, unprintable characters are escaped as in Python, and the middle of a very long text is
    omitted.
    """
    line = " ".join(text.split())
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(line) > MOST_CHARACTERS:
        line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
    return line
