"""Host name lookup without a name server, for connections between processes on this machine.

torch's TCP sockets look up the name of every address that they connect to, for error messages (2.13, c10d/socket.cpp).
On one machine the address is ``::ffff:127.0.0.1``, IPv4 within IPv6, which glibc does not find in ``/etc/hosts``; so it
asks a remote name server for ``1.0.0.127.in-addr.arpa``.
"""

from __future__ import annotations

import ctypes
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCES = Path("/etc/nsswitch.conf")
#: glibc's default if the file is missing.
DEFAULT = "files dns"


@contextmanager
def names_of_this_machine(host: str) -> Iterator[None]:
    """Look up names in ``/etc/hosts`` only, in the whole process, if ``host`` is this machine.

    Without glibc this does nothing.
    """
    configure = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if configure is None:
        yield
        return
    usual = host_name_sources().encode()
    configure(b"hosts", b"files")
    try:
        if not is_here(host):
            configure(b"hosts", usual)
        yield
    finally:
        configure(b"hosts", usual)


def host_name_sources() -> str:
    """Return the sources of host names configured in ``nsswitch.conf``, such as "files dns"."""
    text = SOURCES.read_text(encoding="utf-8") if SOURCES.exists() else ""
    match = re.search(r"^\s*hosts:([^#\n]*)", text, re.M)
    return match[1].strip() if match else DEFAULT


def is_here(host: str) -> bool:
    """Return True if all addresses of ``host`` are this machine's: a socket can be bound only to those."""
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as tried:
                tried.bind(address)
    except OSError:
        return False
    return True
