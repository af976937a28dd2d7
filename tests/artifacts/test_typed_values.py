"""Typed values are read back bit for bit; all other input is rejected."""

import json
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from slipstream.shared.artifacts.format import DamagedArtifact
from slipstream.shared.artifacts.typed_values import TREE, decode_value, encode_value
from slipstream.shared.errors import UserError
from tests.support.bits import bits
from tests.support.wording import refuses


class Point(NamedTuple):
    x: float
    y: int


@dataclass(frozen=True)
class Inner:
    name: str
    place: Path
    cuts: tuple[float, float] | None = None
    kind: Literal["a", "b", 1] = "a"


@dataclass
class Outer:
    flag: bool
    numbers: dict[str, float]
    parts: list[Inner]
    shape: tuple[int, ...]
    point: Point
    arrays: list[np.ndarray] = field(default_factory=list)
    batch: pa.RecordBatch | None = None
    anything: dict[str, Any] = field(default_factory=dict)


texts = st.text(st.characters())  # lone surrogates, which are in the names of some files, too
floats = st.one_of(st.floats(), st.just(-math.nan), st.just(-0.0), st.integers(-(2**70), 2**70))
inners = st.builds(
    Inner,
    texts,
    texts.filter(lambda text: "\0" not in text).map(Path),
    st.none() | st.tuples(floats, floats),
    st.sampled_from(["a", "b", 1]),
)
arrays = st.builds(
    lambda raw, dtype, step: np.frombuffer(raw[: len(raw) // 8 * 8], np.uint8).view(dtype)[::step],
    st.binary(max_size=64),
    st.sampled_from([np.uint64, np.int64, np.int32, np.uint8, np.float64, np.float32]),
    st.sampled_from([1, 2, -1]),
)
batches = st.builds(
    lambda names, numbers: pa.RecordBatch.from_pydict(
        {
            "text": pa.array([name for name, _ in zip(names, numbers, strict=False)], pa.string()),
            "number": pa.array([number for _, number in zip(names, numbers, strict=False)], pa.float64()),
        }
    ),
    st.lists(st.none() | st.text(max_size=5), max_size=9),
    st.lists(st.none() | st.floats(), max_size=9),
)
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
outers = st.builds(
    Outer,
    st.booleans(),
    st.dictionaries(texts, floats, max_size=3),
    st.lists(inners, max_size=3),
    st.lists(st.integers()).map(tuple),
    st.builds(Point, floats, st.integers()),
    st.lists(arrays, max_size=3),
    st.none() | batches,
    st.dictionaries(texts, plain, max_size=3),
)


@settings(deadline=None)
@given(outers)
def test_a_value_comes_back_to_the_bit(value: Outer) -> None:
    assert bits(decode_value(encode_value(value, Outer), Outer, "f")) == bits(value)


@pytest.mark.parametrize("dtype", [np.uint64, np.int64, np.int32, np.uint8, np.float64, np.float32, bool, ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (4, 3)])
def test_arrays_of_all_shapes(dtype: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape)).reshape(shape).astype(dtype)
    for one in (array, array.T, np.asfortranarray(array)):
        again = decode_value(encode_value(one, np.ndarray), np.ndarray, "f")
        assert again.dtype == one.dtype.newbyteorder("=") and again.shape == one.shape
        assert (again == one).all() and again.flags.writeable


def test_dictionaries_and_pieces_of_batches() -> None:
    batch = pa.record_batch({"c": pa.array(["a", None, "b", "a"]).dictionary_encode(), "n": pa.nulls(4)})
    piece = batch.slice(1, 2)
    assert decode_value(encode_value(piece, pa.RecordBatch), pa.RecordBatch, "f").equals(piece)


VALUE = Outer(True, {"a": 1.5}, [Inner("n", Path("p"))], (1, 2), Point(0.5, 3), [np.arange(3)])


def changed(**tree: Any) -> bytes:
    """The bytes of ``VALUE`` with other content in some fields; those that are ``None`` are left out."""
    tensors = load(encode_value(VALUE, Outer))
    content = {**json.loads(tensors[TREE].tobytes()), **tree}
    content = {name: part for name, part in content.items() if part is not None or name == "batch"}
    return save({**tensors, TREE: np.frombuffer(json.dumps(content).encode(), np.uint8)})


INNER = {"name": "n", "place": "p", "cuts": None, "kind": "a"}


@pytest.mark.parametrize(
    "tree",
    [
        {"flag": 1},
        {"numbers": {"a": "x"}},
        {"numbers": {"a": True}},
        {"numbers": []},
        {"parts": [INNER, {**INNER, "name": 3}]},
        {"parts": [{**INNER, "cuts": [1.0]}]},
        {"parts": [{**INNER, "kind": True}]},
        {"parts": [{**INNER, "place": None}]},
        {"shape": [1, 2.0]},
        {"point": {"x": 0.5}},
        {"point": [0.5, 3]},
        {"extra": 1},
        {"shape": None},
        {"arrays": ["0", "0"]},
        {"arrays": ["json"]},
        {"arrays": []},
        {"batch": "0", "arrays": []},
        {"flag": {"py/object": "os.system", "__class__": "Inner"}},
    ],
)
def test_what_is_not_of_the_type_is_named(tree: dict[str, Any]) -> None:
    with refuses(DamagedArtifact, match=r"^value\.file:") as error:
        decode_value(changed(**tree), Outer, "value.file")
    assert "\n" not in error.value.message


@pytest.mark.parametrize("data", [b"", b"{}", pickle.dumps(VALUE.shape), encode_value(1, int)[:-1], save({})])
def test_what_is_no_value_is_refused(data: bytes) -> None:
    with refuses(DamagedArtifact, match=r"^value\.file:"):
        decode_value(data, Outer, "value.file")


def test_too_deep_is_refused() -> None:
    deep = save({TREE: np.frombuffer(b"[" * 100_000 + b"]" * 100_000, np.uint8)})
    for kind in (Any, list[Any], Outer):
        with pytest.raises(DamagedArtifact):
            decode_value(deep, kind, "value.file")


@dataclass(frozen=True)
class Even:
    number: int

    def __post_init__(self) -> None:
        if self.number % 2:
            raise UserError("number: must be even")


def test_a_class_that_checks_its_values_is_asked() -> None:
    data = encode_value(Even(2), Even).replace(b'{"number":2}', b'{"number":3}')
    with refuses(DamagedArtifact):
        decode_value(data, Even, "value.file")


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (Inner(3, Path()), Inner),  # type: ignore[arg-type]
        ({"a": (1, 2)}, dict[str, Any]),
        ([math.nan], list[Any]),
        (np.array(["a"]), np.ndarray),
        (np.int64(3), int),
        ({1: 2}, dict[str, int]),
        ({1, 2}, set[int]),
        (1, int | str),
    ],
)
def test_a_writer_that_is_wrong_is_told(value: Any, kind: Any) -> None:
    with refuses(TypeError):
        encode_value(value, kind)
