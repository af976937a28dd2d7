"""Tracker of tensor memory while a step is traced: bytes by kind, and the peak.

A storage counts from the operation that creates it until its last tensor is freed. FSDP2 frees gathered weights by
resizing their storages to zero. A dispatch mode does not see that, so ``resize_`` is patched.

``DTensor`` derives the shapes of results from fake tensors of undivided size, at the first call of an operator, and in
torch 2.11 at every call of fused AdamW. These do not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.library import _scoped_library
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slipstream.shared.models.arithmetic import autocast_type
from slipstream.shared.models.transformer import ALIGNED, LARGEST_HEAD

Kind = Literal["parameters", "gradients", "optimizer", "activations", "communication"]
KINDS: tuple[Kind, ...] = get_args(Kind)
#: Namespaces of operators whose results count as communication. Results of tensor parallelism's collectives, from
#: another namespace, count as activations.
EXCHANGES = ("c10d", "fsdp")
#: Exception: a tensor sent to the next pipeline stage counts as an activation.
SENDS = ("send",)
REDUCE_SCATTERS = ("_reduce_scatter_base_", "reduce_scatter_")
PLAIN = (Tensor, torch.nn.Parameter, FakeTensor)


class TrackedStorage:
    """Bytes and kind of a tracked storage."""

    __slots__ = ("bytes", "kind")

    def __init__(self, size: int, kind: Kind) -> None:
        self.bytes, self.kind = size, kind


class MemoryTracker(TorchDispatchMode):
    """Dispatch mode that counts the bytes of all results inside a ``FakeTensorMode``.

    A new storage gets the kind ``now``. ``at_peak`` holds the bytes by kind at the peak since :meth:`restart`.
    ``deterministic`` means that a GPU would use deterministic kernels only.
    """

    def __init__(self, *, deterministic: bool = False) -> None:
        super().__init__()
        self._deterministic = deterministic
        self.now: Kind = "activations"
        self.held: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        self.total = self.peak = 0
        self.at_peak = dict(self.held)
        self._storages: dict[int, TrackedStorage] = {}
        self._derives_shapes = False

    def restart(self) -> None:
        """Reset the peak to the current bytes."""
        self.peak, self.at_peak = self.total, dict(self.held)

    @contextmanager
    def making(self, kind: Kind) -> Iterator[None]:
        """Give storages created in the block the kind ``kind``."""
        before, self.now = self.now, kind
        try:
            yield
        finally:
            self.now = before

    def relabel(self, tensors: Iterable[Tensor | None], kind: Kind, of: Sequence[Kind] = KINDS) -> None:
        """Change the kind of these tensors' storages to ``kind`` if their present kind is in ``of``."""
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
            return NotImplemented  # a DTensor dispatches again with its local tensors, which are counted
        result = func(*args, **(kwargs or {}))
        if self._derives_shapes:
            return result
        exchanges = func.namespace in EXCHANGES and func._opname not in SENDS
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._count(leaf.untyped_storage(), "communication" if exchanges else self.now)
        if exchanges:
            given = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
            if func._opname in REDUCE_SCATTERS:
                # The first argument is the output. Others count as communication below if they were activations.
                self.relabel(given[:1], "gradients")
            self.relabel(given, "communication", of=("activations",))
        if size := scratch_bytes(func, args, self._deterministic):
            scratch = TrackedStorage(size, "activations")
            self._change(scratch, size)
            self._change(scratch, -size)
        return result

    def _count(self, storage: torch.UntypedStorage, kind: Kind) -> None:
        key = id(storage)
        if key in self._storages:
            return
        held = self._storages[key] = TrackedStorage(storage.nbytes(), kind)
        weakref.finalize(storage, self._gone, key)
        self._change(held, held.bytes)

    def _gone(self, key: int) -> None:
        held = self._storages.pop(key)
        self._change(held, -held.bytes)

    def _change(self, held: TrackedStorage, by: int) -> None:
        self.held[held.kind] += by
        self.total += by
        if self.total > self.peak:
            self.restart()

    def __enter__(self) -> MemoryTracker:
        tracker, plain = self, torch.UntypedStorage.resize_
        derive = ShardingPropagator._propagate_tensor_meta_non_cached

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            plain(storage, size)
            if held := tracker._storages.get(id(storage)):
                tracker._change(held, -held.bytes)
                held.bytes, held.kind = size, "communication"
                tracker._change(held, size)

        def derive_uncounted(propagator: ShardingPropagator, schema: OpSchema) -> Any:
            tracker._derives_shapes = True
            try:
                return derive(propagator, schema)
            finally:
                tracker._derives_shapes = False

        self._resize, self._derive = plain, derive
        ShardingPropagator._propagate_tensor_meta_non_cached = derive_uncounted  # type: ignore[method-assign, assignment]
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        ShardingPropagator._propagate_tensor_meta_non_cached = self._derive  # type: ignore[method-assign]
        super().__exit__(*raised)


# A torch build without CUDA has no gradients of fake CUDA tensors, so traces use fake CPU tensors. On a CPU, torch
# decomposes RMSNorm, which keeps six intermediate tensors, and uses an attention kernel with other limits.
NORM = "_fused_rms_norm"
HALF = (torch.bfloat16, torch.float16)
CHOICE_OF_CPU = functional.scaled_dot_product_attention


#: Backward passes of flash attention, with the positions of the bounds of documents; None without.
FLASH_BACKWARD = {"_varlen_attn_backward": 6, "_scaled_dot_product_flash_attention_backward": None}
#: Rows of scratch that flash attention adds for every sequence, and to which it rounds a sequence's length.
FLASH_ROWS = 128
#: Multiprocessors of an H100 or H200, by which deterministic flash attention divides its sums.
MULTIPROCESSORS = 132


def scratch_bytes(func: OpOverload, args: Sequence[Any], deterministic: bool) -> int:
    """Return the bytes that an operator takes during its run; 0 unless it is flash attention's backward pass.

    As in ``mha_bwd`` and ``mha_varlen_bwd`` (``aten/native/transformers/cuda/flash_attn/flash_api.cpp``): queries'
    gradients and sums in float32, and gradients of shared keys and values for every query head.
    """
    if func._opname not in FLASH_BACKWARD:
        return 0
    query, key = args[1], args[2]
    place = FLASH_BACKWARD[func._opname]
    if place is None:
        sequences, heads, length, size = query.shape
        rows, shared = sequences * -(-length // FLASH_ROWS) * FLASH_ROWS, heads > key.shape[1]
    else:
        (tokens, heads, size), sequences = query.shape, args[place].numel() - 1
        rows, shared = tokens + FLASH_ROWS * sequences, heads > key.shape[1]
    sums = -(-MULTIPROCESSORS // (sequences * heads)) if deterministic else 1
    rounded = -(-size // 32) * 32 if size <= FLASH_ROWS else -(-size // 64) * 64
    return 4 * rows * heads * (sums * rounded + 1) + shared * 2 * query.nbytes


@contextmanager
def cuda_operators() -> Iterator[None]:
    """Let fake CPU tensors run CUDA's ``_fused_rms_norm`` and attention kernels within the block."""
    with _scoped_library("aten", "IMPL") as library:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{NORM}", "CPU"):
            # An operator with a CPU kernel is not decomposed; fake tensors never reach the kernel.
            library.impl(NORM, without_values, "CPU")
        # Not by a TorchFunctionMode: a block that is recomputed in the backward pass would run without it.
        functional.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = CHOICE_OF_CPU


def without_values(*_: object) -> None:
    raise RuntimeError(f"{NORM} is only traced, on fake tensors")


def attention(  # noqa: PLR0913 - the signature of torch
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the outputs of the kernel that CUDA would use for these tensors.

    It is flash attention, else the memory-efficient kernel, else torch's choice on the CPU. As in
    :mod:`slipstream.shared.models.transformer`, heads are repeated for the memory-efficient kernel.
    """
    query, key, value = (x.to(autocast_type(x)) for x in (query, key, value))
    sizes = {x.shape[-1] for x in (query, key, value)}
    fused = query.ndim == 4 and len(sizes) == 1 and max(sizes) % ALIGNED == 0
    if fused and query.dtype in HALF and attn_mask is None and max(sizes) <= LARGEST_HEAD:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if not fused or query.dtype not in (*HALF, torch.float32):
        return CHOICE_OF_CPU(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    bias = None
    if attn_mask is not None:
        bias = attn_mask.to(query.dtype)
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(bias).masked_fill_(attn_mask.logical_not(), float("-inf"))
        bias = bias.expand(*query.shape[:3], key.shape[2])
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    return efficient(query, key, value, bias, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale)[0]
