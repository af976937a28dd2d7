"""A model too large for ONNX variants is exported as Hugging Face files; commands that need ONNX say so in one line."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from slipstream.operations.plan.serving.model import read_model
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.check import check_package, main
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.package.files import BadPackage
from slipstream.pipeline.export.package.sign import sign_package
from slipstream.pipeline.export.package.triton import write_repository
from slipstream.pipeline.promote.comparison import (
    ComparedPackage,
    Incomparable,
    evaluate_promotion,
    paired_predictions,
    promote_package,
)
from slipstream.pipeline.promote.config import PromotionConfig
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.report.engine import build_export
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.predict import TensorPredictor
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.export import read_export
from slipstream.shared.errors import UserError
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.stages import StageRun
from tests.support.tokens import LENGTH, VOCABULARY, data_with_words, small_transformer
from tests.support.toys import trained_on
from tests.support.wording import line_with, refuses, same_wording

WHY = "20,640 parameters are more than export.most_parameters, 20,639"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> PreparedData:
    return data_with_words(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def trained(data: PreparedData, tmp_path_factory: pytest.TempPathFactory) -> TrainedModel:
    directory = tmp_path_factory.mktemp("trained")
    small_transformer(directory, data, steps=3)
    return TrainedModel.open(directory)


@pytest.fixture(scope="module")
def exported(data: PreparedData, trained: TrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported") / "out"
    config = ExportConfig(most_parameters=20_639, half=True, tensorrt=True, licence="Apache-2.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slipstream.shared.artifacts.prepared.data.PreparedData.split", never)
        patch.setattr(
            engine, "code_versions_of", lambda artifact: ["0a1b", "2c3d"] if artifact is trained.artifact else []
        )
        engine.export(directory, trained, data, config, {"trained": "1"})
    return directory


def never(*_: Any) -> Any:
    raise AssertionError("no rows are read of a model that is not run")


def test_the_artifact_is_weights_tokenizer_and_what_they_are(exported: Path) -> None:
    files = {path.relative_to(exported).as_posix() for path in exported.rglob("*") if path.is_file()}
    assert not [name for name in files if name.endswith((".onnx", ".npz"))]
    assert files >= {f"hugging-face/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    report = read_export(exported)
    assert (report.variants, report.chosen, report.recommended, report.why) == ([], "", None, WHY)
    (library,) = report.libraries
    assert library.bytes == (exported / "hugging-face/model.safetensors").stat().st_size > 4 * 20_640
    signature = json.loads((exported / "signature.json").read_text())
    assert [each["name"] for each in signature["inputs"] + signature["outputs"]] == ["input_ids", "logits"]
    assert signature["outputs"][0]["shape"] == ["batch", LENGTH, VOCABULARY]
    assert (signature["model"], signature["samples"], signature["raw"], signature["no_onnx"]) == ("", None, None, WHY)
    card = (exported / "MODEL_CARD.md").read_text()
    assert f"There is no ONNX model: {WHY}." in card and "Licence: Apache-2.0." in card and "metric" not in card
    assert "\nTrained by code versions `0a1b`, then `2c3d`.\n" in card
    assert 'AutoModelForCausalLM.from_pretrained("hugging-face")' in card and "vllm serve hugging-face" in card


def test_the_line_that_is_told_loads_it(
    exported: Path, trained: TrainedModel, data: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(exported)
    line = read_export(exported).libraries[0].loaded_by["transformers"]
    theirs = eval(line, {"AutoModelForCausalLM": transformers.AutoModelForCausalLM}).eval()
    rows = torch.from_numpy(np.array(data.split("test")["tokens"][:8]))
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=rows).logits, trained.load()(rows), rtol=0, atol=1e-5)


@pytest.mark.prove
def test_at_the_limit_there_are_variants(trained: TrainedModel, data: PreparedData, tmp_path: Path) -> None:
    engine.export(tmp_path / "out", trained, data, ExportConfig(most_parameters=20_640, seconds=0.01), {})
    report = read_export(tmp_path / "out")
    assert report.recommended and [each.name for each in report.libraries] == ["hugging-face"]


def test_another_network_cannot_leave_so(tmp_path: Path) -> None:
    rows = write_table(tmp_path / "data", "classification")
    model: Any = trained_on(rows)
    with refuses(UserError, match="^export.most_parameters:"):
        engine.export(tmp_path / "out", model, rows, ExportConfig(most_parameters=10), {})


def test_check_verifies_the_files_and_says_what_it_cannot(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(exported)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[-2:] == [f"outputs    not compared, because there is no ONNX model: {WHY}", f"{exported}: complete"]
    weights = exported / "hugging-face/model.safetensors"
    whole = weights.read_bytes()
    try:
        weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with refuses(BadPackage, match=r"model\.safetensors:"):
            check_package(exported)
    finally:
        weights.write_bytes(whole)


def test_whoever_would_run_it_says_that_there_is_no_onnx_model(exported: Path, tmp_path: Path) -> None:
    with refuses(UserError, match=WHY):
        write_repository(exported, tmp_path / "repository")
    assert not (tmp_path / "repository").exists()
    with refuses(UserError, match=WHY):
        read_model(str(exported))
    with refuses(UserError):
        ServedModel(exported).by  # noqa: B018
    with refuses(UserError, match=WHY):
        TensorPredictor.of(ServedModel(exported))


@pytest.mark.prove
def test_the_first_is_promoted_and_no_other_is_compared_with_it(
    exported: Path, trained: TrainedModel, data: PreparedData, tmp_path: Path
) -> None:
    registry, config = Registry(str(tmp_path / "registry")), PromotionConfig()
    done = promote_package(exported, registry, data, config, evaluate_promotion(exported, registry, data, config))
    assert done.promoted
    assert check_package(registry.fetch(registry.history()[0], tmp_path / "fetched"))
    engine.export(tmp_path / "small", trained, data, ExportConfig(seconds=0.01), {"trained": "2"})
    refused = evaluate_promotion(tmp_path / "small", registry, data, config)
    assert not refused.passed
    same_wording(refused.why)
    with refuses(Incomparable):
        paired_predictions(ComparedPackage(exported), ComparedPackage(tmp_path / "small"), data)


def test_it_is_signed_like_any_other(exported: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    key = ed25519.Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "private.pem").write_bytes(key.private_bytes(*form))
    told = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "public.pem").write_bytes(key.public_key().public_bytes(*told))
    signed = sign_package(exported, tmp_path / "private.pem")
    try:
        assert "signature  of" in check_package(exported, tmp_path / "public.pem")[1]
    finally:
        signed.unlink()


def test_the_report_of_the_export_alone_tells_it(exported: Path, tmp_path: Path) -> None:
    summary = build_export(tmp_path / "runs", exported, [StageRun("export", 1.0, False)])
    assert summary.model_file == "model/hugging-face" and Path(summary.directory, summary.model_file).is_dir()
    text = str(summary)
    assert max(len(line) for line in text.splitlines() if "/runs/" not in line) <= 80
    same_wording(line_with("hugging-face/", text))
    assert f"No ONNX variants: {WHY}." in " ".join(text.split())
    page = Path(summary.directory, summary.report).read_text()
    assert f"No ONNX variants: {WHY}." in page and "vllm serve hugging-face" in page and "Recommended" not in page
