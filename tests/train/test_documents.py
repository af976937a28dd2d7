"""Documents that share a row are separated by their bounds, as by a mask."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.operations.proofs.gpu.layouts import LENGTH, SIGNATURE, LayoutCase, set_up, token_rows
from slipstream.pipeline.train.checkpoint.staging import local_tensor
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import evaluation_batches, stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.pipeline.train.documents import (
    MOST_DOCUMENTS,
    DocumentLayout,
    document_layout,
    kernel_takes_documents,
)
from slipstream.pipeline.train.memory.trace import TracedStep, exchanging_nothing
from slipstream.pipeline.train.parallel.compiled import recompute_blocks
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.divide import model_parts
from slipstream.pipeline.train.parallel.layout import Layout
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from slipstream.shared.models.plan import block_names
from slipstream.shared.models.token_rows import attention_mask
from tests.support.documents_on_cpu import documents_on_cpu
from tests.support.groups import ALONE
from tests.support.layout_runs import on_ranks
from tests.support.training import log, rank_body, trained

START, VOCABULARY = 3, 12
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DRAW = np.random.default_rng(5)


def documents_signature(length: int, vocabulary: int = VOCABULARY) -> Signature:
    tokens = (TensorSpec("tokens", "int64", (length,)),)
    return Signature(tokens, "next token", "next token", buckets=vocabulary, document_end=START)


def blocks_of(bounds: Tensor, size: int) -> Tensor:
    """The mask ``[size, size]`` in which every position sees the earlier ones between its bounds."""
    mask = torch.zeros(size, size, dtype=torch.bool)
    for begin, end in pairwise(bounds.tolist()):
        mask[begin:end, begin:end] = True
    return mask.tril()


@pytest.mark.parametrize(("rows", "pieces", "length"), [(1, 1, 9), (2, 3, 16), (3, 2, 30), (5, 1, 64)])
def test_bounds_are_the_blocks_of_the_mask(rows: int, pieces: int, length: int) -> None:
    layout = DocumentLayout(START, length, rows, pieces)
    for most in (START + 1, VOCABULARY, 200):  # from many documents in a row to hardly any
        ids = DRAW.integers(0, most, (rows * pieces, length))
        bounds = layout.bounds(ids.copy())
        assert bounds is not None and bounds.dtype == np.int32 and bounds.shape[0] == pieces
        documents = bounds.shape[1] - 1
        assert documents >= 2 * rows and documents & (documents - 1) == 0 and bounds.shape[1] <= layout.widest
        for piece, found in enumerate(torch.from_numpy(bounds)):
            masks = attention_mask(torch.from_numpy(ids[piece * rows : (piece + 1) * rows]), START)
            assert torch.equal(blocks_of(found, rows * length), torch.block_diag(*masks[:, 0]).bool())


def test_padding_is_no_longer_than_needed_and_too_many_documents_have_no_bounds() -> None:
    layout = DocumentLayout(START, 2 * MOST_DOCUMENTS, rows=2, pieces=1)
    ids = np.zeros((2, layout.length), int)
    for count, padded in ((1, 4), (3, 4), (4, 8), (MOST_DOCUMENTS, 128)):
        ids[0, : 2 * count : 2] = START
        bounds = layout.bounds(ids)
        assert bounds is not None and bounds.shape == (1, padded + 1)
    ids[0, : 2 * MOST_DOCUMENTS + 2 : 2], ids[0, 1] = START, START
    assert layout.bounds(ids) is None
    assert layout.whole_rows().tolist() == [[0, 128, 256, 256, 256]]


def test_only_flash_attention_takes_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    for major, expected in ((7, False), (8, True), (9, True)):
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, major=major: Mock(major=major))
        assert kernel_takes_documents(gpu, "bf16") is kernel_takes_documents(gpu, "fp16") is expected
        assert not kernel_takes_documents(gpu, "fp32") and not kernel_takes_documents(cpu, "bf16")


def test_models_without_such_attention_have_a_mask() -> None:
    def layout(signature: Signature, **sizes: int) -> DocumentLayout | None:
        model = build_model(ModelConfig("transformer", {**SIZES, **sizes}), signature, 0, shapes_alone=True)
        return document_layout(model, 2, 3, kernel=True)

    assert layout(documents_signature(16)) == DocumentLayout(START, 16, 2, 3)
    assert layout(SIGNATURE) is None, "attention crosses documents"
    assert layout(documents_signature(16), head_dim=12) is None, "flash attention takes multiples of 8"


def test_the_loader_finds_the_documents_of_its_batches(tmp_path: Path) -> None:
    rows = DRAW.integers(0, VOCABULARY, (50, LENGTH + 1))
    data = write_token_rows(tmp_path, {"train": rows, "validation": rows[:7]}, VOCABULARY)
    layout = DocumentLayout(START, LENGTH, rows=4, pieces=2)
    order = GlobalOrder(stored_blocks(data, "train"), 8, seed=0)
    batches = training_batches(data, order, ALONE, stop=50, padded=8, documents=layout)
    evaluated = evaluation_batches(data, "validation", 4, ALONE, padded=8, rounds=3, documents=layout)
    counts = []
    for batch in (*batches, *evaluated):
        assert batch.documents is not None and len(batch.inputs[0]) == 8
        expected = layout.bounds(batch.inputs[0].numpy()) if batch.rows else layout.whole_rows()
        np.testing.assert_array_equal(batch.documents, expected)
        counts.append(batch.rows)
    assert counts[-4:] == [2, 4, 3, 0], "a short training batch, and an empty one in evaluation"
    assert next(iter(training_batches(data, order, ALONE))).documents is None


def gradients(model: Predictor, ids: Tensor, documents: Tensor | None) -> tuple[Tensor, list[Tensor]]:
    more = {} if documents is None else {"documents": documents}
    outputs = model(ids, **more)
    model.zero_grad()
    (outputs * torch.linspace(0, 1, outputs.numel(), dtype=outputs.dtype).view_as(outputs)).sum().backward()
    return outputs.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(("shared", "recompute"), [(1, False), (2, False), (4, True)])
def test_attention_by_documents_equals_attention_with_a_mask(shared: int, recompute: bool) -> None:
    rows, length = 3, 24
    sizes = {**SIZES, "num_key_value_heads": 4 // shared}
    model = build_model(ModelConfig("transformer", sizes), documents_signature(length), 1).double()
    if recompute:
        recompute_blocks(model.network)
    ids = torch.from_numpy(DRAW.integers(0, VOCABULARY, (rows, length)))
    bounds = DocumentLayout(START, length, rows, 1).bounds(ids.numpy())
    assert bounds is not None
    masked = gradients(model, ids, None)
    calls = documents_on_cpu()
    outputs, found = gradients(model, ids, torch.from_numpy(bounds))
    assert len(calls) == 2 * (1 + recompute) and all(torch.equal(call, torch.from_numpy(bounds[0])) for call in calls)
    torch.testing.assert_close(outputs, masked[0], rtol=0, atol=1e-12)
    for one, other in zip(found, masked[1], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


LAYOUTS: tuple[dict[str, Any], ...] = ({"pipeline": 2}, {"tensor": 2}, {"shard": "weights"})


def differences(parallel: dict[str, Any]) -> float:
    """The largest difference of a gradient, with bounds from one with a mask, under this layout."""
    case = LayoutCase(2, parallel, document_end=10)
    layout, model, rows, *_ = set_up(case)
    ids = token_rows(2 * case.accumulation * rows)[layout.data_rank :: 2][:, :LENGTH].contiguous()[: 3 * rows]
    pieces = [slice(start, start + rows) for start in range(0, len(ids), rows)]
    bounds = DocumentLayout(10, LENGTH, rows, len(pieces)).bounds(ids.numpy())
    assert bounds is not None and len({tuple(piece) for piece in bounds}) > 1
    found = []
    for documents in (None, torch.from_numpy(bounds)):
        calls = documents_on_cpu()
        model.accumulate((ids,), pieces, lambda outputs, _: outputs.square().mean(), documents=documents)
        outputs = model.forward(*(x[: model.batch_rows or rows] for x in (ids,)), documents=documents)
        assert bool(calls) is (documents is not None)
        mine = dict(model.model.named_parameters())
        found.append([local_tensor(p.grad).clone() for p in mine.values() if p.grad is not None])
        found[-1] += [] if outputs is None else [outputs]
        for parameter in mine.values():
            parameter.grad = None
    return max(float((one - other).abs().max()) for one, other in zip(*found, strict=True))


def each_difference() -> list[float]:
    return [differences(parallel) for parallel in LAYOUTS]


@pytest.mark.prove
def test_bounds_go_through_pipelines_and_divided_models(tmp_path: Path) -> None:
    for of_rank in on_ranks(2, each_difference, tmp_path):
        assert max(of_rank) < 1e-12


def body_as_on_a_gpu(*arguments: Any) -> None:
    from slipstream.pipeline.train import setup
    from slipstream.pipeline.train.loop import evaluation, train_loop

    for module in (setup, train_loop, evaluation):
        vars(module)["kernel_takes_documents"] = lambda *_: True
    calls = documents_on_cpu()
    rank_body(*arguments)
    print("calls:", *sorted({len(call) - 1 for call in calls}))


def test_a_training_and_its_evaluations_run_by_bounds(tmp_path: Path) -> None:
    rows = DRAW.integers(0, VOCABULARY, (40, LENGTH + 1))
    splits = {"train": rows, "validation": rows[:5]}
    data = write_token_rows(tmp_path / "data", splits, VOCABULARY, document_end=START).artifact.directory
    training = TrainingConfig(epochs=2, batch_size=8, accumulation=2, precision="fp32", checkpoint_every=3)
    model = ModelConfig("transformer", SIZES)
    masked = trained(data, tmp_path / "mask", 1, training, model)
    found = trained(data, tmp_path / "bounds", 1, training, model, body=body_as_on_a_gpu)
    # a training's micro-batches of 4 rows have 8 or 16 documents, the evaluation's of 5 rows 16
    assert "calls: 8 16" in log(tmp_path / "bounds")
    one, other = (json.loads((place / "history.json").read_text()) for place in (masked, found))
    for points in ("steps", "evaluations"):
        losses = [[point["loss"] for point in history[points]] for history in (one, other)]
        assert losses[0] and losses[0] == pytest.approx(losses[1], abs=1e-5)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_of_a_divided_model_compiles_its_heads(world: int) -> None:
    signature, rows = documents_signature(32), 2
    parallel = ParallelConfig(tensor=world)
    training = TrainingConfig(precision="bf16", parallel=parallel)
    config = ModelConfig("transformer", {**SIZES, "num_key_value_heads": 4, "num_hidden_layers": 1})
    model = build_model(config, signature, 0, shapes_alone=True)
    seen: list[tuple[int, ...]] = []

    def noted(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        for node in graph.graph.nodes:
            if "varlen_attn" in str(node.target):
                seen.append(tuple(node.meta["example_value"][0].shape))
        return graph.forward

    with exchanging_nothing(TracedStep(config, signature, training, 1, rows, world)):
        layout = Layout.connect(parallel, 0, world, torch.device("cpu"))
        (part,) = model_parts(model, layout, "fp32") if world > 1 else [model]
        part = part.to(torch.bfloat16)
        block = part.network.get_submodule(block_names(part.network)[0])
        torch._dynamo.reset()
        vars(block)["forward"] = torch.compile(block.forward, backend=noted, fullgraph=True, dynamic=False)
        bounds = torch.empty(1, 9, dtype=torch.int32, device="meta")
        ids = torch.zeros(rows, 32, dtype=torch.int64, device="meta")
        outputs = part(ids, documents=bounds)
        outputs.sum().backward()
    assert outputs.shape == (rows, 32, VOCABULARY) and seen == [(rows * 32, 4 // world, 8)]
    assert all(parameter.grad is not None for parameter in block.parameters())
