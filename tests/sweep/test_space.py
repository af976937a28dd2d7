"""The settings that a sweep may search, and errors for others."""

from typing import Any

import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.sweep.space import searched_parameters, trial_config, values_in_words, with_values
from slipstream.shared.errors import UserError
from slipstream.shared.settings import to_dict
from tests.support.wording import refuses


def config_of(space: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.from_dict({**more, "sweep": {"space": space}})


def test_values_are_put_where_the_paths_say_and_nowhere_else() -> None:
    given = RunConfig.from_dict({"model": {"arguments": {"dropout": 0.1}}, "training": {"epochs": 3}})
    values = {"training.learning_rate": 0.5, "training.gradients.hook": "fp16", "model.arguments.hidden": [8, 8]}
    tried = with_values(given, values)
    assert (
        tried.training.learning_rate == 0.5 and tried.training.epochs == 3 and tried.training.gradients.hook == "fp16"
    )
    assert tried.model.arguments == {"dropout": 0.1, "hidden": [8, 8]}
    changed, before = to_dict(tried), to_dict(given)
    assert {name for name in changed if changed[name] != before[name]} == {"training", "model"}


def test_a_trial_is_one_process_without_what_serves_a_whole_training() -> None:
    given = RunConfig.from_dict(
        {"training": {"parallel": {"shard": "weights"}, "checkpoint_uri": "s3://b/c", "profile": {"steps": 5}}}
    )
    training = trial_config(given, {"training.weight_decay": 0.5}).training
    assert not training.parallel.divides and not training.checkpoint_uri and not training.profile.steps
    assert training.weight_decay == 0.5 and training.epochs == given.training.epochs


def test_momentum_can_be_searched_with_sgd_alone() -> None:
    space = {"training.momentum": {"low": 0.5, "high": 0.99}, "training.learning_rate": {"low": 0.01, "high": 0.5}}
    config = config_of(space, training={"optimizer": "sgd", "learning_rate": 0.1, "nesterov": True})
    assert [each.path for each in searched_parameters(config)] == sorted(space)
    tried = trial_config(config, {"training.momentum": 0.5, "training.learning_rate": 0.2}).training
    assert (tried.optimizer, tried.momentum, tried.learning_rate, tried.nesterov) == ("sgd", 0.5, 0.2, True)
    with pytest.raises(UserError, match=r"training\.momentum: .* only sgd"):
        searched_parameters(config_of({"training.momentum": space["training.momentum"]}))


def test_ranges_of_whole_numbers_are_whole() -> None:
    found = {
        each.path: each
        for each in searched_parameters(
            config_of(
                {
                    "training.batch_size": {"low": 16, "high": 256, "log": True},
                    "training.weight_decay": {"low": 0, "high": 1},
                    "model.arguments.blocks": {"low": 1, "high": 4},
                    "model.arguments.dropout": {"low": 0.0, "high": 1.0},
                }
            )
        )
    }
    assert [path for path, each in found.items() if each.whole] == ["model.arguments.blocks", "training.batch_size"]
    assert found["training.batch_size"].extremes == [16, 256]


@pytest.mark.parametrize(
    "space",
    [
        {},
        {"training.lerning_rate": {"low": 1, "high": 2}},
        {"training.learning_rate": {"low": 2, "high": 1}},
        {"training.learning_rate": {"low": 1, "high": 1}},
        {"training.learning_rate": {"low": 0, "high": 1, "log": True}},
        {"training.learning_rate": {"low": 1}},
        {"training.learning_rate": {"lo": 1}},
        {"training.learning_rate": 3},
        {"training.learning_rate": {"choices": [0.1]}},
        {"training.learning_rate": {"choices": [0.1, 0.2], "low": 0.1}},
        {"training.learning_rate": {"low": -1, "high": 1}},
        {"training.precision": {"choices": ["fp32", 3]}},
        {"training.learning_rate": {"choices": [0.1, "fast"]}},
        {"training.precision": {"low": 1, "high": 2}},
        {"training.batch_size": {"low": 1.5, "high": 9}},
        {"training.accumulation": {"choices": [1, 2]}},
        {"training.gradients": {"choices": [1, 2]}},
        {"training.epochs.more": {"choices": [1, 2]}},
        {"model.name": {"choices": ["mlp", "x:y z"]}},
        {"data.seed": {"choices": [1, 2]}},
    ],
)
def test_what_cannot_be_searched_is_said_in_one_line(space: dict[str, Any]) -> None:
    with refuses(UserError) as error:
        searched_parameters(config_of(space))
    assert "\n" not in error.value.message and "sweep.space" in error.value.message


def test_settings_in_words() -> None:
    values = {"training.learning_rate": 0.0123456, "model.arguments.hidden": [8, 8], "training.precision": "bf16"}
    assert values_in_words(values) == "hidden [8, 8], learning_rate 0.01235, precision bf16"
    assert values_in_words({}) == "as given"
