"""Check of an exported model on the machine that will serve it: ``slipstream check``.

Needs neither torch nor Flyte.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from io import SEEK_CUR, BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from slipstream.pipeline.export.package.files import (
    DEPLOYED,
    MANIFEST,
    BadPackage,
    check_files,
    check_signature,
    errors_as_bad_package,
    open_file,
    read_file,
    read_manifest,
)
from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.source.npz import open_member, read_content, read_header

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

#: Sample rows: the model's inputs with its outputs, and raw columns with the raw model's outputs.
TENSORS, RAW = "samples.npz", "samples.json"
OUTPUT = "output"
#: Maximum number of sample rows; every row is also predicted alone.
MOST_SAMPLES = 1024
#: Limits of a protobuf message: bytes of a varint, which holds 64 bits, bytes of a value that is read, and fields.
LONGEST_VARINT, LONGEST_VALUE, MOST_FIELDS = 10, 256, 10_000


def check_package(directory: Path, key: Path | None = None) -> list[str]:
    """Return one line per passed check, and a final line.

    Raises ``BadPackage`` at the first failed check.
    """
    read_manifest(directory)
    lines = [f"digest     {hashlib.sha256(read_file(directory, MANIFEST)).hexdigest()}"]
    lines += check_signature(directory, key)
    lines.append(check_files(directory))
    with errors_as_bad_package(directory / DEPLOYED):
        deployed = parse_json(read_file(directory, DEPLOYED))
        if not deployed["model"]:
            lines.append(f"outputs    not compared, because there is no ONNX model: {deployed['no_onnx']}")
            return [*lines, f"{directory}: complete"]
        lines.append(check_opset(directory, deployed["model"], deployed["opset"]))
        lines.append(check_tensors(directory, deployed))
        if deployed["raw"]:
            lines.append(check_raw(directory, deployed))
    return [*lines, f"{directory}: complete; its outputs here equal those of the machine that exported it"]


def check_opset(directory: Path, model: str, expected: int) -> str:
    with open_file(directory, model) as file, errors_as_bad_package(directory / model):
        versions = operator_set_versions(file)
        written = next((version for domain, version in versions if domain in ("", "ai.onnx")), None)
    if written != expected:
        raise BadPackage(f"{directory / model}: is written in opset {written}, but {DEPLOYED} says {expected}")
    return f"opset      {written}"


def operator_set_versions(model: IO[bytes]) -> Iterator[tuple[str, int]]:
    """Yield domain and version of every operator set (field 8) of a serialised ``ModelProto``."""
    for number, value in protobuf_fields(model):
        if number == 8 and isinstance(value, bytes):
            parts = dict(protobuf_fields(BytesIO(value)))
            domain, version = parts.get(1, b""), parts.get(2, 0)
            yield domain.decode() if isinstance(domain, bytes) else "", version if isinstance(version, int) else 0


def protobuf_fields(message: IO[bytes]) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values of a protobuf message.

    Varints become integers, short length-delimited fields bytes; others are skipped.
    """

    def varint() -> int:
        """Return the next varint; 0 at the end of the message."""
        value = 0
        for shift in range(0, 7 * LONGEST_VARINT, 7):
            (byte,) = message.read(1) or b"\0"
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError(f"a varint of more than {LONGEST_VARINT} bytes")

    for _ in range(MOST_FIELDS):
        tag = varint()
        if not tag:
            return
        length = {1: 8, 5: 4}.get(tag & 7, 0) if tag & 7 != 2 else varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2 and length <= LONGEST_VALUE:
            yield tag >> 3, message.read(length)
        else:
            message.seek(length, SEEK_CUR)
    raise ValueError(f"more than {MOST_FIELDS:,} fields")


def runtime_providers() -> list[str]:
    """Return the ONNX Runtime providers to use: the GPU if available, then the CPU."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    return [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]


def session_of(path: Path) -> InferenceSession:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    try:
        with redirect_stdout(None):  # it prints the errors of a provider before it tries the next
            return onnxruntime.InferenceSession(path, providers=runtime_providers())
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadPackage(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {reason}") from None


def check_tensors(directory: Path, deployed: dict[str, Any]) -> str:
    """Compare the model's outputs on the sample rows with the exported ones, in one batch and row by row."""
    path = directory / deployed["model"]
    session = session_of(path)
    with open_file(directory, TENSORS) as file, errors_as_bad_package(directory / TENSORS):
        inputs = {spec["name"]: read_samples(file, spec["name"], spec) for spec in deployed["inputs"]}
        expected = read_samples(file, OUTPUT, deployed["outputs"][0])
    singly = [
        run_session(path, session, {name: rows[[row]] for name, rows in inputs.items()}) for row in range(len(expected))
    ]
    allowed = deployed["samples"]["tolerance"]
    for outputs in (run_session(path, session, inputs), np.concatenate(singly)):
        alike = outputs.shape == expected.shape
        difference = float(np.abs(outputs.astype(np.float64) - expected).max()) if alike else np.inf
        if not difference <= allowed:
            raise BadPackage(
                f"{path}: on the sample rows its outputs differ by {difference:.3g} from those of the machine that "
                f"exported it, more than the {allowed:.3g} that rounding explains; do not serve it on this machine"
            )
    return f"outputs    of {len(expected)} sample rows, within {allowed:.3g}"


def read_samples(file: IO[bytes], name: str, spec: Mapping[str, Any]) -> np.ndarray:
    """Return an array of sample rows; raise ``ValueError`` if its header differs from ``signature.json``."""
    # An array that is not compressed cannot have more bytes than its file.
    with open_member(file, name, [zipfile.ZIP_STORED]) as stream:
        header = read_header(stream)
        rows, *shape = header.shape
        if (header.dtype.name, shape) != (spec["dtype"], spec["shape"][1:]) or not 0 < rows <= MOST_SAMPLES:
            raise ValueError(f"{name!r} is {header}; {DEPLOYED} says {spec['dtype']} {spec['shape']}")
        return read_content(stream, header)


def check_raw(directory: Path, deployed: dict[str, Any]) -> str:
    """Compare the raw model's outputs on the raw sample rows with the exported ones."""
    raw = deployed["raw"]
    path, samples = directory / raw["model"], parse_json(read_file(directory, RAW))
    session = session_of(path)
    feed = {spec["name"]: raw_column(samples["inputs"][spec["name"]], spec["dtype"]) for spec in raw["inputs"]}
    outputs = run_session(path, session, feed, raw["outputs"][-1]["name"])
    expected, allowed = np.array(samples["outputs"]), raw["tolerance"]
    if not (difference := float(np.abs(outputs.astype(np.float64) - expected).max())) <= allowed:
        raise BadPackage(f"{path}: its outputs on raw sample rows differ by {difference:.3g}, more than {allowed:.3g}")
    if samples["labels"]:
        labels = run_session(path, session, feed, raw["outputs"][0]["name"])[:, 0]
        ranked, threshold = np.sort(expected, axis=1), deployed.get("threshold")
        apart = ranked[:, -1] - ranked[:, -2] if threshold is None else 2 * np.abs(expected[:, 1] - threshold)
        clear = apart > 2 * allowed  # where rounding cannot swap the two most likely classes
        if wrong := [row for row in np.flatnonzero(clear) if labels[row] != samples["labels"][row]]:
            raise BadPackage(f"{path}: sample row {wrong[0] + 1} is labelled {labels[wrong[0]]!r}, not as exported")
    return f"raw model  {len(expected)} sample rows, within {allowed:.3g}"


def raw_column(values: Sequence[object], dtype: str) -> np.ndarray:
    """Return a column of raw values ``[rows, 1]``; None becomes NaN."""
    if dtype == "string":
        return np.array(values, object)[:, None]
    return np.array([np.nan if value is None else value for value in values], np.float64)[:, None]


def run_session(
    path: Path, session: InferenceSession, feed: dict[str, np.ndarray], output: str | None = None
) -> np.ndarray:
    try:
        return session.run([output or session.get_outputs()[0].name], feed)[0]
    except Exception as error:
        raise BadPackage(f"{path}: does not run on the sample rows: {error!s:.300}") from None


def main(argv: Sequence[str]) -> int:
    """Run ``slipstream check`` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="slipstream check",
        description="Check an exported model: digest, signature, opset, and its outputs on the sample rows.",
    )
    parser.add_argument("directory", type=Path, help="exported model: runs/…/model, or a version of a registry")
    parser.add_argument("--key", type=Path, help="file of the signer's Ed25519 public key (PEM)")
    arguments = parser.parse_args(argv)
    try:
        print("\n".join(check_package(arguments.directory, arguments.key)))
    except BadPackage as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    return 0
