"""Weights in several files that transformers loads, written without a copy of the model."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from torch import Tensor

from slipstream.shared.artifacts.prepared.token_rows import INDEX, WHOLE
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.hugging_face.files import divide_into_shards, hugging_face_files, weight_files
from slipstream.shared.models.trained import TensorType
from slipstream.shared.models.transformer import Transformer
from tests.support.tokens import LENGTH, SIZES, VOCABULARY, token_data
from tests.support.wording import refuses

#: Less than the embedding takes, and more than any other tensor.
MOST = 4 * (VOCABULARY * 32 - 1)


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    signature = token_data(tmp_path_factory.mktemp("data") / "data").signature
    found = build_model(ModelConfig("transformer", {**SIZES, "tie_word_embeddings": False}), signature, seed=1).network
    assert isinstance(found, Transformer)
    return found


def write(network: Transformer, directory: Path, most: int) -> list[str]:
    names = []
    for name, content in hugging_face_files(network, most):
        (directory / name).write_bytes(b"".join(content))
        names.append(name)
    return names


def test_transformers_loads_the_parts(network: Transformer, tmp_path: Path) -> None:
    names = write(network, tmp_path, MOST)
    index = json.loads((tmp_path / INDEX).read_text())
    parts = sorted(set(index["weight_map"].values()))
    assert len(parts) > 2 and names == ["config.json", *parts, INDEX]
    assert parts[0] == f"model-00001-of-{len(parts):05d}.safetensors"
    weights = network.state_dict()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())
    assert list(index["weight_map"]) == list(weights)
    for part in parts:
        with safe_open(tmp_path / part, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert set(file.keys()) == {name for name, at in index["weight_map"].items() if at == part}
            assert all(torch.equal(file.get_tensor(name), weights[name]) for name in file.keys())  # noqa: SIM118
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    theirs, told = loaded
    assert not any(told.values()), told
    rows = torch.randint(0, VOCABULARY, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(rows).logits, network.eval()(rows), rtol=0, atol=1e-5)


@pytest.mark.parametrize("stops", [(), (7,), (9, 7)])
def test_what_is_generated_ends_where_it_learned_to(
    stops: tuple[int, ...], network: Transformer, tmp_path: Path
) -> None:
    for name, content in hugging_face_files(network, stops=stops):
        (tmp_path / name).write_bytes(b"".join(content))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    expected = {0: None, 1: 7, 2: [9, 7]}[len(stops)]
    assert loaded.generation_config.eos_token_id == expected and loaded.config.eos_token_id == expected


def test_what_fits_is_one_file(network: Transformer, tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in network.state_dict().values())
    assert write(network, tmp_path, size) == ["config.json", WHOLE]
    with safe_open(tmp_path / WHOLE, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert len(write(network, tmp_path, size - 1)) == 1 + 2 + 1


def test_parts_are_as_large_as_allowed_and_no_larger() -> None:
    sizes = {"a": 4, "b": 5, "c": 1, "d": 20, "e": 9, "f": 1, "g": 2}
    kinds = {name: TensorType(torch.float32, (size,)) for name, size in sizes.items()}
    assert ["".join(part) for part in divide_into_shards(kinds, 40)] == ["abc", "d", "ef", "g"]
    assert ["".join(part) for part in divide_into_shards(kinds, 39)] == ["ab", "c", "d", "e", "fg"]


def test_no_tensor_is_copied_or_kept(network: Transformer) -> None:
    """The pieces are the parameters' own memory; and of tensors that are made one by one a single one is there."""
    weights = network.state_dict()
    places = {tensor.data_ptr() for tensor in weights.values()}
    pieces = [
        piece for _, content in hugging_face_files(network, MOST) for piece in content if isinstance(piece, memoryview)
    ]
    assert {torch.frombuffer(piece, dtype=torch.uint8).data_ptr() for piece in pieces} == places

    alive = list[int]()

    class Counted:
        def __init__(self) -> None:
            alive.append(0)

        def __del__(self) -> None:
            alive.pop()

    def made() -> Iterator[tuple[str, Tensor]]:
        for name in kinds:
            tensor = torch.ones(1000)
            tensor.held = Counted()  # type: ignore[attr-defined]
            assert len(alive) <= 2, "the current tensor, and the next"
            yield name, tensor

    kinds = {name: TensorType(torch.float32, (1000,)) for name in "abcdef"}
    assert sum(len(piece) for _, content in weight_files(kinds, made(), 8000) for piece in content) > 24_000


def test_a_tensor_in_anothers_place_is_not_written() -> None:
    kinds = {name: TensorType(torch.float32, (2,)) for name in "ab"}
    for given in (
        [("a", torch.ones(2)), ("c", torch.ones(2))],
        [("a", torch.ones(2)), ("b", torch.ones(3))],
        [("a", torch.ones(2))],
    ):
        with refuses(ValueError):
            [b"".join(content) for _, content in weight_files(kinds, given)]
