"""Every Python process that finds this module fills ``$SMALL_DISK`` when a file there is opened for writing whose kind
is not in ``$FILLED_FOR`` yet, and adds the kind: the directory and the suffix, without numbers, digests and random
letters."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path

DISK, FILLED_FOR = Path(os.environ.get("SMALL_DISK", "/dev/null")), Path(os.environ.get("FILLED_FOR", ""))
FILLER = DISK / "filler"
#: Those of ``tempfile`` have eight random letters.
CHANGING = re.compile(r"(?<=[-.])[a-z0-9_]{8}(?=/)|[0-9a-f]{8,}|[0-9]+")


def on_event(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and isinstance(arguments[0], str) and isinstance(arguments[2], int):
        path, writes = Path.cwd() / arguments[0], arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and path.is_relative_to(DISK) and path != FILLER and not FILLER.exists():
            kind = path.relative_to(DISK).with_name(f"*{''.join(path.suffixes)}").as_posix()
            fill_for(CHANGING.sub("#", kind))


def fill_for(kind: str) -> None:
    with FILLED_FOR.open("a+") as names:
        names.seek(0)
        if kind in names.read().splitlines():
            return
        names.write(f"{kind}\n")
    with FILLER.open("wb", buffering=0) as filler:
        for size in (1 << 20, 1 << 12):
            with suppress(OSError):
                while filler.write(bytes(size)) == size:
                    pass


if "SMALL_DISK" in os.environ:
    sys.addaudithook(on_event)
