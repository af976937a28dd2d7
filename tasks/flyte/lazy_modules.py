"""flytekit's lazy modules, which are to be loaded when they are used, and not when somebody looks at what there is.

Of pandas, PyArrow and joblib flytekit makes modules that load at the first look at any attribute. torch asks every
module for its file while it registers operations, so any process that has flytekit and torch would load them: half a
second, and 35 MB.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

Lazy: Any = importlib.util._LazyModule  # type: ignore[attr-defined]
#: What a module has before it is loaded.
KNOWN = ("__class__", "__file__", "__loader__", "__name__", "__spec__")


class _LazyModule(Lazy):  # flytekit knows lazy modules by the name of their class
    """One that says what it is without being loaded."""

    def __getattribute__(self, name: str) -> Any:
        if name in KNOWN:
            return object.__getattribute__(self, name)
        object.__setattr__(self, "__class__", Lazy)
        return getattr(self, name)


def stay_lazy() -> None:
    """From now on, for the lazy modules that there are."""
    for module in list(sys.modules.values()):
        if type(module) is Lazy:
            object.__setattr__(module, "__class__", _LazyModule)
