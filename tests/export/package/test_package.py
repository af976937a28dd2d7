"""The exported directory: its files, checks without torch or Flyte, and detection of damage."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import onnx
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, x25519

from slipstream.pipeline.export.card import settings_section
from slipstream.pipeline.export.check import check_package, operator_set_versions
from slipstream.pipeline.export.package.files import DIGEST, MANIFEST, SIGNATURE, BadPackage, digest_line
from slipstream.pipeline.export.package.sign import sign_package
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.results import export as exported
from slipstream.shared.artifacts.results.export import read_export
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.errors import UserError
from tests.support.packages import package
from tests.support.raw_tables import mixed_table
from tests.support.toys import images
from tests.support.wording import refuses, same_wording


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return PreparedData.open(mixed_table(tmp_path_factory.mktemp("table") / "data", "classification"))


@pytest.fixture(scope="module")
def model(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("package") / "model", data, licence="Apache-2.0")


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "copy"))


def run_check(*arguments: str | Path, code: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *(["-c", code] if code else ["-m", "slipstream", "check"]), *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


# What is in it


def test_the_file_says_what_it_is(model: Path, data: PreparedData) -> None:
    props = {p.key: p.value for p in onnx.load(model / "model.onnx").metadata_props}
    assert props["slipstream.prepared"] == data.artifact.fingerprint
    assert json.loads(props["slipstream.classes"]) == list(data.signature.classes)
    assert props["slipstream.licence"] == "Apache-2.0"
    assert props["slipstream.cpu_target"] == "portable"
    assert [spec["name"] for spec in json.loads(props["slipstream.inputs"])] == ["numeric", "categorical"]
    raw = {p.key: p.value for p in onnx.load(model / "model.raw.onnx").metadata_props}
    units = {spec["name"]: spec["units"] for spec in json.loads(raw["slipstream.inputs"])}
    assert units["when"].startswith("date or time as text, ISO 8601") and units["member"] == "0 or 1"
    assert raw.keys() == props.keys()
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert props["slipstream.commit"].removesuffix("-dirty") == head.stdout.strip()


def test_the_card_names_both_models_and_the_licence(model: Path) -> None:
    card = (model / "MODEL_CARD.md").read_text()
    assert "`model.onnx`" in card and "`model.raw.onnx`" in card and "Apache-2.0" in card


def test_the_card_has_the_data_and_the_settings_and_folds_untimed_variants(model: Path, data: PreparedData) -> None:
    card = (model / "MODEL_CARD.md").read_text()
    sections = re.findall(r"^## (.*)$", card, re.MULTILINE)
    assert sections == ["Intended use", "Data", "Settings", "Use", "Variants"]
    assert f"{data.card['rows']['train']:,} to train" in card and data.card["source"] in card
    others = [each.name for each in read_export(model).variants if not each.metrics]
    shown, _, folded = card.partition("<details>")
    assert others and not [name for name in others if f"- {name}, " in shown]
    assert all(f"- {name}, " in folded for name in others)
    assert not re.search(r"20\d\d-\d\d-\d\d", card), "a date would make equal models unequal"


#: Files with measured latencies, and those with digests of these.
MEASURED = {"export.json", "MODEL_CARD.md", "manifest.json", "manifest.sha256"}


def test_a_model_exported_on_another_day_has_the_same_bytes(
    data: PreparedData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a clock three days ahead. Figures that are measured differ between any two exports."""
    # FP32, since no other is that much faster: which one is fastest is measured.
    found = {"today": package(tmp_path / "today", data, min_speedup=1e6)}
    clock, real = time.time, {name: getattr(time, name) for name in ("gmtime", "localtime")}
    monkeypatch.setattr(time, "time", lambda: clock() + 3 * 86_400)
    monkeypatch.setattr(time, "time_ns", lambda: int(1e9 * time.time()))
    for name, function in real.items():
        monkeypatch.setattr(time, name, lambda given=None, function=function: function(given or time.time()))
    found["later"] = package(tmp_path / "later", data, min_speedup=1e6)
    files = {day: {path.name: path.read_bytes() for path in place.iterdir()} for day, place in found.items()}
    assert files["today"].keys() == files["later"].keys()
    assert {name for name, content in files["today"].items() if content != files["later"][name]} <= MEASURED
    days = [datetime.now(UTC).date() + timedelta(days=number) for number in range(-1, 5)]
    dates = [day.strftime(form).encode() for day in days for form in ("%Y-%m-%d", "%d %b %Y", "%Y%m%d")]
    dated = {name for each in files.values() for name, content in each.items() if any(map(content.__contains__, dates))}
    assert not dated, "a date would make equal models unequal"


def test_the_card_names_the_settings_of_the_training() -> None:
    made_by = {"model": {"name": "mlp", "arguments": {"a|`b": 1}}, "training": {"epochs": 3, "checkpoint_every": 4}}
    section = settings_section(made_by)
    assert "| `training.epochs` | `3` |" in section and "checkpoint_every" not in section
    assert all(len(re.findall(r"(?<!\\)\|", line)) == 3 for line in section.splitlines())
    assert settings_section({}) == "Not recorded.\n"


def test_sample_rows_are_nobodys(model: Path, data: PreparedData) -> None:
    """No row of any split is among them, and what they hold comes from the vocabularies and the statistics."""
    with np.load(model / "samples.npz") as samples:
        drawn = {tuple(row) for row in samples["numeric"].round(4).tolist()}
    for split in ("train", "validation", "test"):
        assert not drawn & {tuple(row) for row in data.split(split)["numeric"].round(4).tolist()}
    raw = json.loads((model / "samples.json").read_text())["inputs"]
    statistics = data.artifact.read_json("statistics.json")
    for category in statistics["categorical"]:
        assert set(raw[category["name"]]) <= {*category["vocabulary"], "unseen", ""}
    assert None in raw["age"] and set(raw["member"]) <= {0.0, 1.0}


def test_real_rows_only_when_asked_for(data: PreparedData, tmp_path: Path) -> None:
    made = package(tmp_path / "model", data, steps=5, sample_rows="real")
    with np.load(made / "samples.npz") as samples:
        rows = {tuple(row) for row in samples["numeric"].tolist()}
    assert rows <= {tuple(row) for row in data.split("test")["numeric"].tolist()}
    assert json.loads((made / "signature.json").read_text())["samples"]["real"] is True
    check_package(made)


@pytest.mark.prove
def test_images_have_tensors_only(tmp_path: Path) -> None:
    made = package(tmp_path / "model", images(tmp_path / "data"), steps=5)
    signature = json.loads((made / "signature.json").read_text())
    assert (signature["raw"], signature["no_raw"]) == (None, "the data are not a table of typed columns")
    assert not (made / "model.raw.onnx").exists()
    assert "not a table of typed columns" in (made / "MODEL_CARD.md").read_text()
    check_package(made)


def test_the_digest_has_one_name() -> None:
    assert exported.DIGEST == DIGEST


# Checking


def test_it_is_checked_with_numpy_and_onnxruntime_alone(model: Path) -> None:
    """In a fresh interpreter, where nothing else than these was imported."""
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from slipstream.__main__ import main\n"
        "sys.argv.insert(1, 'check')\n"
        "assert main() == 0\n"
        "from importlib.metadata import packages_distributions\n"
        "named = packages_distributions()\n"
        "print(sorted({d for m in set(sys.modules) - before for d in named.get(m.split('.')[0], [])}))\n"
    )
    ran = run_check(model, code=code)
    assert ran.returncode == 0, ran.stderr
    lines = ran.stdout.splitlines()
    assert set(eval(lines[-1])) - {"slipstream"} <= {"numpy", "onnxruntime"}
    assert [line.split()[0] for line in lines[:5]] == ["digest", "files", "opset", "outputs", "raw"]
    assert ran.stderr == ""


def test_a_flipped_byte_in_any_file_is_found(copy: Path) -> None:
    """At the beginning, in the middle and at the end of every file, the manifest and its digest among them."""
    names = sorted(path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file())
    assert {MANIFEST, DIGEST, "model.onnx", "model.raw.onnx", "samples.npz", "MODEL_CARD.md"} < set(names)
    for name in names:
        path = copy / name
        right = path.read_bytes()
        for place in {0, len(right) // 2, len(right) - 1}:
            path.write_bytes(right[:place] + bytes([right[place] ^ 1]) + right[place + 1 :])
            with pytest.raises(BadPackage, match=name.replace(".", r"\.")):
                check_package(copy)
        path.write_bytes(right)
    check_package(copy)


def test_a_file_that_is_missing_or_extra_is_found(copy: Path) -> None:
    for name in (DIGEST, MANIFEST, "samples.npz", "model.fp32.onnx"):
        content = (copy / name).read_bytes()
        (copy / name).unlink()
        with pytest.raises(BadPackage, match=name):
            check_package(copy)
        (copy / name).write_bytes(content)
    (copy / "deep").mkdir()
    (copy / "deep" / "more.bin").write_bytes(b"1")
    with refuses(BadPackage, match=r"deep/more\.bin:"):
        check_package(copy)


def test_a_mistake_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    for where in (tmp_path, tmp_path / "nowhere"):
        ran = run_check(where)
        assert (ran.returncode, ran.stdout) == (1, "")
        same_wording(ran.stderr)


def reseal(directory: Path, name: str) -> None:
    """Make the manifest and its digest agree with a changed file, as someone who forges a model would."""
    manifest = json.loads((directory / MANIFEST).read_text())
    content = (directory / name).read_bytes()
    manifest["files"][name] |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (directory / MANIFEST).write_text(json.dumps(manifest))
    (directory / DIGEST).write_text(digest_line((directory / MANIFEST).read_bytes()))


def other_weights(directory: Path, name: str) -> None:
    model = onnx.load(directory / name)
    weight = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data) if tensor.data_type == 1 else 0)
    values = onnx.numpy_helper.to_array(weight) * 1.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(model, directory / name)


def other_opset(directory: Path, name: str) -> None:
    model = onnx.load(directory / name)
    next(entry for entry in model.opset_import if entry.domain == "").version = 19
    onnx.save(model, directory / name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.onnx", other_weights),
        ("model.raw.onnx", other_weights),
        ("model.onnx", other_opset),
        ("model.onnx", lambda d, n: (d / n).write_bytes(b"no model")),
    ],
)
def test_another_model_behind_a_right_digest_is_found(
    name: str, change: Callable[[Path, str], None], copy: Path
) -> None:
    """The check also fails if this machine computes other results than the exporting one."""
    change(copy, name)
    reseal(copy, name)
    with refuses(BadPackage):
        check_package(copy)


def test_opsets_are_read_as_onnx_reads_them(model: Path) -> None:
    for path in model.glob("*.onnx"):
        expected = {(entry.domain, entry.version) for entry in onnx.load(path).opset_import}
        with path.open("rb") as file:
            assert set(operator_set_versions(file)) == expected


# Signing


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_keys(tmp_path_factory.mktemp("keys"))


def write_keys(directory: Path) -> tuple[Path, Path]:
    """A fresh private key, and its public one."""
    private = ed25519.Ed25519PrivateKey.generate()
    return write_private(directory / "private.pem", private), write_public(directory / "public.pem", private)


def write_private(path: Path, key: ed25519.Ed25519PrivateKey | x25519.X25519PrivateKey) -> Path:
    plain = serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return path


def write_public(path: Path, key: ed25519.Ed25519PrivateKey | x25519.X25519PrivateKey) -> Path:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.write_bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return path


def test_a_signature_is_checked_with_its_key(copy: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    private, public = keys
    with refuses(BadPackage):
        check_package(copy, public)
    sign_package(copy, private)
    assert f"signature  of {public}" in check_package(copy, public)
    with refuses(BadPackage):
        check_package(copy)
    (tmp_path / "other").mkdir()
    with refuses(BadPackage):
        check_package(copy, write_keys(tmp_path / "other")[1])
    signature = (copy / SIGNATURE).read_bytes()
    (copy / SIGNATURE).write_bytes(signature[:-1] + bytes([signature[-1] ^ 1]))
    with refuses(BadPackage):
        check_package(copy, public)


def test_a_forged_model_does_not_pass_for_a_signed_one(copy: Path, keys: tuple[Path, Path]) -> None:
    private, public = keys
    sign_package(copy, private)
    (copy / "MODEL_CARD.md").write_text("trust me")
    reseal(copy, "MODEL_CARD.md")
    with refuses(BadPackage):
        check_package(copy, public)


def test_keys_that_are_none(copy: Path, keys: tuple[Path, Path], tmp_path: Path) -> None:
    sign_package(copy, keys[0])
    other = x25519.X25519PrivateKey.generate()
    write_private(tmp_path / "other.pem", other)
    (tmp_path / "text.pem").write_text("no key")
    for key in (tmp_path / "none.pem", tmp_path / "text.pem", write_public(tmp_path / "x.pem", other)):
        with refuses(BadPackage):
            check_package(copy, key)
    for name in ("none.pem", "text.pem", "other.pem"):
        with refuses(UserError):
            sign_package(copy, tmp_path / name)


def test_what_is_not_whole_is_not_signed(copy: Path, keys: tuple[Path, Path]) -> None:
    (copy / "MODEL_CARD.md").write_text("other")
    with pytest.raises(UserError, match=r"MODEL_CARD\.md"):
        sign_package(copy, keys[0])
    assert not (copy / SIGNATURE).exists()


def test_tokens_are_drawn_with_padding(tmp_path: Path) -> None:
    """A document's ids stay below the number of buckets, and end in padding."""
    from slipstream.pipeline.export.package.samples import draw_tensors

    signature = Signature((TensorSpec("tokens", "int32", (2, 9)),), "classification", "y", ("a", "b"), buckets=50)
    tokens = draw_tensors(signature)["tokens"]
    assert tokens.dtype == np.int32 and tokens.min() >= 0 and tokens.max() < 50
    ended = np.cumsum(tokens == 0, axis=2) > 0
    assert (tokens[ended] == 0).all() and (tokens == 0).any() and (tokens != 0).any()


def resigned(package: Path, **files: dict[str, object] | None) -> None:
    """Enter other files into the manifest and update its digest, as the package's author could."""
    manifest = json.loads((package / MANIFEST).read_text())
    manifest["files"] |= files
    (package / MANIFEST).write_text(json.dumps(manifest))
    (package / DIGEST).write_text(digest_line((package / MANIFEST).read_bytes()))


def one_finding(package: Path) -> str:
    ran = run_check(package)
    assert ran.returncode == 1 and not ran.stdout and ran.stderr.count("\n") == 1, ran.stdout + ran.stderr
    return ran.stderr


@pytest.mark.parametrize("name", ["model.onnx", "signature.json", "manifest.json", "extra.txt"])
def test_a_symbolic_link_to_a_file_is_found(name: str, copy: Path, tmp_path: Path) -> None:
    """Even where it leads to the very bytes: it may lead elsewhere tomorrow."""
    (tmp_path / "elsewhere").write_bytes((copy / name).read_bytes() if (copy / name).exists() else b"")
    (copy / name).unlink(missing_ok=True)
    (copy / name).symlink_to(tmp_path / "elsewhere")
    same_wording(one_finding(copy))


def test_a_symbolic_link_to_a_directory_or_to_nothing_is_found(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for target in ("elsewhere", "absent"):
        (copy / "link").symlink_to(tmp_path / target)
        assert f"{copy / 'link'}: a symbolic link" in one_finding(copy)
        (copy / "link").unlink()
    assert run_check(copy).returncode == 0
    (tmp_path / "whole").symlink_to(copy)  # how a package is reached is its user's affair
    assert run_check(tmp_path / "whole").returncode == 0


@pytest.mark.parametrize("name", ["../secret", "{}/secret", "sub/../model.onnx", "./model.onnx", "model.onnx/", ""])
def test_a_manifest_lists_files_of_the_package_only(name: str, copy: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"1234")
    name = name.format(tmp_path)
    resigned(copy, **{name: {"size": 4, "sha256": hashlib.sha256(b"1234").hexdigest()}})
    same_wording(one_finding(copy))


@pytest.mark.parametrize("raw", [False, True])
def test_the_model_that_is_run_is_one_of_the_package(raw: bool, copy: Path, tmp_path: Path) -> None:
    shutil.copy(copy / "model.onnx", tmp_path / "other.onnx")
    deployed = json.loads((copy / "signature.json").read_text())
    (deployed["raw"] if raw else deployed)["model"] = "../other.onnx"
    text = json.dumps(deployed).encode()
    (copy / "signature.json").write_bytes(text)
    resigned(copy, **{"signature.json": {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}})
    expected = f"{copy / 'signature.json'}: names the model '../other.onnx', which is not in the manifest"
    assert expected in one_finding(copy)
