"""The bytes that tensors hold while a step is traced: how many of each kind, and the most at once.

A storage is counted from the operation that makes it until the last tensor that lies in it is gone. FSDP2 gives
gathered weights back by resizing their storages to nothing, which no operation shows; so that itself is watched.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Kind = Literal["parameters", "gradients", "optimizer", "activations", "communication"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Operations that exchange tensors or make ready to. What tensor parallelism exchanges are activations.
EXCHANGES = ("c10d", "fsdp")
#: What is sent to the next stage of a pipeline is an activation.
SENDS = ("send",)
REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_")
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class Held:
    """A storage that is counted, its bytes and its kind."""

    __slots__ = ("bytes", "kind")

    def __init__(self, size: int, kind: Kind) -> None:
        self.bytes, self.kind = size, kind


class Tracker(TorchDispatchMode):
    """Counts the bytes of the results of all operations within ``with tracker:``, inside of a ``FakeTensorMode``.

    A new storage is of the kind ``now``. ``at_peak`` are the bytes of each kind when they were most since
    :meth:`restart`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now: Kind = "activations"
        self.held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.held)
        self._storages: dict[int, Held] = {}

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak, self.at_peak = self.total, dict(self.held)

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """What is made in the block is of this kind."""
        before, self.now = self.now, kind
        try:
            yield
        finally:
            self.now = before

    def relabel(self, tensors: Iterable[Tensor | None], kind: Kind, of: Sequence[Kind] = KINDS) -> None:
        """What these tensors lie in is of this kind, if it was one ``of`` those."""
        for tensor in tensors:
            if tensor is None:
                continue
            storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
            if (held := self._storages.get(id(storage))) and held.kind in of:
                self._change(held, -held.bytes)
                held.kind = kind
                self._change(held, held.bytes)

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if any(kind not in PLAIN for kind in types):
            return NotImplemented  # of a DTensor those of its parts count, which it makes next
        result = func(*args, **(kwargs or {}))
        exchanges = func.namespace in EXCHANGES and func._opname not in SENDS
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), "communication" if exchanges else self.now)
        if exchanges:
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if func._opname in REDUCE_SCATTERS:
                # Outputs come first; of the rest what is an input is a buffer.
                self.relabel(given[:1], "gradients")
            self.relabel(given, "communication", of=("activations",))
        return result

    def _count(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key = id(storage)
        if key in self._storages:
            return
        held = self._storages[key] = Held(storage.nbytes(), kind)
        weakref.finalize(storage, self._gone, key)
        self._change(held, held.bytes)

    def _gone(self, key: int) -> None:
        held = self._storages.pop(key)
        self._change(held, -held.bytes)

    def _change(self, held: Held, by: int) -> None:
        self.held[held.kind] += by
        self.total += by
        if self.total > self.peak:
            self.restart()

    def __enter__(self) -> Tracker:
        tracker, plain = self, torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            plain(storage, size)
            if held := tracker._storages.get(id(storage)):
                tracker._change(held, -held.bytes)
                held.bytes, held.kind = size, "communication"
                tracker._change(held, size)

        self._resize = plain
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*raised)
