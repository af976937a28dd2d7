"""Packages of somebody else, whose manifest vouches for every byte: refused in one line, in little time and memory."""

import shutil
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import numpy as np
import onnx
import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.check import check_package, main
from slipstream.pipeline.export.package.files import BadPackage
from tests.support.fuzzed import vouch
from tests.support.limited import limited
from tests.support.mutations import HEADERS, NPY_2, with_header
from tests.support.packages import package
from tests.support.wording import refuses

Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("package")
    return package(place / "model", write_table(place / "data", "classification"), 1)


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def flipped(data: bytes) -> bytes:
    changed = bytearray(data)
    changed[len(data) // 3] ^= 0xFF
    return bytes(changed)


def bomb(data: bytes) -> bytes:
    """An array of 120 MB in 120 kB, with the right shape but for its rows."""
    sink = BytesIO()
    np.savez_compressed(sink, numeric=np.zeros((5_000_000, 6), np.float32))
    return sink.getvalue()


def without_outputs(data: bytes) -> bytes:
    with np.load(BytesIO(data)) as arrays:
        sink = BytesIO()
        np.savez(sink, **{name: arrays[name] for name in arrays if name != "output"})
    return sink.getvalue()


SAMPLES: dict[str, Change] = {
    "cut": lambda data: data[: len(data) // 2],
    "a flipped byte": flipped,
    "a bomb": bomb,
    "no outputs": without_outputs,
    "a long header": lambda data: with_header(data, "numeric.npy", b"{", NPY_2),
    **{f"header {at}": partial(with_header, name="numeric.npy", header=each) for at, each in enumerate(HEADERS)},
}
MODELS: dict[str, Change] = {
    "a varint without an end": lambda data: b"\xff" * 320_000,
    "fields without an end": lambda data: b"\x10\0" * 5_000_000,
    "nothing": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
}


def refused(directory: Path, name: str, change: Change) -> None:
    path = directory / name
    path.write_bytes(change(path.read_bytes()))
    vouch(path)
    with limited(seconds=2.0, more_bytes=64 << 20), refuses(BadPackage, match=name.replace(".", r"\.")):
        check_package(directory)


@pytest.mark.parametrize("case", SAMPLES)
def test_hostile_samples_are_one_line(case: str, copy: Path) -> None:
    refused(copy, "samples.npz", SAMPLES[case])


@pytest.mark.parametrize("case", MODELS)
def test_a_hostile_model_is_one_line(case: str, copy: Path) -> None:
    refused(copy, "model.onnx", MODELS[case])


def test_onnx_runtime_prints_nothing(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints errors that it takes for those of a device, such as a name that is not UTF-8."""
    model = onnx.load(copy / "model.onnx")
    model.graph.node[0].op_type = "Gämm"
    content = model.SerializeToString().replace("ä".encode(), b"\xf6\xf6")
    (copy / "model.onnx").write_bytes(content)
    vouch(copy / "model.onnx")
    assert main([str(copy)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
