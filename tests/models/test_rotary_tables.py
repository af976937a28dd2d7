"""Rotary tables are computed once, and never from a traced pass."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.operations.proofs.gpu.layouts import LENGTH, SIGNATURE, SIZES, token_rows
from slipstream.shared.models import transformer
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model

#: What only the tables need.
TABLES = {"arange", "cos", "sin"}


class Named(TorchDispatchMode):
    """The names of the operations in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    transformer.kept_tables.cache_clear()
    yield
    transformer.kept_tables.cache_clear()


@pytest.fixture
def model() -> Predictor:
    return build_model(ModelConfig("transformer", SIZES), SIGNATURE, 0)


@pytest.fixture
def tokens() -> Tensor:
    return token_rows(2)[:, :LENGTH]


def operations(model: Predictor, tokens: Tensor) -> list[str]:
    with Named() as named:
        model(tokens)
    return named.names


def calls(program: torch.export.ExportedProgram) -> list[Any]:
    return [node for node in program.graph.nodes if hasattr(node.target, "overloadpacket")]


def test_a_second_pass_makes_no_tables_and_gives_the_same_bits(model: Predictor, tokens: Tensor) -> None:
    first, second = operations(model, tokens), operations(model, tokens)
    assert set(first) >= TABLES and not TABLES & set(second)
    assert len(second) <= len(first) - 10
    kept = model(tokens)
    transformer.kept_tables.cache_clear()
    assert torch.equal(model(tokens), kept)


def test_each_type_is_given_its_own(model: Predictor, tokens: Tensor) -> None:
    in_float32 = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert set(operations(model, tokens)) >= TABLES and not TABLES & set(operations(model, tokens))
    assert torch.equal(model(tokens), in_float32)


def test_no_module_holds_them(model: Predictor, tokens: Tensor) -> None:
    names = set(model.state_dict())
    model(tokens)
    assert set(model.state_dict()) == names
    held = [value for module in model.network.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    assert not held and copy.deepcopy(model)(tokens).equal(model(tokens))


def test_after_a_pass_for_inference_alone_there_is_one_to_train_by(model: Predictor, tokens: Tensor) -> None:
    with torch.inference_mode():
        model(tokens)
    assert not TABLES & set(operations(model, tokens))
    model(tokens).sum().backward()


@pytest.mark.prove
@pytest.mark.parametrize("warm", [False, True])
def test_a_pass_that_is_only_traced_leaves_and_takes_nothing(model: Predictor, tokens: Tensor, warm: bool) -> None:
    expected = model(tokens)
    entries = int(warm)
    if not warm:
        transformer.kept_tables.cache_clear()
    fakes = FakeTensorMode()
    weights: dict[str, Tensor] = {name: fakes.from_tensor(weight) for name, weight in model.state_dict().items()}
    with fakes:
        torch.func.functional_call(model, weights, (fakes.from_tensor(tokens),))
    assert build_model(ModelConfig("transformer", SIZES), SIGNATURE, 0, empty=True).row_bytes == model.row_bytes
    program = torch.export.export(model, (tokens,))
    assert {node.target.overloadpacket.__name__ for node in calls(program)} >= TABLES
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens), expected)
    assert transformer.kept_tables.cache_info().currsize == entries
    assert torch.equal(model(tokens), expected)
