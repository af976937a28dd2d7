"""Kernels and bytes of a transformer's block in the code that torch.compile makes for a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch._inductor.config
from torch._inductor.graph import GraphLowering
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._subclasses.fake_tensor import FakeTensorMode

from harness.dispatch import Counted
from slipstream.pipeline.train.memory.tracker import cuda_operators
from slipstream.shared.models.transformer import DecoderBlock, kept_tables
from slipstream.shared.models.transformer_config import TransformerConfig

#: Tokens of a small block.
SMALL = 64


class CompiledBlock(NamedTuple):
    """Fused kernels of forward and backward pass, without matmuls and attention, and the bytes that they move."""

    kernels: int
    moved: int


def compiled_block(arguments: Mapping[str, object], rows: int, length: int) -> CompiledBlock:
    """Compile a block in bf16, by autocast as in training, and run it."""
    config = TransformerConfig.from_dict({"vocab_size": 2, "max_position_embeddings": length, **arguments})
    block = DecoderBlock(config)
    kernels = moved = 0
    plain = GraphLowering.compile_to_module

    def counting(graph: GraphLowering) -> Any:
        nonlocal kernels, moved
        made = plain(graph)
        for node in graph.scheduler.nodes:
            if not isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)):
                kernels += 1
                moved += node.get_read_write_buffers_sizes()
        return made

    torch._dynamo.reset()
    x = torch.randn(rows, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    tables = kept_tables(config, length, x.device, x.dtype)
    forward = torch.compile(block.forward, dynamic=False)
    # Code from a cache would not be counted.
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with mock.patch.object(GraphLowering, "compile_to_module", counting), fresh:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = forward(x, *tables)
        outputs.sum().backward()
    return CompiledBlock(kernels, moved)


def block_of_rows(arguments: Mapping[str, object], tokens: int) -> CompiledBlock:
    """Return the block for ``tokens``, from two small ones: bytes grow in proportion to tokens, kernels do not."""
    one, two = (compiled_block(arguments, rows, SMALL) for rows in (1, 2))
    assert one.kernels == two.kernels, "kernels depend on the number of rows"
    slope = (two.moved - one.moved) / SMALL
    return CompiledBlock(one.kernels, int(one.moved + slope * (tokens - SMALL)))


def plain_block(arguments: Mapping[str, object], rows: int, length: int) -> int:
    """Return the bytes that a block moves without compilation in a GPU's operators, without matmuls and attention."""
    config = TransformerConfig.from_dict({"vocab_size": 2, "max_position_embeddings": length, **arguments})
    with torch.device("meta"):
        block = DecoderBlock(config)
    with FakeTensorMode(allow_non_fake_inputs=True), cuda_operators():
        block = block.to_empty(device="cpu")
        x = torch.empty(rows, length, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
        tables = [torch.empty(length, 1, config.head_size, dtype=torch.bfloat16) for _ in range(2)]
        with Counted() as counts:
            with torch.autocast("cpu", torch.bfloat16):
                outputs = block(x, *tables)
            torch.autograd.grad(outputs, [x, *block.parameters()], torch.empty_like(outputs))
    return counts.moved_by["cast"] + counts.moved_by["other"]
