"""Settings that later versions added enter no digest at their default."""

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from slipstream.config import FineTuneConfig, RunConfig
from slipstream.flyte.stage import describe_inputs, section_digest
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.train.checkpoint.unfinished import UnfinishedTraining
from slipstream.pipeline.train.config import AugmentConfig, TrainingConfig, resume_settings
from slipstream.shared.artifacts.workspaces import content_key
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.settings import LATER, Settings, nested_classes, to_dict
from slipstream.shared.source.config import DataConfig
from tests.support.digests import SECTIONS

FINE_TUNING = {"model": "a8bb2b4376896fca", "training": "6135abf90f8edaf3", "": "d8cb0a96987fa1b0"}
TRAINING = TrainingConfig(batch_size=64)
INPUTS = {"prepared": "content", "model": ModelConfig(), "training": TRAINING, "code": ""}


def digests(config: RunConfig) -> dict[str, str]:
    sections = {name: getattr(config, name) for name in nested_classes(type(config))} | {"": config}
    return {name: section_digest(section)[:16] for name, section in sections.items()}


def test_cache_keys_of_default_settings_are_those_of_before() -> None:
    assert digests(RunConfig()) == SECTIONS
    assert digests(FineTuneConfig()) == {**SECTIONS, **FINE_TUNING}


@pytest.mark.parametrize(
    ("stage", "version", "inputs", "key"),
    [
        ("train", "", INPUTS, "d81bdc53b7ac87ccf0799304bb5cc2c1"),
        ("train", "", UnfinishedTraining().lasting(INPUTS), "ff031e2fefefa8227f8b62edc5f994e7"),
        ("prepare", "v", {"target": "y", "config": DataConfig(), "source": "s"}, "cc4810e96f2f171a7ce0359eea01a131"),
        ("export", "v", {"config": ExportConfig()}, "acb42735b4c6294bbf1224ea03b16e37"),
    ],
)
def test_keys_of_results_and_of_checkpoint_directories_are_those_of_before(
    stage: str, version: str, inputs: dict[str, object], key: str
) -> None:
    assert content_key(stage, version, describe_inputs(inputs)) == key


def test_the_identity_of_sweeps_is_that_of_before() -> None:
    identity = json.dumps(resume_settings(TRAINING), sort_keys=True).encode()
    assert hashlib.sha256(identity).hexdigest()[:16] == "ab7350f32b713971"


OTHER: dict[str, Any] = {
    "schedule": "linear",
    "balance_classes": True,
    "class_weights": {"yes": 2.0},
    "threshold": "f1",
    "metric": "accuracy",
}


def test_an_optimiser_and_its_settings_are_part_of_every_key() -> None:
    sgd = replace(TRAINING, optimizer="sgd", learning_rate=0.1)
    others = [TRAINING, sgd, replace(sgd, momentum=0.5), replace(sgd, nesterov=True)]
    assert len({section_digest(each) for each in others}) == len({str(resume_settings(each)) for each in others}) == 4


def test_an_augmentation_is_part_of_every_key() -> None:
    flip, crop = AugmentConfig("horizontal_flip"), AugmentConfig("crop", padding=2)
    others = [replace(TRAINING, augment=each) for each in ([], [flip], [flip, crop], [crop, flip])]
    assert len({section_digest(each) for each in others}) == len({str(resume_settings(each)) for each in others}) == 4
    assert resume_settings(others[1])["augment"] == [to_dict(flip)]


@pytest.mark.parametrize("name", OTHER)
def test_another_value_is_part_of_every_key(name: str) -> None:
    changed = replace(TRAINING, **{name: OTHER[name]})
    assert section_digest(changed) != section_digest(TRAINING)
    assert resume_settings(changed) == {**resume_settings(TRAINING), name: OTHER[name]}


def test_every_later_setting_of_the_training_is_tested() -> None:
    fields = vars(TrainingConfig)["__pydantic_fields__"]
    later = {name for name, about in fields.items() if LATER in about.metadata}
    others = {"augment", "error_costs", "optimizer", "momentum", "nesterov", "kernels"}
    assert later - others == OTHER.keys() and issubclass(TrainingConfig, Settings)
