"""Record of a fine-tuned model about its base, and which of its fields are trusted."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slipstream.shared.artifacts.format import Artifact, ArtifactWriter, DamagedArtifact
from slipstream.shared.artifacts.prepared.token_rows import CONFIG, WHOLE
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import BaseRecord
from slipstream.shared.models.config import LoraConfig, ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import MODEL, Architecture, TrainedModel, write_trained
from tests.support.bases import SIGNATURE, fingerprint_base, make_base, shaped_by_data
from tests.support.wording import refuses, same_wording

LORA = LoraConfig(rank=2, targets=["q_proj"])


def fine_tuned(place: Path, lora: LoraConfig) -> Path:
    """Write a model with its initial weights, and its base in the same directory."""
    base = make_base(place / "base", tokenizer=False)
    config = shaped_by_data(ModelConfig(base=str(base), lora=lora))
    weights = build_model(config, SIGNATURE, 0).own_state()
    record = BaseRecord(str(base), fingerprint_base(str(base)))
    write_trained(place / "model", Architecture(config, SIGNATURE, base=record), weights, weights, {})
    return place / "model"


@pytest.mark.parametrize("gone", [True, False])
def test_without_its_base_a_model_of_its_own_is_measured_beside_another(
    gone: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = TrainedModel.open(fine_tuned(tmp_path, LoraConfig()))
    assert model.load_base() is not None
    if gone:
        (tmp_path / "base").rename(tmp_path / "moved")
    else:
        (tmp_path / "base" / CONFIG).write_bytes((tmp_path / "base" / CONFIG).read_bytes() + b" ")
    with caplog.at_level(logging.WARNING, "slipstream.models"):
        assert model.load_base() is None
    (record,) = caplog.records
    same_wording(record.getMessage())
    model.load()


def test_adapters_without_their_base_are_refused(tmp_path: Path) -> None:
    model = TrainedModel.open(fine_tuned(tmp_path, LORA))
    assert model.load_base() is not None
    (tmp_path / "base").rename(tmp_path / "moved")
    for load in (model.load, model.load_base):
        with refuses(UserError):
            load()


def with_record(directory: Path, place: Path, change: dict[str, Any]) -> Path:
    """The same artifact with another ``model.json``."""
    old, writer = Artifact.open(directory, KIND), ArtifactWriter(place)
    for name in old.files:
        content = old.read_bytes(name)
        if name == MODEL:
            stated = json.loads(content)
            stated["config"] |= change.pop("config", {})
            content = json.dumps(stated | change).encode()
        writer.write_bytes(name, content)
    writer.finish(KIND, {})
    return place


@pytest.mark.parametrize(
    ("lora", "change"),
    [
        (LORA, {"base": None}),
        (LORA, {"base": {"address": "elsewhere", "digest": "0" * 32}}),
        (LORA, {"config": {"base": ""}}),
        (LoraConfig(), {"config": {"base": "elsewhere"}}),
    ],
    ids=["no record", "another record", "no base", "base of a whole model"],
)
def test_a_record_that_contradicts_itself_is_damaged(lora: LoraConfig, change: dict[str, Any], tmp_path: Path) -> None:
    directory = fine_tuned(tmp_path, lora)
    TrainedModel.open(with_record(directory, tmp_path / "same", {}))
    with refuses(DamagedArtifact, match=r"model\.json:"):
        TrainedModel.open(with_record(directory, tmp_path / "other", dict(change)))


def test_the_base_that_is_checked_is_the_one_that_is_built_from(tmp_path: Path) -> None:
    model = TrainedModel.open(fine_tuned(tmp_path, LORA))
    (tmp_path / "base" / WHOLE).rename(tmp_path / "base" / "moved.safetensors")
    other = make_base(tmp_path / "other", tokenizer=False)
    config = ModelConfig("transformer", model.config.arguments, base=str(tmp_path / "none"), lora=LORA)
    record = BaseRecord(str(other), fingerprint_base(str(other)))
    assert Architecture(config, SIGNATURE, base=record).on_base().adapted
