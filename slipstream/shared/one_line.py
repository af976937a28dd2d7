"""Messages as one printable line, whatever names and values they quote."""

from __future__ import annotations

import re

#: Maximum length of a message. Longer messages quote user data; their start says where, their end what to do.
MOST_CHARACTERS = 1500
#: Secrets in an address: a user with a password or, as in ``https://token@host``, alone; and named ones in a query.
#: ``abfs://container@account`` and ``http://host:9000/a@b`` hold none.
SECRETS = {
    re.compile(r"""(://)[^\s/@:'"\[]{0,100}:(?!\d{1,5}[/?#])[^\s'"<>]{0,300}@"""): r"\1",
    re.compile(r"""(https?://)[^\s/@:?#'"]{1,300}@"""): r"\1",
    re.compile(r"""(?i)([?&][\w.-]{0,40}(?:sig|token|passw|secret|key|credential)[\w.-]{0,40}=)[^\s&'"]+"""): r"\1…",
}


def one_line(text: str) -> str:
    """Return ``text`` on one line, safe for terminals.

    White space is collapsed, unprintable characters are escaped as in Python, and the middle of a very long text is
    omitted. Passwords in addresses are removed.
    """
    line = without_secrets(" ".join(text.split()))
    if not line.isprintable():
        line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    if len(line) > MOST_CHARACTERS:
        line = f"{line[: MOST_CHARACTERS // 2]} … {line[-MOST_CHARACTERS // 2 :]}"
    return line


def without_secrets(text: str) -> str:
    """Return ``text`` without users and passwords in its addresses, and without secrets in their queries."""
    if "://" in text:
        for pattern, rest in SECRETS.items():
            text = pattern.sub(rest, text)
    return text
