"""A wrong setting is named by its path, with its value and what is allowed, whichever way it comes in."""

from __future__ import annotations

import pickle

import pytest

from tasks.config import RunConfig
from tasks.errors import UserError
from tasks.train.config import TrainingConfig


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"trainin": {}}', "trainin: unknown setting; did you mean 'training'?"),
        ('{"training": {"epoch": 3}}', "training.epoch: unknown setting; did you mean 'epochs'?"),
        ('{"training": {"epochs": 2.7}}', "training.epochs: 2.7 is not allowed; expected an integer"),
        ('{"training": {"epochs": "3"}}', 'training.epochs: "3" is not allowed; expected an integer'),
        ('{"training": {"epochs": true}}', "training.epochs: true is not allowed; expected an integer"),
        ('{"training": {"epochs": 0}}', "training.epochs: 0 is not allowed; expected at least 1"),
        ('{"training": {"warmup": 1}}', "training.warmup: 1.0 is not allowed; expected at least 0 and less than 1"),
        ('{"training": {"learning_rate": 1e999}}', "training.learning_rate: Infinity is not allowed"),
        ('{"training": {"precision": "fp8"}}', 'expected one of "auto", "fp32", "bf16", "fp16"'),
        ('{"data": {"split": {"test": 0.9}}}', "data.split.test: 0.9 is not allowed; expected less than 0.85"),
        ('{"data": {"columns": "a,b"}}', 'data.columns: "a,b" is not allowed; expected a list of a text'),
        ('{"data": {"columns": ["a", 1]}}', "data.columns[1]: 1 is not allowed; expected a text"),
        ('{"model": {"name": "transformer"}}', "model.name"),
        ('{"collectives": {"operations": ["gossip"]}}', "collectives.operations"),
        ('{"collectives": {"smallest": 4096, "largest": 1024}}', "collectives.largest: 1024"),
        ('{"export": 5}', "export: 5 is not allowed; expected a mapping"),
        ("[1]", "config: [1] is not allowed"),
        ("{", "not valid JSON"),
    ],
)
def test_the_command_line_rejects(text: str, message: str) -> None:
    with pytest.raises(UserError) as refusal:
        RunConfig.from_json(text)
    assert message in refusal.value.message and "\n" not in refusal.value.message


def test_python_callers_pass_through_the_same_checks() -> None:
    with pytest.raises(UserError, match=r"training\.batch_size: 0"):
        TrainingConfig(batch_size=0)


def test_whole_floats_are_taken_as_integers_and_integers_as_floats() -> None:
    config = TrainingConfig(epochs=3.0, learning_rate=1)  # type: ignore[arg-type]
    assert (config.epochs, type(config.epochs)) == (3, int)
    assert (config.learning_rate, type(config.learning_rate)) == (1.0, float)


def test_defaults_survive_an_empty_file_and_partial_settings() -> None:
    assert RunConfig.from_json("null") == RunConfig.from_json("{}") == RunConfig()
    config = RunConfig.from_json('{"data": {"split": {"seed": 4}}}')
    assert config.data.split.seed == 4 and config.data.split.test == 0.15 and config.training == TrainingConfig()


def test_the_error_crosses_a_process_boundary() -> None:
    error = pickle.loads(pickle.dumps(UserError("one\n  line")))
    assert isinstance(error, UserError) and error.message == "one line"
