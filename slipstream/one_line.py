"""Messages as one line that a terminal shows and does not obey, whatever names and values they quote."""

from __future__ import annotations


def one_line(message: str) -> str:
    """``message`` with its white space collapsed, and everything unprintable as Python escapes it."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in " ".join(message.split())
    )
