"""Keep flytekit's lazy modules unloaded when torch inspects them.

flytekit imports pandas, PyArrow and joblib as modules that load at the first access to any attribute. torch reads the
``__file__`` of every module while it registers operators, which loads them: half a second and 35 MB per process.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

Lazy: Any = importlib.util._LazyModule  # type: ignore[attr-defined]
#: Attributes that can be read without loading the module.
KNOWN = ("__class__", "__file__", "__loader__", "__name__", "__spec__")


class _LazyModule(Lazy):  # flytekit knows lazy modules by the name of their class
    """Module proxy that exposes the attributes ``KNOWN`` without loading."""

    def __getattribute__(self, name: str) -> Any:
        if name in KNOWN:
            return object.__getattribute__(self, name)
        object.__setattr__(self, "__class__", Lazy)
        return getattr(self, name)


def stay_lazy() -> None:
    """Convert all lazy modules in ``sys.modules`` to the proxy."""
    for module in list(sys.modules.values()):
        if type(module) is Lazy:
            object.__setattr__(module, "__class__", _LazyModule)
