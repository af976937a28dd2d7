"""What would make the host wait for a device, looked for on a CPU: there the same operations are dispatched."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoWaits(TorchDispatchMode):
    """Raises where the host would have to wait: a number is read, or a shape depends on one."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "_unique2", "masked_select")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in self.WAITS, f"{func} makes the host wait"
        return func(*args, **(kwargs or {}))
