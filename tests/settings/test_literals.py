"""Settings in Flyte's literals: whatever client encodes them, they are the same settings with the same keys."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest
from flytekit import FlyteContextManager
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine, TypeTransformerFailedError
from flytekit.models.literals import Binary, Literal, LiteralMap, Primitive, Scalar
from google.protobuf.json_format import MessageToDict, Parse
from google.protobuf.struct_pb2 import Struct

from slipstream.config import FULL_LEARNING_RATE, FineTuneConfig, RunConfig
from slipstream.flyte import open_settings
from slipstream.flyte.last_line import error_line
from slipstream.flyte.stage import section_digest
from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.settings import Settings, nested_classes, portable, to_dict
from slipstream.shared.source.config import DataConfig


def as_struct(data: Any) -> Literal:
    """As the console sends it: the numbers of a Struct are floats."""
    return Literal(scalar=Scalar(generic=Parse(json.dumps(data), Struct())))


def as_msgpack(data: Any) -> Literal:
    """As ``pyflyte`` and the defaults of launch plans have it."""
    return Literal(scalar=Scalar(binary=Binary(value=msgpack.packb(data), tag="msgpack")))


def as_json(data: Any) -> Literal:
    return Literal(scalar=Scalar(primitive=Primitive(string_value=json.dumps(data))))


ENCODINGS = {"Struct": as_struct, "msgpack": as_msgpack, "JSON": as_json}
Encode = Callable[[Any], Literal]


@pytest.fixture(params=ENCODINGS)
def encode(request: pytest.FixtureRequest) -> Encode:
    return ENCODINGS[request.param]


def decoded(literal: Literal, kind: type[Settings] = RunConfig) -> Any:
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), literal, kind)


def sent(value: Any, kind: type[Settings]) -> Literal:
    """As this project's own client sends it."""
    kind_of_literal = TypeEngine.to_literal_type(kind)
    return TypeEngine.to_literal(FlyteContextManager.current_context(), value, kind, kind_of_literal)


def digests(config: Any) -> dict[str, str]:
    """What the cache keys of the stages take of a configuration."""
    return {name: section_digest(getattr(config, name)) for name in nested_classes(type(config))} | {
        "": section_digest(config)
    }


RUN = {
    "data": {"image_size": [28, 28], "split": {"seed": 3}},
    "model": {"name": "resnet", "arguments": {"widths": [16, 8], "depth": 2}},
    "training": {
        "epochs": 3,
        "batch_size": 48,
        "accumulation": "auto",
        "learning_rate": 1,
        "compile": True,
        "augment": [{"transform": "crop", "padding": 4}, {"transform": "colour", "contrast": [0, 2]}],
    },
    "compression": {"students": [{"widths": [8, 4]}]},
    "sweep": {
        "space": {
            "model.arguments.dropout": {"low": 0.0, "high": 1.0},
            "model.arguments.depth": {"low": 1, "high": 4},
            "model.arguments.widths": {"choices": [[16, 8], [32, 16]]},
            "training.batch_size": {"choices": [64, 128]},
            "training.learning_rate": {"low": 0.001, "high": 1.0, "log": True},
        }
    },
}


def test_whole_numbers_stay_whole_and_ranges_continuous(encode: Encode) -> None:
    expected = RunConfig.from_dict(RUN)
    for tree in (RUN, to_dict(expected), portable(expected)):
        config = decoded(encode(tree))
        assert config == expected and digests(config) == digests(expected)
        assert json.dumps(to_dict(config), sort_keys=True) == json.dumps(to_dict(expected), sort_keys=True)


def test_a_relaunch_of_the_console_has_the_same_keys() -> None:
    expected = RunConfig.from_dict(RUN)
    literal = sent(expected, RunConfig)
    again = decoded(as_struct(msgpack.unpackb(literal.scalar.binary.value)))
    assert again == expected and digests(again) == digests(expected)


def hashes_of_sections(config: Literal) -> dict[str, str]:
    """The hashes that stand for the sections of a configuration in the cache keys of the stages."""
    from tasks.config import read_config

    state = FlyteContextManager.current_context().new_execution_state()
    local = state.with_params(mode=ExecutionState.Mode.LOCAL_TASK_EXECUTION)
    context = FlyteContextManager.current_context().with_execution_state(local)
    with FlyteContextManager.with_context(context) as inside:
        made = read_config.dispatch_execute(inside, LiteralMap({"config": config}))
    return {name: literal.hash for name, literal in made.literals.items() if literal.hash}


def test_the_first_task_gives_the_same_hashes_to_a_relaunch() -> None:
    expected = RunConfig.from_dict({**RUN, "compression": {}})
    literal = sent(expected, RunConfig)
    found = hashes_of_sections(literal)
    assert {"model", "training", "export", "collectives", "config"} <= found.keys()
    assert hashes_of_sections(as_struct(msgpack.unpackb(literal.scalar.binary.value))) == found
    assert hashes_of_sections(as_struct(to_dict(expected))) == found


def test_the_defaults_have_the_same_keys_in_full_and_left_out(encode: Encode) -> None:
    for tree in ({}, to_dict(RunConfig()), portable(RunConfig())):
        assert digests(decoded(encode(tree))) == digests(RunConfig())


@pytest.mark.parametrize(
    ("model", "value", "expected"),
    [
        ({"name": "auto"}, {"hidden": [64.0]}, {"hidden": [64]}),
        ({"name": "mlp"}, {"dropout": 1.0, "frequencies": 8.0}, {"dropout": 1.0, "frequencies": 8}),
        (
            {"name": "transformer"},
            {
                "hidden_size": 64.0,
                "rope_theta": 1e4,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 32.0},
            },
            {
                "hidden_size": 64,
                "rope_theta": 1e4,
                "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 32},
            },
        ),
        ({"name": "mlp"}, {"unknown": 2.0}, {"unknown": 2.0}),
    ],
)
def test_an_integral_float_is_an_integer_only_for_a_parameter_of_integers(
    model: dict[str, Any], value: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = decoded(as_struct({"model": {**model, "arguments": value}})).model.arguments
    assert json.dumps(found, sort_keys=True) == json.dumps(expected, sort_keys=True)


OWN = """
def build(signature, rate: float = 1, size: "int | None" = None, sizes=(8, 8), ratio=0.5, other=None): ...
"""


def test_the_parameters_of_a_users_factory_decide_in_pods_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that shows an execution does not run the code that the execution names."""
    (tmp_path / "own_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    arguments = {"rate": 3.0, "size": 2.0, "sizes": [4.0, 2.0], "ratio": 1.0, "other": 5.0}
    literal = as_struct({"model": {"name": "own_net:build", "arguments": arguments}})
    assert decoded(literal).model.arguments == arguments and "own_net" not in sys.modules
    monkeypatch.setattr(open_settings, "in_a_pod", lambda: True)
    found = decoded(literal).model.arguments
    assert json.dumps(found, sort_keys=True) == json.dumps({**arguments, "size": 2, "sizes": [4, 2]}, sort_keys=True)


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"trainin": {}}, "trainin: unknown setting; did you mean 'training'?"),
        ({"training": {"epoch": 3}}, "training.epoch: unknown setting; did you mean 'epochs'?"),
        ({"training": {"epochs": 2.7}}, "training.epochs: 2.7 is not allowed; expected an integer"),
        ({"training": {"epochs": "3"}}, 'training.epochs: "3" is not allowed; expected an integer'),
        ({"training": {"augment": [{"transform": "crop", "padding": 2.5}]}}, "training.augment[0].padding: 2.5"),
        ({"training": {"augment": "crop"}}, 'training.augment: "crop" is not allowed; expected a list'),
        ({"model": {"arguments": "{"}}, "model.arguments: is not valid JSON: "),
        ({"model": {"arguments": "[1]"}}, "model.arguments: [1] is not allowed; expected a mapping"),
        ({"sweep": {"space": [1.5]}}, "sweep.space: [1.5] is not allowed; expected a mapping"),
        ({"compression": {"students": 2.5}}, "compression.students: 2.5 is not allowed; expected a list"),
        (
            {"model": {"name": ["mlp"], "arguments": {"hidden": 2.0}}},
            'model.name: ["mlp"] is not allowed; expected a text',
        ),
        (
            {"model": {"name": "mlpp", "arguments": {"hidden": 2.0}}},
            'model.name: "mlpp" is not allowed; expected one of',
        ),
        ({"model": None, "compression": {"students": {}}}, "compression.students: {} is not allowed; expected a list"),
    ],
)
def test_wrong_settings_are_refused_in_one_line(encode: Encode, data: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError) as refusal:
        decoded(encode(data))
    assert refusal.value.message.startswith(line) and "\n" not in refusal.value.message


def test_another_class_is_no_configuration() -> None:
    with pytest.raises(TypeTransformerFailedError, match="expected RunConfig, not TrainingConfig"):
        sent(TrainingConfig(), RunConfig)


def test_a_task_says_the_refusal_in_one_line() -> None:
    """flytekit's own text starts with the literal."""
    from tasks.prepare import list_data

    inputs = {"config": as_struct({"training": {"epochs": 2.7}})}
    with pytest.raises(TypeTransformerFailedError) as refused:
        TypeEngine.literal_map_to_kwargs(
            FlyteContextManager.current_context(), LiteralMap(inputs), list_data.python_interface.inputs
        )
    assert error_line(refused.value) == "training.epochs: 2.7 is not allowed; expected an integer"


# Defaults of fine-tuning


def test_fine_tuning_keeps_the_defaults_that_a_client_does_not_change(encode: Encode) -> None:
    expected = FineTuneConfig(data=DataConfig(length=2048))
    given: dict[str, Any] = {"data": {"length": 2048}}
    for literal in (encode(given), encode({**given, "training": None}), sent(given, FineTuneConfig)):
        config = decoded(literal, FineTuneConfig)
        assert config == expected and digests(config) == digests(expected)
    assert (config.model.lora.rank, config.training.epochs, config.training.learning_rate) == (16, 2, 2e-4)


def test_all_weights_of_a_base_have_a_learning_rate_of_their_own(encode: Encode) -> None:
    all_weights = {"model": {"lora": {"rank": 0}}}
    config = decoded(encode(all_weights), FineTuneConfig)
    assert (config.model.lora.rank, config.training.epochs) == (0, 2)
    assert config.training.learning_rate == FULL_LEARNING_RATE < FineTuneConfig().training.learning_rate
    given = decoded(encode({**all_weights, "training": {"learning_rate": 0.1}}), FineTuneConfig)
    assert given.training.learning_rate == 0.1


def test_fine_tuning_takes_the_settings_of_any_run() -> None:
    config = RunConfig.from_dict(RUN)
    assert to_dict(decoded(sent(config, FineTuneConfig), FineTuneConfig)) == to_dict(config)


# Every registered literal


def test_every_default_is_the_same_from_every_client(package_for: Callable[[str], RegistrationArchive]) -> None:
    """The inputs of every launch plan, encoded again as pyflyte, FlyteRemote, the console and flytectl do."""
    seen = 0
    kinds: list[type[Settings]] = [RunConfig, *nested_classes(RunConfig).values()]
    for plan, spec in package_for("local").launch_plans.items():
        given = {name: each.default for name, each in spec.default_inputs.parameters.items()}
        for literal in map(Literal.from_flyte_idl, [*given.values(), *spec.fixed_inputs.literals.values()]):
            if not (literal.scalar and literal.scalar.binary):
                continue
            tree = msgpack.unpackb(literal.scalar.binary.value)
            kind = next(each for each in kinds if fits(each, tree))
            config = decoded(literal, kind)
            clients = [
                as_struct(tree),
                as_struct(to_dict(config)),
                as_struct(MessageToDict(as_struct(tree).scalar.generic)),
                as_json(tree),
                as_msgpack(to_dict(config)),
                *(sent(value, kind) for value in (config, to_dict(config), json.dumps(to_dict(config)))),
            ]
            for client in clients:
                again = decoded(client, kind)
                assert again == config and digests(again) == digests(config), plan
            seen += 1
    assert seen >= 8


def fits(kind: type[Settings], tree: dict[str, Any]) -> bool:
    return to_dict(kind()).keys() == tree.keys()
