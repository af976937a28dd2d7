"""Child processes that do not begin with the main module of their parent."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_main_module() -> Iterator[None]:
    """Let processes start without importing this one's main module again: they need nothing of a command such as
    ``pyflyte``, whose import takes seconds."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
