"""Compiled blocks: the order of their gradients, and every layout's agreement with one process."""

import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.operations.proofs.gpu.layouts import LENGTH, SIZES, LayoutCase, distance, model_of, token_rows
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.parallel.compiled import CompiledBlocks, compile_blocks, compiled_modules
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel, replicate_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.tables_and_images import MLP, ResNet
from tests.support.groups import on_cpu
from tests.support.layout_runs import divided, on_ranks

BLOCKS = [f"model.layers.{number}" for number in range(SIZES["num_hidden_layers"])]
LAYOUTS = {
    "replicas 2": LayoutCase(2, {}),
    "weights 2": LayoutCase(2, {"shard": "weights"}),
    "gradients 2": LayoutCase(2, {"shard": "gradients"}),
    "tensor 2, qwen3": LayoutCase(2, {"tensor": 2}, {"model_type": "qwen3"}),
    "weights 2 x tensor 2": LayoutCase(4, {"shard": "weights", "tensor": 2}),
    "1f1b 2, tied": LayoutCase(2, {"pipeline": 2}, {"tie_word_embeddings": True}),
}
TABLE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b"))
needs_compiler = pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")


def backward_pass(compiled: bool) -> tuple[list[str], dict[str, Tensor]]:
    """Where a backward pass under DDP is, in order: a block's name when the gradient of its output arrives, and its
    parameters' when one of theirs is handed over; and the gradients."""
    model = model_of(LayoutCase(1, {}, double=False), empty=False)
    tokens, seen = token_rows(4)[:, :LENGTH], list[str]()
    found = None
    if compiled:
        found = compile_blocks(ReplicatedModel(model), (tokens,), [slice(0, 4)], nullcontext)
    replicated = replicate_model(model, ModelTraits(), on_cpu(dist.get_rank(), 2), compiled=found)
    assert replicated.ddp
    for name in BLOCKS:
        block = model.network.get_submodule(name)

        def notice(_: nn.Module, __: object, output: Tensor, name: str = name) -> None:
            output.register_hook(lambda _: seen.append(name))

        block.register_forward_hook(notice)
        for parameter in block.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(f"{name}, weights"))
    replicated.accumulate((tokens,), [slice(0, 4)], lambda outputs, _: outputs.square().mean())
    return [key for key, _ in groupby(seen)], {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.prove
@needs_compiler
def test_gradients_of_compiled_blocks_come_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    """They come before the gradient reaches the previous block, so DDP overlaps sending them with its pass."""
    order, gradients = on_ranks(2, partial(backward_pass, compiled=True), tmp_path / "compiled")[0]
    assert order == [event for name in reversed(BLOCKS) for event in (name, f"{name}, weights")]
    _, plain = on_ranks(2, partial(backward_pass, compiled=False), tmp_path / "plain")[0]
    assert gradients.keys() == plain.keys()
    assert all((gradients[name] - plain[name]).abs().max() <= 1e-6 * plain[name].abs().max() for name in plain)


def check(case: LayoutCase, place: Path) -> None:
    for outcome in divided(replace(case, compile=True, steps=6), place):
        assert distance(outcome, replace(case, steps=6)) < 1e-12


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_compiled_layout_agrees_with_one_process(name: str, tmp_path: Path) -> None:
    check(LAYOUTS[name], tmp_path)


@pytest.mark.prove
@needs_compiler
@pytest.mark.parametrize("name", ["weights 2", "tensor 2, qwen3"])
def test_a_compiled_layout_resumes_bit_for_bit(name: str, tmp_path: Path) -> None:
    case = replace(LAYOUTS[name], compile=True, steps=6, home=str(tmp_path / "home"), save_at=3)
    whole = divided(case, tmp_path / "whole")[0]
    resumed = divided(replace(case, save_at=0, resume=True), tmp_path / "resumed")[0]
    assert resumed.losses == whole.losses[3:]
    assert all(torch.equal(tensor, resumed.weights[key]) for key, tensor in whole.weights.items())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(5, 5), nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.layer(x))


class Checkpointed(nn.Module):
    """Its blocks are computed again in the backward pass, which saves the memory of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x[:, :2]


def test_a_block_that_is_computed_again_in_the_backward_pass_is_compiled_there_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager, it would draw another dropout mask than the compiled one had."""
    passes: list[Callable[..., Tensor]] = []

    def noted(forward: Callable[..., Tensor], dynamic: bool) -> Callable[..., Tensor]:
        def called(x: Tensor) -> Tensor:
            passes.append(forward)
            return forward(x)

        return called

    monkeypatch.setattr(torch, "compile", noted)
    alone = ReplicatedModel(Predictor(TABLE, Checkpointed()))
    alone.compiled = CompiledBlocks(alone.model_parts)
    alone.accumulate((torch.ones(4, 5),), [slice(0, 2), slice(2, 4)], lambda outputs, _: outputs.sum())
    # Of two micro-batches, forwards and once more.
    assert len(passes) == 2 * 2 * 3


def test_a_forward_that_somebody_put_there_stays() -> None:
    model = Predictor(TABLE, Checkpointed())
    block = model.network.get_submodule("blocks.1")
    block.forward = own = partial(type(block).forward, block)
    for _ in range(2):
        with CompiledBlocks([model])():
            assert block.forward is not own
        assert block.forward is own and "forward" not in vars(model.network.get_submodule("blocks.0"))


@pytest.mark.parametrize("message", ["CUDA error: uncorrectable ECC error encountered", "CUDA out of memory. Tried"])
def test_what_is_not_the_compilers_stays_what_it_is(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    with pytest.raises(RuntimeError, match=message):
        compile_blocks(
            ReplicatedModel(Predictor(TABLE, Checkpointed())), (torch.ones(2, 5),), [slice(0, 2)], nullcontext
        )


def test_what_is_compiled() -> None:
    """Blocks, but not the single layers of a perceptron, in which there is nothing to fuse."""
    picture = Signature((TensorSpec("image", "uint8", (3, 8, 8)),), "classification", "y", ("a", "b"))
    residual, perceptron = Predictor(picture, ResNet(picture)), Predictor(TABLE, MLP(TABLE))
    transformer = model_of(LayoutCase(1, {}), empty=True)
    assert compiled_modules(residual) == list(residual.network.get_submodule("blocks").children())
    assert compiled_modules(perceptron) == [perceptron]
    assert compiled_modules(transformer) == [transformer.network.get_submodule(name) for name in BLOCKS]
