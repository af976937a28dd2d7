"""Unusable and incomplete bases end in one line that names the file."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.prepared.token_rows import INDEX, WHOLE
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import BaseDirectory, read_pieces
from slipstream.shared.models.base.tensors import OpenedBase
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from tests.support.bases import LENGTH, SIGNATURE, VOCABULARY, make_base, some_tokens, theirs
from tests.support.wording import refuses, same_wording

PROJECTION = "model.layers.0.self_attn.q_proj.weight"
FIRST, PART = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"


def refusal(base: Path, **arguments: Any) -> str:
    """The line with which a build is refused, before the model takes memory."""
    with pytest.raises(UserError) as error:
        build_model(ModelConfig(base=str(base), arguments=arguments), SIGNATURE, seed=0, empty=False)
    assert "\n" not in error.value.message and error.value.message.startswith("model.")
    return error.value.message


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return make_base(tmp_path / "base")


@pytest.fixture
def in_parts(tmp_path: Path) -> Path:
    base = make_base(tmp_path / "base", max_shard_size="35KB")
    assert (base / PART).exists()
    return base


def rewritten_header(change: Callable[[dict[str, Any]], str | None]) -> Callable[[bytes], bytes]:
    """Changes the header of a file, and its stated length."""

    def rewrite(content: bytes) -> bytes:
        length = struct.unpack("<Q", content[:8])[0]
        header = json.loads(content[8 : 8 + length])
        text = change(header)
        text = json.dumps(header) if text is None else text
        return struct.pack("<Q", len(text)) + text.encode() + content[8 + length :]

    return rewrite


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    return rewritten_header(lambda header: header["model.norm.weight"].update(changes))


def moved_end(content: dict[str, Any]) -> None:
    last = max(content, key=lambda name: content[name]["data_offsets"][1] if name != "__metadata__" else 0)
    begin, end = content[last]["data_offsets"]
    content[last] |= {"data_offsets": [begin, end + 4], "shape": [(end + 4 - begin) // 4]}


def overlapping(content: dict[str, Any]) -> None:
    content["model.embed_tokens.weight"] = dict(content["lm_head.weight"])


def with_hole(content: dict[str, Any]) -> None:
    """Of the size of the first tensor, which is left out."""
    first = min(content, key=lambda name: content[name]["data_offsets"] if name != "__metadata__" else [1])
    del content[first]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content[:5],
        lambda content: content[:1000],
        lambda content: content[: int.from_bytes(content[:8], "little") + 4],
        lambda content: content + b"\0",
        lambda content: b"\xff" * 8 + content[8:],
        lambda content: content[:8] + b"[" + content[9:],
        lambda content: content[:8] + b"\xff" + content[9:],
        rewritten_header(lambda header: "[]"),
        rewritten_header(lambda header: "[" * 100_000),
        rewritten_header(lambda header: '{"a": {}, "a": {}}'),
        rewritten_header(moved_end),
        entry(dtype="F99"),
        entry(dtype="BF16"),
        entry(shape=[-32, -1]),
        entry(shape=[True] * 32),
        entry(data_offsets=[128, 0]),
        rewritten_header(overlapping),
        rewritten_header(with_hole),
        entry(data_offsets=[0, 1, 2]),
        entry(more=1),
        rewritten_header(lambda header: header.update(x=3)),
    ],
)
def test_a_cut_or_damaged_file(damage: Callable[[bytes], bytes], whole: Path) -> None:
    file = whole / WHOLE
    file.write_bytes(damage(file.read_bytes()))
    message = refusal(whole)
    assert message.startswith("model.base:")
    same_wording(message)


def test_a_header_that_is_too_long_is_not_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = whole / WHOLE
    with file.open("r+b") as stream:
        stream.truncate(150_000_000)
        stream.write((120_000_000).to_bytes(8, "little"))
    lengths: list[int] = []

    def noted(info: Any, start: int, width: int, stride: int, count: int) -> Any:
        lengths.append(width)
        return read_pieces(info, start, width, stride, count)

    monkeypatch.setattr("slipstream.shared.models.base.tensors.read_pieces", noted)
    same_wording(refusal(whole))
    assert lengths == [8]


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(base: Path) -> None:
        tensors = load_file(base / WHOLE)
        change(tensors)
        save_file(tensors, base / WHOLE, {"format": "pt"})

    return rewrite


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.pop(PROJECTION),
        lambda t: t.pop("lm_head.weight"),
        lambda t: t.update({PROJECTION: t[PROJECTION][:16].clone()}),
        lambda t: t.update({PROJECTION: t[PROJECTION].double()}),
        lambda t: t.update({PROJECTION: t[PROJECTION].to(torch.int8)}),
        lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
        lambda t: t.update({"more": torch.zeros(2)}),
    ],
)
def test_other_tensors_than_the_model_has(change: Any, whole: Path) -> None:
    changed_tensors(change)(whole)
    message = refusal(whole)
    assert message.startswith(f"model.base: {whole}: ")
    same_wording(message)


@pytest.mark.parametrize("row", [0, VOCABULARY - 1, slice(60, 90), slice(None)])
def test_an_output_layer_that_is_not_tied_after_all(row: Any, tmp_path: Path) -> None:
    """transformers does not tie them either."""
    base = make_base(tmp_path / "base", tie_word_embeddings=True)

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row] += 1
        tensors["lm_head.weight"] = head

    changed_tensors(untie)(base)
    same_wording(refusal(base))
    settings = {"tie_word_embeddings": False}
    model = build_model(ModelConfig(base=str(base), arguments=settings), SIGNATURE, seed=0).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(base, some_tokens()), rtol=0, atol=1e-5)


def test_arguments_that_make_another_model(whole: Path) -> None:
    assert "gate_proj.weight is [48, 32]; expected [64, 32]" in refusal(whole, intermediate_size=64)
    line = refusal(whole, num_hidden_layers=3)
    same_wording(line)
    same_wording(refusal(whole, num_hidden_layers=1))
    same_wording(refusal(whole, config="config.json"))


def test_parts_that_do_not_agree(in_parts: Path) -> None:
    index, part = in_parts / INDEX, in_parts / PART
    stated = json.loads(index.read_text())
    name = next(name for name, part in stated["weight_map"].items() if part == PART)
    content = part.read_bytes()

    def written(weight_map: object) -> None:
        index.write_text(json.dumps({**stated, "weight_map": weight_map}))

    part.unlink()
    same_wording(refusal(in_parts))
    part.write_bytes(content[:-3])
    same_wording(refusal(in_parts))
    part.write_bytes(content)
    written({**stated["weight_map"], name: FIRST})
    same_wording(refusal(in_parts))
    written({key: value for key, value in stated["weight_map"].items() if key != name})
    same_wording(refusal(in_parts))
    written({**stated["weight_map"], "more": PART})
    same_wording(refusal(in_parts))
    written({**stated["weight_map"], "": PART})
    assert "lacks the tensor" in refusal(in_parts)
    for other in ("../../outside.safetensors", ""):
        written({**stated["weight_map"], name: other})
        assert "is missing" in refusal(in_parts)
    for wrong in ({}, None, {name: 3}):
        written(wrong)
        assert f"{index}: expected weight_map" in refusal(in_parts)
    index.write_text("{")
    same_wording(refusal(in_parts))


def test_a_directory_that_holds_none(whole: Path, tmp_path: Path) -> None:
    same_wording(refusal(tmp_path / "none"))
    same_wording(refusal(whole / WHOLE))
    same_wording(refusal(Path("meta-llama/Llama-3.1-8B")))
    (whole / WHOLE).rename(whole / "consolidated.safetensors")
    same_wording(refusal(whole))
    (whole / "pytorch_model.bin").write_bytes(b"\x80\x04K\x07.")
    same_wording(refusal(whole))
    for content in ("", "{", "[]", "\xff"):
        (whole / "config.json").write_bytes(content.encode("latin-1"))
        same_wording(refusal(whole))
    (whole / "config.json").unlink()
    same_wording(refusal(whole))


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"model_type": None},
        {"max_position_embeddings": LENGTH - 1},
        {"hidden_size": None},
        {"sliding_window": "wide"},
        {"rope_parameters": 3},
        {"vocab_size": 300},
        {"num_hidden_layers": 2000},
        {"hidden_size": "32"},
    ],
)
def test_another_config(change: dict[str, Any], whole: Path) -> None:
    file = whole / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    same_wording(refusal(whole))


def test_data_that_is_no_tokens(whole: Path) -> None:
    table = Signature((TensorSpec("numeric", "float32", (3,)),), "classification", "y", ("a", "b"))
    with refuses(UserError, match="model.base:"):
        build_model(ModelConfig(base=str(whole)), table, seed=0)


def test_a_file_that_changes_while_it_is_read(whole: Path) -> None:
    base = OpenedBase.open(BaseDirectory.list(str(whole)))
    content = (whole / WHOLE).read_bytes()
    (whole / WHOLE).write_bytes(content + b"\0")
    part = torch.empty(32, 32)
    with refuses(UserError, match=r"model\.safetensors:"):
        base.fill(part, PROJECTION, (0, 0))
    (whole / WHOLE).unlink()
    with refuses(UserError, match=r"model\.safetensors:"):
        base.fill(part, PROJECTION, (0, 0))
