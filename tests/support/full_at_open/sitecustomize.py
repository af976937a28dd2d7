"""Every Python process that finds this module fills ``$SMALL_DISK`` when a file there is opened for writing whose name
is not in ``$FILLED_FOR`` yet, and adds the name. Numbers and digests in names count as equal."""

from __future__ import annotations

import os
import re
import sys

DISK, FILLED_FOR = os.environ.get("SMALL_DISK", ""), os.environ.get("FILLED_FOR", "")
FILLER = f"{DISK}/filler"


def on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
        path, writes = os.path.abspath(arguments[0]), arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and path.startswith(f"{DISK}/") and path != FILLER and not os.path.exists(FILLER):
            fill_for(re.sub(r"[0-9a-f]{8,}|[0-9]+", "#", path.removeprefix(f"{DISK}/")))


def fill_for(name: str) -> None:
    with open(FILLED_FOR, "a+") as names:
        names.seek(0)
        if name in names.read().splitlines():
            return
        names.write(f"{name}\n")
    filler = os.open(FILLER, os.O_CREAT | os.O_WRONLY)
    for size in (1 << 20, 1 << 12):
        try:
            while True:
                os.write(filler, bytes(size))
        except OSError:
            pass
    os.close(filler)


if DISK:
    sys.addaudithook(on_event)
