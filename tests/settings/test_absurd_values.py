"""Every setting accepts valid values and refuses others in one line that names it."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgpack
import pytest

import workflows.schedules.settings
from slipstream.config import RunConfig
from slipstream.operations.doctor.archive import Limits
from slipstream.pipeline.train.config import AugmentConfig, TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.models.transformer_config import TransformerConfig
from slipstream.shared.profiles.placement import Placement, Planned
from slipstream.shared.settings import LARGEST, LARGEST_EXACT, Settings, settings_schema, to_dict
from slipstream.shared.spelling import NULL
from tests.support.proving import first_few

assert all((RunConfig, Limits, TransformerConfig, Placement, workflows.schedules.settings))  # all classes are there
#: What a class cannot do without.
NEEDED: dict[type[Settings], dict[str, Any]] = {
    AugmentConfig: {"transform": "crop"},
    TransformerConfig: {"vocab_size": 16},
    Planned: {"take": "x", "rows": 1, "hours": [1.0, 2.0, 3.0], "dollars": [1.0, 2.0, 3.0], "interruptions": 0.0},
}
ABSURD = (-1, 2**31, 2**53, 2**63, 2**64, 10**400, 1.5, 1e300, True, False, math.nan, math.inf, -math.inf, "3", None)


#: Values of required settings by the type in the schema. Which classes there are depends on the modules loaded.
OF_TYPE = {"string": "x", "integer": 1, "number": 1.0, "array": []}


def required_values(cls: type[Settings]) -> dict[str, Any]:
    schema = settings_schema(cls)
    required = {name: schema["properties"][name] for name in schema.get("required", [])}
    return {name: OF_TYPE[of["type"]] for name, of in required.items() if "type" in of} | NEEDED.get(cls, {})


def settings_classes(base: type[Settings] = Settings) -> Iterator[type[Settings]]:
    for each in base.__subclasses__():
        if each.__module__.partition(".")[0] in ("slipstream", "workflows"):
            yield each
        yield from settings_classes(each)


def plain(hint: Any) -> Any:
    return plain(get_args(hint)[0]) if get_origin(hint) is Annotated else hint


def numbers(kind: type) -> list[Any]:
    """All settings of the type, or lists of it."""
    found = []
    for cls in dict.fromkeys(settings_classes()):
        for name, hint in get_type_hints(cls, include_extras=True).items():
            whole = plain(hint)
            listed = get_origin(whole) is list and plain(get_args(whole)[0]) is kind
            if name in {field.name for field in fields(cls)} and (whole is kind or listed):
                found.append(pytest.param(cls, name, listed, id=f"{cls.__name__}.{name}"))
    return found


def refusal(cls: type[Settings], name: str, value: object) -> str:
    """Why a value is not allowed; empty if it is. The same whichever way it comes."""
    said = set()
    for make in (cls.from_dict, lambda data: cls(**data)):
        try:
            made = make({**required_values(cls), name: value})
            assert msgpack.unpackb(msgpack.packb(to_dict(made))) == json.loads(json.dumps(to_dict(made)))
            said.add("")
        except UserError as error:
            said.add(error.message)
    (one,) = said
    return one


def may_be_null(cls: type[Settings], name: str) -> bool:
    return NULL in settings_schema(cls)["properties"][name]


def largest_of(name: str) -> int:
    return LARGEST_EXACT if name in ("seed", "smallest", "largest", "rows") else LARGEST


@pytest.mark.parametrize(("cls", "name", "listed"), first_few(numbers(int), 6))
def test_an_integer(cls: type[Settings], name: str, listed: bool) -> None:
    largest = largest_of(name)
    for value in ABSURD:
        message = refusal(cls, name, [value] if listed else value)
        if type(value) is int and 0 <= value <= largest and not message:
            continue
        if value is None and not listed and not message and may_be_null(cls, name):
            continue
        assert message, f"{value} was accepted"
        if name == "smallest" and message.endswith(f"expected at least collectives.smallest ({value})"):
            continue  # a size like others, but beyond the largest
        path = f"{cls.section}.{name}".removeprefix(".") + ("[0]" if listed else "")
        assert re.match(re.escape(path) + ": .* is not allowed; expected ", message), message
        assert "\n" not in message and len(message) < 300


@pytest.mark.parametrize(("cls", "name", "listed"), first_few(numbers(float), 16))
def test_a_number(cls: type[Settings], name: str, listed: bool) -> None:
    for value in (True, math.nan, math.inf, -math.inf, "3", 10**400):
        message = refusal(cls, name, [value] if listed else value)
        assert (
            message.startswith(f"{cls.section}.{name}".removeprefix(".")) and "\n" not in message and len(message) < 300
        ), message


def test_every_integer_has_a_largest_value_that_its_schema_says() -> None:
    checked = 0
    for cls in dict.fromkeys(settings_classes()):
        schema = settings_schema(cls)
        for node in (schema, *schema.get("$defs", {}).values()):
            for name, setting in node.get("properties", {}).items():
                setting = setting.get("items", setting)
                if setting.get("type") == "integer" and "enum" not in setting:
                    assert setting["maximum"] <= largest_of(name), (cls, name)
                    checked += 1
    assert checked > 40


def test_arguments_of_the_users_own_have_bounds_too() -> None:
    """Flyte's encoding holds no more than 64 bits."""
    for config in (
        {"model": {"arguments": {"hidden": [2**70]}}},
        {"model": {"arguments": {"a": {"b": -(2**63) - 1}}}},
        {"compression": {"students": [{"width": 2**64}]}},
        {"model": {"arguments": {"p": math.nan}}},
    ):
        with pytest.raises(UserError, match=r"^(model\.arguments|compression\.students): .*64 bits"):
            RunConfig.from_dict(config)


@pytest.mark.parametrize("seed", [20240101120000, LARGEST_EXACT])
def test_a_long_seed_works(seed: int) -> None:
    from slipstream.pipeline.train.checkpoint.state import generator_seed, seed_generators

    assert TrainingConfig(seed=seed).seed == seed
    assert generator_seed(7, 2) == 7 * 1_000_003 + 3  # as it was
    assert len({generator_seed(seed, rank) for rank in range(4)} | {generator_seed(seed - 1, 0)}) == 5
    seed_generators(generator_seed(seed, 3))
