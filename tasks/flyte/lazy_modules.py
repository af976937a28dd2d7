"""Lazy modules of flytekit that load only when they are used.

flytekit imports pandas, PyArrow and joblib as modules that load at the first access to any attribute. torch asks every
module for its file while it registers operations. Any process with flytekit and torch would load them: half a second,
and 35 MB.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

Lazy: Any = importlib.util._LazyModule  # type: ignore[attr-defined]
#: Attributes of a module that is not loaded.
KNOWN = ("__class__", "__file__", "__loader__", "__name__", "__spec__")


class _LazyModule(Lazy):  # flytekit knows lazy modules by the name of their class
    """Module proxy that exposes its name and file without importing."""

    def __getattribute__(self, name: str) -> Any:
        if name in KNOWN:
            return object.__getattribute__(self, name)
        object.__setattr__(self, "__class__", Lazy)
        return getattr(self, name)


def stay_lazy() -> None:
    """Keep the present lazy modules lazy from now on."""
    for module in list(sys.modules.values()):
        if type(module) is Lazy:
            object.__setattr__(module, "__class__", _LazyModule)
