"""Check of an exported model on the machine that will serve it: ``slipstream check``.

Needs NumPy and ONNX Runtime, and ``cryptography`` for a signature; neither torch nor Flyte. The checks, in order: the
manifest's digest, the signature, the absence of symbolic links, the size and SHA-256 of every file, the absence of
other files, the opset, and that this machine reproduces the exporting machine's outputs on the sample rows. A package
without an ONNX model skips the last two.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from slipstream.shared.artifacts.strict_json import parse_json
from slipstream.shared.one_line import one_line
from slipstream.shared.untrusted_files import RefusedFile, open_untrusted, read_untrusted

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from onnxruntime import InferenceSession

#: File with the ``sha256sum`` line of the manifest. It covers all files, since the manifest holds their digests.
DIGEST = "manifest.sha256"
SIGNATURE = "manifest.sig"
MANIFEST, DEPLOYED = "manifest.json", "signature.json"
#: Sample rows: the model's inputs with its outputs, and raw columns with the raw model's outputs.
TENSORS, RAW = "samples.npz", "samples.json"
OUTPUT = "output"
#: Maximum size in bytes of a file that is read into memory.
LONGEST_JSON = 256 << 20


class BadPackage(Exception):
    """Error for a directory that is not an exported model or was changed; the message names the file."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def digest_line(manifest: bytes) -> str:
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n"


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


@contextmanager
def errors_as_bad_package(path: Path) -> Iterator[None]:
    """Raise ``BadPackage`` if the block cannot read ``path`` or finds unexpected content.

    Despite a correct digest, another version may have written the package.
    """
    try:
        yield
    except OSError as error:
        raise BadPackage(f"{error.filename or path}: cannot be read ({error.strerror or error})") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise BadPackage(f"{path}: not a file that an export of this version writes ({error!r:.200})") from None


# Files


def read_file(directory: Path, name: str) -> bytes:
    """Return the content of a file of at most ``LONGEST_JSON`` bytes, opened by :func:`open_file`."""
    with refused_is_bad(directory / name):
        return read_untrusted(directory, name, LONGEST_JSON)


def open_file(directory: Path, name: str) -> BufferedReader:
    """Open a regular file for reading.

    Raises ``BadPackage`` for a symbolic link or any other type of file.
    """
    with refused_is_bad(directory / name):
        return open_untrusted(directory, name)


@contextmanager
def refused_is_bad(path: Path) -> Iterator[None]:
    """Raise ``BadPackage`` for a symbolic link and for ``RefusedFile`` in the block."""
    check_no_link(path)
    try:
        yield
    except RefusedFile as refused:
        raise BadPackage(str(refused)) from None


def check_no_link(path: Path) -> None:
    """Raise ``BadPackage`` if ``path`` is a symbolic link, whose target may change."""
    if path.is_symlink():
        raise BadPackage(
            f"{path}: a symbolic link; expected the file or directory itself. Export or copy the model again"
        )


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return the manifest; raise ``BadPackage`` unless it is an export's and matches its digest."""
    path = directory / MANIFEST
    with errors_as_bad_package(path):
        if not path.is_file():
            raise BadPackage(f"{directory}: not an exported model; expected a directory with a {MANIFEST}")
        raw, digest = read_file(directory, MANIFEST), directory / DIGEST
        if not digest.is_file():
            raise BadPackage(f"{digest}: missing; without it a changed {MANIFEST} is not found. Export the model again")
        if read_file(directory, DIGEST) != digest_line(raw).encode():
            raise BadPackage(f"{path}: its SHA-256 differs from the one in {DIGEST}: one of the two was changed")
    try:
        manifest = parse_json(raw)
        if (manifest["kind"], manifest["format"]) != ("export", 1) or not isinstance(manifest["files"], dict):
            found = f"{manifest['kind']!r:.40}, format {manifest['format']!r:.40}"
            raise BadPackage(f"{path}: holds {found}; expected 'export', 1")
    except (ValueError, KeyError, TypeError):
        raise BadPackage(f"{path}: not the manifest of an exported model") from None
    return manifest


def files_below(directory: Path) -> set[str]:
    """Return the names of all files.

    Raises ``BadPackage`` for a symbolic link.
    """
    paths = sorted(directory.rglob("*"))
    for path in paths:
        check_no_link(path)
    return {path.relative_to(directory).as_posix() for path in paths if not path.is_dir()}


def check_files(directory: Path) -> str:
    """Compare all files with the manifest.

    Raises ``BadPackage`` for a missing, changed or additional file.
    """
    records = read_manifest(directory)["files"]
    with errors_as_bad_package(directory / MANIFEST):
        compare_files(directory, records)
    if DEPLOYED in records:
        with errors_as_bad_package(directory / DEPLOYED):
            check_deployed(directory, records)
    return f"files      {len(records)}, each with its SHA-256"


def compare_files(directory: Path, records: Mapping[str, Mapping[str, object]]) -> None:
    there = files_below(directory)
    for name, record in records.items():
        # Open only names that were found here: a manifest may also list ../../etc/passwd.
        if name not in there:
            raise BadPackage(f"{directory}/{name}: missing, though the manifest lists it")
        path = directory / name
        with open_file(directory, name) as file:
            if (size := os.fstat(file.fileno()).st_size) != record["size"]:
                raise BadPackage(f"{path}: {size} bytes, the manifest says {record['size']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                raise BadPackage(f"{path}: its SHA-256 differs from the manifest's: it was changed")
    if extra := sorted(there - {*records, MANIFEST, DIGEST, SIGNATURE}):
        raise BadPackage(f"{directory / extra[0]}: not part of the exported model; remove it")


def check_deployed(directory: Path, records: Mapping[str, object]) -> None:
    """Raise ``BadPackage`` if ``signature.json`` names a model that the manifest does not list."""
    deployed = parse_json(read_file(directory, DEPLOYED))
    for one in filter(None, (deployed, deployed["raw"])):
        weights_alone = one["model"] == "" and one.get("no_onnx")
        if one["model"] not in records and not weights_alone:
            raise BadPackage(f"{directory / DEPLOYED}: names the model {one['model']!r}, which is not in the manifest")


def check_signature(directory: Path, key: Path | None) -> list[str]:
    """Verify the manifest's Ed25519 signature (RFC 8032), if signed.

    Raises ``BadPackage`` for a wrong signature, a signature without ``key``, or ``key`` without a signature.
    """
    path = directory / SIGNATURE
    if not path.exists():
        if key:
            raise BadPackage(f"{path}: missing: the model is not signed; sign it, or check it without --key")
        return []
    if not key:
        raise BadPackage(f"{path}: signed, but no key was given; check it with --key and its signer's public key (PEM)")
    public = load_key(key)
    from cryptography.exceptions import InvalidSignature

    try:
        public.verify(read_file(directory, SIGNATURE), read_file(directory, MANIFEST))
    except InvalidSignature:
        raise BadPackage(f"{path}: {key} did not sign this model, or the model was changed since") from None
    return [f"signature  of {key}"]


def load_key(path: Path) -> Ed25519PublicKey:
    try:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        from cryptography.hazmat.primitives.serialization import load_pem_public_key
    except ModuleNotFoundError:
        raise BadPackage(f"{path}: a signature needs the package cryptography; pip install cryptography") from None
    try:
        key = load_pem_public_key(path.read_bytes())
    except OSError as error:
        raise BadPackage(f"{path}: cannot be read ({error.strerror}); expected a public key (PEM)") from None
    except ValueError:
        raise BadPackage(f"{path}: not a public key; expected an Ed25519 public key (PEM)") from None
    if not isinstance(key, Ed25519PublicKey):
        raise BadPackage(f"{path}: {type(key).__name__} is not an Ed25519 key")
    return key


# Model


def check_opset(directory: Path, model: str, expected: int) -> str:
    with open_file(directory, model) as file:
        written = next(
            (version for domain, version in operator_set_versions(file.read()) if domain in ("", "ai.onnx")), None
        )
    if written != expected:
        raise BadPackage(f"{directory / model}: is written in opset {written}, but {DEPLOYED} says {expected}")
    return f"opset      {written}"


def operator_set_versions(model: bytes) -> Iterator[tuple[str, int]]:
    """Yield domain and version of every operator set (field 8) of a serialised ``ModelProto``."""
    for number, value in protobuf_fields(model):
        if number == 8 and isinstance(value, bytes):
            parts = dict(protobuf_fields(value))
            domain, version = parts.get(1, b""), parts.get(2, 0)
            yield domain.decode() if isinstance(domain, bytes) else "", version if isinstance(version, int) else 0


def protobuf_fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield field numbers and values of a protobuf message.

    Varints become integers, length-delimited fields bytes; others are skipped.
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            length = varint()
            at += length
            yield tag >> 3, message[at - length : at]
        else:
            at += 8 if tag & 7 == 1 else 4


def runtime_providers() -> list[str]:
    """Return the ONNX Runtime providers to use: the GPU if available, then the CPU."""
    import onnxruntime

    there = onnxruntime.get_available_providers()
    return [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in there]


def session_of(path: Path) -> InferenceSession:
    import onnxruntime

    onnxruntime.set_default_logger_severity(3)
    try:
        return onnxruntime.InferenceSession(path, providers=runtime_providers())
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise BadPackage(f"{path}: ONNX Runtime {onnxruntime.__version__} cannot load it: {reason}") from None


def check_tensors(directory: Path, deployed: dict[str, Any]) -> str:
    """Compare the model's outputs on the sample rows with the exported ones, in one batch and row by row."""
    path = directory / deployed["model"]
    session = session_of(path)
    with open_file(directory, TENSORS) as file, np.load(file, allow_pickle=False) as samples:
        inputs = {spec["name"]: samples[spec["name"]] for spec in deployed["inputs"]}
        expected = samples[OUTPUT]
    singly = [
        run_session(path, session, {name: rows[[row]] for name, rows in inputs.items()}) for row in range(len(expected))
    ]
    allowed = deployed["samples"]["tolerance"]
    for outputs in (run_session(path, session, inputs), np.concatenate(singly)):
        difference = float(np.abs(outputs.astype(np.float64) - expected).max())
        if not difference <= allowed:
            raise BadPackage(
                f"{path}: on the sample rows its outputs differ by {difference:.3g} from those of the machine that "
                f"exported it, more than the {allowed:.3g} that rounding explains; do not serve it on this machine"
            )
    return f"outputs    of {len(expected)} sample rows, within {allowed:.3g}"


def check_raw(directory: Path, deployed: dict[str, Any]) -> str:
    """Compare the raw model's outputs on the raw sample rows with the exported ones.

    Labels are compared only where rounding cannot swap the two most likely classes.
    """
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
        clear = apart > 2 * allowed
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
