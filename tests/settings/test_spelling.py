"""Old and new spellings of a setting are one value, with the digests of earlier releases."""

from __future__ import annotations

import hashlib
import json
import logging
from dataclasses import fields
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.literals import Literal, Scalar
from google.protobuf.json_format import Parse
from google.protobuf.struct_pb2 import Struct
from jsonschema import Draft202012Validator

from slipstream.config import FULL_LEARNING_RATE, FineTuneConfig, RunConfig
from slipstream.config_values import read_settings
from slipstream.flyte.stage import section_digest
from slipstream.pipeline.train.config import TrainingConfig, resume_settings
from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings, as_written, described_schema, nested_classes, settings_schema, to_dict
from slipstream.shared.spelling import NULL
from tests.support.digests import SECTIONS
from tests.support.wording import refuses

#: Digests of the default sections, without that of the whole configuration.
DEFAULTS = {name: digest for name, digest in SECTIONS.items() if name}
#: Digests of settings that spelled off as before ``null`` was read.
CHANGED = {**DEFAULTS, "data": "1956dce3269b0161", "training": "a721d227d33bb495"}
#: The key of a checkpoint directory has these settings.
RESUMED = "68f89174f71d8507"
OLD: dict[str, Any] = {
    "training": {
        "clip_norm": 0,
        "patience": 0,
        "evaluate_every": 0,
        "checkpoint_every": 7,
        "recompute": "none",
        "parallel": {"shard": "none", "replicas": 0},
        "gradients": {"hook": "none", "bucket_cap_mb": 0},
    },
    "data": {"id": "", "quote": "", "image_channels": 0},
    "export": {"budget_ms": 0, "licence": ""},
    "model": {"quantise": "none"},
}
NEW: dict[str, Any] = {
    "training": {
        "clip_norm": None,
        "patience": None,
        "evaluate_every": None,
        "checkpoint_interval": {"steps": 7},
        "recompute": None,
        "parallel": {"shard": None, "replicas": None},
        "gradients": {"hook": None, "bucket_cap_mb": None},
    },
    "data": {"id": None, "quote": None, "image_channels": None},
    "export": {"budget_ms": None, "licence": None},
    "model": {"quantise": None},
}


def digests(config: RunConfig) -> dict[str, str]:
    return {each.name: section_digest(getattr(config, each.name))[:16] for each in fields(config)}


def null_settings(cls: type[Settings] = RunConfig) -> list[Any]:
    nodes = settings_schema(cls)["properties"]
    own = [
        pytest.param(cls, name, node[NULL], id=f"{cls.section}.{name}") for name, node in nodes.items() if NULL in node
    ]
    return own + [each for below in nested_classes(cls).values() for each in null_settings(below)]


def test_digests_and_keys_of_before_are_found() -> None:
    assert digests(RunConfig()) == DEFAULTS
    assert digests(RunConfig.from_dict(OLD)) == digests(RunConfig.from_dict(NEW)) == CHANGED
    resumed = json.dumps(resume_settings(TrainingConfig()), sort_keys=True)
    assert hashlib.sha256(resumed.encode()).hexdigest()[:16] == RESUMED


@pytest.mark.parametrize(("cls", "name", "stored"), null_settings())
def test_null_and_the_old_spelling_are_one_value(cls: type[Settings], name: str, stored: object) -> None:
    new, old = cls.from_dict({name: None}), cls.from_dict({name: stored})
    assert json.dumps(to_dict(new)) == json.dumps(to_dict(old)) and as_written(old)[name] is None
    assert cls(**{name: None}) == new


def test_settings_are_written_as_they_are_read() -> None:
    config = RunConfig.from_dict(OLD)
    written = as_written(config)
    assert RunConfig.from_dict(written) == config
    assert written["training"]["checkpoint_interval"] == {"steps": 7} and "checkpoint_every" not in written["training"]
    assert as_written(RunConfig())["training"]["checkpoint_interval"] is None
    schema = Draft202012Validator(described_schema(RunConfig))
    assert schema.is_valid(NEW) and schema.is_valid(OLD) and schema.is_valid(written)
    assert not schema.is_valid({"training": {"checkpoint_interval": {"steps": 7, "seconds": 3}}})
    assert not schema.is_valid({"training": {"epochs": None}})


@pytest.mark.parametrize(
    ("variant", "stored"),
    [("steps", "checkpoint_every"), ("seconds", "checkpoint_seconds"), *[("mean_time_between_failures",) * 2]],
)
def test_variants_of_the_interval(variant: str, stored: str) -> None:
    new = TrainingConfig.from_dict({"checkpoint_interval": {variant: 60}})
    assert new == TrainingConfig.from_dict({stored: 60}) and getattr(new, stored) == 60
    assert TrainingConfig.from_dict({"checkpoint_interval": None}) == TrainingConfig()


@pytest.mark.parametrize("wrong", [{"steps": 7, "seconds": 3}, {"step": 7}, {"steps": 0}, 7, {}])
def test_another_interval_is_refused(wrong: object) -> None:
    with refuses(UserError, match=r"^training\.checkpoint_interval(\.steps)?: "):
        TrainingConfig.from_dict({"checkpoint_interval": wrong})


def test_zero_stays_a_number_on_its_own_scale() -> None:
    zero = ("training.ema", "training.profile.steps", "training.warmup", "collectives.reuse_days")
    for path in zero:
        with refuses(UserError, match=f"^{path}: "):
            read_settings(RunConfig, [f"{path}=null"])


def test_one_line_names_the_new_spelling(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert read_settings(RunConfig, [json.dumps(NEW)]) == RunConfig.from_dict(OLD) and not caplog.messages
    read_settings(RunConfig, ["training.clip_norm=0", "training.checkpoint_every=7", "data.id=''"])
    assert caplog.messages == [
        "training.clip_norm: is read as in earlier releases; write training.clip_norm: null",
        "training.checkpoint_every: is read as in earlier releases; write training.checkpoint_interval: {steps: 7}",
        "data.id: is read as in earlier releases; write data.id: null",
    ]


def test_no_adapters_are_null() -> None:
    config = FineTuneConfig.from_dict({"model": {"lora": {"rank": None}}})
    assert config == FineTuneConfig.from_dict({"model": {"lora": {"rank": 0}}})
    assert config.training.learning_rate == FULL_LEARNING_RATE and FineTuneConfig().model.lora.rank == 16


def test_clients_send_null_and_variants() -> None:
    """As the console does, in a Struct."""
    literal = Literal(scalar=Scalar(generic=Parse(json.dumps(NEW), Struct())))
    context = FlyteContextManager.current_context()
    assert TypeEngine.to_python_value(context, literal, RunConfig) == RunConfig.from_dict(OLD)
    metadata = TypeEngine.to_literal_type(RunConfig).metadata["properties"]["training"]["properties"]
    assert metadata["clip_norm"] == {"anyOf": [{"type": "number"}, {"type": "null"}], "default": 1.0}
    assert [each["type"] for each in metadata["checkpoint_interval"]["anyOf"]] == ["object"] * 3 + ["null"]
