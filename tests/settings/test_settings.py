"""Wrong settings are named by their path, value and allowed values, from every source."""

import dataclasses
import json
import pickle
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal

import pytest
from flytekit import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from pydantic import Field

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings, settings, to_dict
from slipstream.shared.source.config import DataConfig
from tests.support.wording import refuses


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ('{"trainin": {}}', "trainin"),
        ('{"training": {"epoch": 3}}', "training.epoch"),
        ('{"training": {"epochs": 2.7}}', "training.epochs"),
        ('{"training": {"epochs": "3"}}', "training.epochs"),
        ('{"training": {"epochs": true}}', "training.epochs"),
        ('{"training": {"epochs": 0}}', "training.epochs"),
        ('{"training": {"warmup": 1}}', "training.warmup"),
        ('{"training": {"learning_rate": 1e999}}', "training.learning_rate"),
        ('{"training": {"precision": "fp8"}}', "training.precision"),
        ('{"data": {"split": {"test": 0.9}}}', "data.split.test"),
        ('{"data": {"columns": "a,b"}}', "data.columns"),
        ('{"data": {"columns": ["a", 1]}}', "data.columns[1]"),
        ('{"data": {"image_size": [28.5, 28]}}', "data.image_size[0]"),
        ('{"data": {"image_size": [0, 28]}}', "data.image_size[0]"),
        ('{"data": {"types": {"zip": "code"}}}', "data.types.zip"),
        ('{"data": {"types": ["zip"]}}', "data.types"),
        ('{"data": {"split": {"sed": 1}}}', "data.split.sed"),
        ('{"data": {"header": 1}}', "data.header"),
        ('{"export": {"decide_at_batch": 2}}', "export.decide_at_batch"),
        ('{"model": {"name": "perceptron"}}', "model.name"),
        ('{"collectives": {"operations": ["gossip"]}}', "collectives.operations"),
        ('{"collectives": {"smallest": 4096, "largest": 1024}}', "collectives.largest"),
        ('{"export": 5}', "export"),
        ("[1]", "config"),
        ("{", "the configuration"),
    ],
)
def test_the_command_line_rejects(text: str, setting: str) -> None:
    with refuses(UserError) as refusal:
        RunConfig.from_json(text)
    assert refusal.value.message.startswith(setting) and "\n" not in refusal.value.message


def test_python_callers_pass_through_the_same_checks() -> None:
    with pytest.raises(UserError, match=r"training\.batch_size: 0"):
        TrainingConfig(batch_size=0)
    with refuses(UserError, match=r"training\.epoch:"):
        TrainingConfig(epoch=3)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainingConfig().epochs = 3  # type: ignore[misc]


def test_whole_floats_are_taken_as_integers_and_integers_as_floats() -> None:
    config = TrainingConfig(epochs=3.0, learning_rate=1)  # type: ignore[arg-type]
    assert (config.epochs, type(config.epochs)) == (3, int)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)
    assert DataConfig(image_size=[28.0, 28]).image_size == [28, 28]  # type: ignore[list-item]
    assert RunConfig.from_json('{"training": {"epochs": 3.0}}').training == TrainingConfig(epochs=3)


def test_defaults_survive_an_empty_file_and_partial_settings() -> None:
    assert RunConfig.from_json("null") == RunConfig.from_json("{}") == RunConfig()
    config = RunConfig.from_json('{"data": {"split": {"seed": 4}}}')
    assert config.data.split.seed == 4 and config.data.split.test == 0.15 and config.training == TrainingConfig()


def test_settings_survive_flytes_literal_pickle_and_json() -> None:
    config = RunConfig.from_json(
        '{"model": {"arguments": {"hidden": [64, 32], "p": 0.5, "n": null}}, "data": {"id": "i"}}'
    )
    context, kind = FlyteContextManager.current_context(), TypeEngine.to_literal_type(RunConfig)
    literal = TypeEngine.to_literal(context, config, RunConfig, kind)
    assert TypeEngine.to_python_value(context, literal, RunConfig) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert RunConfig.from_json(json.dumps(to_dict(config))) == config


def test_a_file_says_what_inline_json_says(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data:\n  time: day\n  split: {validation_from: 2024-05-01, test_from: 2024-06-30T12:00:00}\n"
        "training:\n  learning_rate: 1e-3\nexport:\n"
    )
    config = read_settings(RunConfig, [str(path)])
    assert config.data.split.validation_from == "2024-05-01" and config.data.split.test_from == "2024-06-30T12:00:00"
    assert config.training.learning_rate == 0.001 and config.export == RunConfig().export
    path.with_suffix(".json").write_text('{"training": {"learning_rate": 1e-3}}')
    assert read_settings(RunConfig, [str(path.with_suffix(".json"))]).training == config.training


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("training:\n  epochs: 1\ndata:\ntraining:\n  seed: 2\n", "line 4: 'training' is given twice, first in line 1"),
        (
            "data:\n  split:\n    seed: 1\n    test: 0.1\n    seed: 2\n",
            "line 5: 'seed' is given twice, first in line 3",
        ),
        ("model: {arguments: {1: a, 1: b}}", "line 1: 1 is given twice, first in line 1"),
        ("a: &x {b: 1}\nmodel:\n  arguments:\n    <<: *x\n    c: 1\n    c: 2", "line 6: 'c' is given twice"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as refusal:
        read_settings(RunConfig, [str(path)])
    assert refusal.value.message.startswith(f"{path}, {message}") and "\n" not in refusal.value.message


def test_a_key_that_is_given_twice_in_json_is_refused_too(tmp_path: Path) -> None:
    text = '{"training": {"epochs": 1}, "data": {}, "training": {"seed": 2}}'
    path = tmp_path / "run.json"
    path.write_text(text)
    for read in (lambda: read_settings(RunConfig, [str(path)]), lambda: RunConfig.from_json(text)):
        with refuses(UserError):
            read()


@pytest.mark.parametrize(("name", "text"), [("a.json", f"[{10**4200}0{0:0200}]"), ("a.json", "[" * 100_000)])
def test_a_file_that_no_parser_takes_is_one_line(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with refuses(UserError) as refusal:
        read_settings(RunConfig, [str(tmp_path / name)])
    assert len(refusal.value.message) < 400


def test_a_merged_key_may_be_given_again(tmp_path: Path) -> None:
    """YAML's ``<<`` gives what is then replaced."""
    path = tmp_path / "run.yaml"
    path.write_text("training: &all\n  epochs: 3\n  seed: 1\nmodel:\n  arguments: {<<: *all, seed: 5}\n")
    assert read_settings(RunConfig, [str(path)]).model.arguments == {"epochs": 3, "seed": 5}


@settings
class Replicated(Settings):
    kind: Literal["ddp"] = "ddp"
    bucket: Annotated[int, Field(ge=1)] = 25


@settings
class Sharded(Settings):
    kind: Literal["fsdp"] = "fsdp"
    shards: Annotated[int, Field(ge=2)] = 2


@settings
class Parallel(Settings):
    section = "training"

    parallel: Annotated[Replicated | Sharded, Field(discriminator="kind")] = field(default_factory=Replicated)


@pytest.mark.parametrize(
    "text",
    ['{"kind": "fsdp", "shards": 1}', '{"kind": "fsdp", "shard": 4}', '{"kind": "ddp", "shards": 4}', '{"kind": "tp"}'],
)
def test_a_section_that_is_one_of_several_kinds(text: str) -> None:
    chosen = Parallel.from_json('{"parallel": {"kind": "fsdp", "shards": 4.0}}')
    assert chosen.parallel == Sharded(shards=4)
    with refuses(UserError):
        Parallel.from_json(f'{{"parallel": {text}}}')


def test_the_error_crosses_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(UserError("one\n  line")))
    assert isinstance(error, UserError) and error.message == "one line"
