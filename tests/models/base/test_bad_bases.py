"""Unusable and incomplete bases end in one line that names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.artifacts.hugging_face import INDEX, WHOLE
from slipstream.artifacts.prepared.data import Signature, TensorSpec
from slipstream.errors import UserError
from slipstream.models.base.directory import read_pieces
from slipstream.models.base.tensors import Base
from slipstream.models.config import ModelConfig
from slipstream.models.factory import build
from tests.support.bases import LENGTH, SIGNATURE, VOCABULARY, make_base, some_tokens, theirs

PROJECTION = "model.layers.0.self_attn.q_proj.weight"
FIRST, PART = "model-00001-of-00004.safetensors", "model-00002-of-00004.safetensors"


def refusal(base: Path, **arguments: Any) -> str:
    """The line with which a build is refused, before the model takes memory."""
    with pytest.raises(UserError) as error:
        build(ModelConfig(base=str(base), arguments=arguments), SIGNATURE, seed=0, empty=False)
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
    ("damage", "why"),
    [
        (lambda content: content[:-1], "ends 1 bytes after the file"),
        (lambda content: content[:5], "has 5 bytes"),
        (lambda content: content[:1000], "states a header of"),
        (lambda content: content[: int.from_bytes(content[:8], "little") + 4], "states a header of"),
        (lambda content: content + b"\0", "1 bytes belong to no tensor"),
        (lambda content: b"\xff" * 8 + content[8:], "states a header of 18446744073709551615 bytes"),
        (lambda content: content[:8] + b"[" + content[9:], "its header cannot be read"),
        (lambda content: content[:8] + b"\xff" + content[9:], "its header cannot be read"),
        (rewritten_header(lambda header: "[]"), "its header is not a JSON object"),
        (rewritten_header(lambda header: "[" * 100_000), "its header cannot be read"),
        (rewritten_header(lambda header: '{"a": {}, "a": {}}'), "a name is given twice"),
        (rewritten_header(moved_end), "ends 4 bytes after the file"),
        (entry(dtype="F99"), "model.norm.weight is of an unknown type, 'F99'"),
        (entry(dtype="BF16"), "model.norm.weight has 128 bytes, but BF16 [32] takes another number"),
        (entry(shape=[-32, -1]), "shape or data_offsets of model.norm.weight are not sizes"),
        (entry(shape=[True] * 32), "shape or data_offsets of model.norm.weight are not sizes"),
        (entry(data_offsets=[128, 0]), "model.norm.weight has -128 bytes"),
        (rewritten_header(overlapping), "starts at byte 0, and the tensor before it ends at 34816"),
        (
            rewritten_header(with_hole),
            "embed_tokens.weight starts at byte 34816, and the tensor before it ends at 0",
        ),
        (entry(data_offsets=[0, 1, 2]), "shape or data_offsets of model.norm.weight are not sizes"),
        (entry(more=1), "model.norm.weight states no dtype, shape and data_offsets"),
        (rewritten_header(lambda header: header.update(x=3)), "x states no dtype, shape and data_offsets"),
    ],
)
def test_a_cut_or_damaged_file(damage: Callable[[bytes], bytes], why: str, whole: Path) -> None:
    file = whole / WHOLE
    file.write_bytes(damage(file.read_bytes()))
    message = refusal(whole)
    assert message.startswith(f"model.base: {file}: is cut or damaged: ") and why in message
    assert message.endswith("expected a whole safetensors file; download it again")


def test_a_header_that_is_too_long_is_not_read(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = whole / WHOLE
    with file.open("r+b") as stream:
        stream.truncate(150_000_000)
        stream.write((120_000_000).to_bytes(8, "little"))
    lengths: list[int] = []

    def noted(info: Any, start: int, width: int, stride: int, count: int) -> Any:
        lengths.append(width)
        return read_pieces(info, start, width, stride, count)

    monkeypatch.setattr("slipstream.models.base.headers.read_pieces", noted)
    assert "states a header of 120000000 bytes and has 150000000" in refusal(whole)
    assert lengths == [8]


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def rewrite(base: Path) -> None:
        tensors = load_file(base / WHOLE)
        change(tensors)
        save_file(tensors, base / WHOLE, {"format": "pt"})

    return rewrite


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.pop(PROJECTION), f"lacks the tensor {PROJECTION}"),
        (lambda t: t.pop("lm_head.weight"), "lacks the tensor lm_head.weight"),
        (lambda t: t.update({PROJECTION: t[PROJECTION][:16].clone()}), f"{PROJECTION} is [16, 32]; expected [32, 32]"),
        (lambda t: t.update({PROJECTION: t[PROJECTION].double()}), f"{PROJECTION} is F64; expected one of F32, F16"),
        (lambda t: t.update({PROJECTION: t[PROJECTION].to(torch.int8)}), f"{PROJECTION} is I8; expected one of F32"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}),
            "holds the tensor model.",
        ),
        (lambda t: t.update({"more": torch.zeros(2)}), "holds the tensor more, which no model of its config.json"),
    ],
)
def test_other_tensors_than_the_model_has(change: Any, why: str, whole: Path) -> None:
    changed_tensors(change)(whole)
    message = refusal(whole)
    assert message.startswith(f"model.base: {whole}: ") and why in message


@pytest.mark.parametrize("row", [0, VOCABULARY - 1, slice(60, 90), slice(None)])
def test_an_output_layer_that_is_not_tied_after_all(row: Any, tmp_path: Path) -> None:
    """transformers does not tie them either."""
    base = make_base(tmp_path / "base", tie_word_embeddings=True)

    def untie(tensors: dict[str, torch.Tensor]) -> None:
        head = tensors["model.embed_tokens.weight"].clone()
        head[row] += 1
        tensors["lm_head.weight"] = head

    changed_tensors(untie)(base)
    assert "lm_head.weight is another tensor than model.embed_tokens.weight, which it is tied to" in refusal(base)
    settings = {"tie_word_embeddings": False}
    model = build(ModelConfig(base=str(base), arguments=settings), SIGNATURE, seed=0).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(base, some_tokens()), rtol=0, atol=1e-5)


def test_arguments_that_make_another_model(whole: Path) -> None:
    assert "gate_proj.weight is [48, 32]; expected [64, 32]" in refusal(whole, intermediate_size=64)
    line = refusal(whole, num_hidden_layers=3)
    assert "lacks the tensors model.layers.2.…, but 3 layers are requested; expected at most 2 in num_hid" in line
    assert "holds the tensor model.layers.1." in refusal(whole, num_hidden_layers=1)
    assert "model.arguments.config: not allowed with model.base" in refusal(whole, config="config.json")


def test_parts_that_do_not_agree(in_parts: Path) -> None:
    index, part = in_parts / INDEX, in_parts / PART
    stated = json.loads(index.read_text())
    name = next(name for name, part in stated["weight_map"].items() if part == PART)
    content = part.read_bytes()

    def written(weight_map: object) -> None:
        index.write_text(json.dumps({**stated, "weight_map": weight_map}))

    part.unlink()
    assert f"{part}: is missing, but {INDEX} names it" in refusal(in_parts)
    part.write_bytes(content[:-3])
    assert f"{part}: is cut or damaged: " in refusal(in_parts)
    part.write_bytes(content)
    written({**stated["weight_map"], name: FIRST})
    assert f"{part}: holds the tensor {name}, which is in {FIRST} according to {INDEX}" in refusal(in_parts)
    written({key: value for key, value in stated["weight_map"].items() if key != name})
    assert f"{part}: holds the tensor {name}, which is nowhere according to {INDEX}" in refusal(in_parts)
    written({**stated["weight_map"], "more": PART})
    assert f"{part}: lacks the tensor more, which it has according to {INDEX}" in refusal(in_parts)
    written({**stated["weight_map"], name: "../../outside.safetensors"})
    assert "is missing" in refusal(in_parts)
    for wrong in ({}, None, {name: 3}):
        written(wrong)
        assert f"{index}: expected weight_map" in refusal(in_parts)
    index.write_text("{")
    assert f"{index}: cannot be read as JSON" in refusal(in_parts)


def test_a_directory_that_holds_none(whole: Path, tmp_path: Path) -> None:
    expected = "expected a directory, here or in a store, with Hugging Face's config.json and safetensors"
    assert refusal(tmp_path / "none") == f"model.base: {tmp_path / 'none'}: no such directory; {expected}"
    assert refusal(whole / WHOLE) == f"model.base: {whole / WHOLE}: no such directory; {expected}"
    assert "no such directory" in refusal(Path("meta-llama/Llama-3.1-8B"))
    (whole / WHOLE).rename(whole / "consolidated.safetensors")
    assert "holds no weights; expected model.safetensors, or shards with model.safetensors.index.json" in refusal(whole)
    (whole / "pytorch_model.bin").write_bytes(b"\x80\x04K\x07.")
    assert "holds pytorch_model.bin, a pickle, which is not opened; expected model.safetensors" in refusal(whole)
    for content, why in (
        ("", "cannot be read as JSON"),
        ("{", "cannot be read as JSON"),
        ("[]", "expected a JSON object"),
        ("\xff", "cannot be read"),
    ):
        (whole / "config.json").write_bytes(content.encode("latin-1"))
        assert why in refusal(whole) and f"{whole}/config.json" in refusal(whole)
    (whole / "config.json").unlink()
    assert refusal(whole) == f"model.base: {whole}: holds no config.json; {expected}"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model_type": "gemma2"}, "config.json: model_type: 'gemma2' is not allowed; expected one of llama, mistral"),
        ({"model_type": None}, "config.json: model_type: None is not allowed"),
        ({"max_position_embeddings": LENGTH - 1}, f"has positions for 23 tokens, and a row has {LENGTH}; expected"),
        ({"hidden_size": None}, "config.json: states no hidden_size"),
        ({"sliding_window": "wide"}, "config.json: is not a config.json of Hugging Face: '<' not supported between"),
        ({"rope_parameters": 3}, "config.json: is not a config.json of Hugging Face: 'int' object is not iterable"),
        ({"vocab_size": 300}, f"has 300 token ids, and this data {VOCABULARY}; expected data that was prepared with"),
        ({"num_hidden_layers": 2000}, "lacks the tensors model.layers.2.…, but 2000 layers are requested; expected"),
        ({"hidden_size": "32"}, 'config.json: hidden_size: "32" is not allowed; expected an integer'),
    ],
)
def test_another_config(change: dict[str, Any], why: str, whole: Path) -> None:
    file = whole / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert why in refusal(whole)


def test_data_that_is_no_tokens(whole: Path) -> None:
    table = Signature((TensorSpec("numeric", "float32", (3,)),), "classification", "y", ("a", "b"))
    with pytest.raises(UserError, match=r"model.base: .* predicts tokens, and this data has numeric and asks"):
        build(ModelConfig(base=str(whole)), table, seed=0)


def test_a_file_that_changes_while_it_is_read(whole: Path) -> None:
    base = Base.open(str(whole))
    content = (whole / WHOLE).read_bytes()
    (whole / WHOLE).write_bytes(content + b"\0")
    part = torch.empty(32, 32)
    with pytest.raises(UserError, match=r"model\.safetensors: was replaced while it was read"):
        base.fill(part, PROJECTION, (0, 0))
    (whole / WHOLE).unlink()
    with pytest.raises(UserError, match=r"model\.safetensors: no such file"):
        base.fill(part, PROJECTION, (0, 0))
