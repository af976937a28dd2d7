"""Settings: frozen dataclasses that check themselves and name the setting that is wrong.

There are two ways in, and both reject the same things: :meth:`Settings.from_json` is what ``pyflyte run`` calls with
what the user wrote, ``__post_init__`` is what everyone else passes through (Python callers, launch plans, Flyte's own
decoder). flytekit by itself ignores unknown keys and truncates 2.7 to 2 for an ``int`` field.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Self

from tasks.errors import UserError


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
) -> Any:
    """A dataclass field with a default and the range or the choices that are allowed."""
    limits = {"at_least": at_least, "at_most": at_most, "above": above, "below": below, "choices": choices}
    metadata = {name: limit for name, limit in limits.items() if limit is not None}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Settings:
    """Base of every settings class. ``section`` is the path under which the user finds it."""

    section = ""

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            path = join(self.section, field.name)
            value = conform(path, hints[field.name], getattr(self, field.name))
            check_limits(path, field.metadata, value)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """Reject combinations that no single setting shows to be wrong; overridden where there are some."""

    def reject(self, name: str, expected: str) -> UserError:
        """The error for one setting: its path, its value and what is allowed."""
        return wrong(join(self.section, name), getattr(self, name), expected)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse what the user wrote. Raises ``UserError`` with the path of the first setting that is wrong."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"the configuration is not valid JSON: {error}") from None
        return cls.from_dict({} if data is None else data)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Build from nested dictionaries, as JSON or YAML give them. Raises ``UserError``."""
        if not isinstance(data, dict):
            raise wrong(cls.section or "config", data, "a mapping of settings")
        hints = typing.get_type_hints(cls)
        fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
        for key in data:
            if key not in fields:
                raise UserError(unknown(cls.section, str(key), list(fields)))
        return cls(
            **{
                name: hint.from_dict({} if data[name] is None else data[name]) if is_settings(hint) else data[name]
                for name, hint in fields.items()
                if name in data
            }
        )


def to_dict(settings: Settings) -> dict[str, Any]:
    """The settings as nested dictionaries that JSON can hold."""
    return dataclasses.asdict(settings)


def is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def wrong(path: str, value: Any, expected: str) -> UserError:
    return UserError(f"{path}: {json.dumps(value, default=str)} is not allowed; expected {expected}")


def unknown(section: str, key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{join(section, key)}: unknown setting; {hint}allowed here: {', '.join(sorted(names))}"


def conform(path: str, hint: Any, value: Any) -> Any:
    """``value`` if it has the type ``hint``, with 3.0 accepted as the int 3 (Flyte may send ints as floats)."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(hint) if option is not type(None)]
        return None if value is None else conform(path, options[0], value)
    if hint is Any:
        return value
    if origin is list:
        if not isinstance(value, (list, tuple)):
            raise wrong(path, value, f"a list of {name_of(typing.get_args(hint)[0])}")
        return [conform(f"{path}[{i}]", typing.get_args(hint)[0], item) for i, item in enumerate(value)]
    if origin is dict:
        if not isinstance(value, dict):
            raise wrong(path, value, "a mapping")
        key_type, value_type = typing.get_args(hint)
        return {conform(path, key_type, key): conform(f"{path}.{key}", value_type, v) for key, v in value.items()}
    if is_settings(hint):
        return value if isinstance(value, hint) else hint.from_dict(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise wrong(path, value, name_of(hint))
    if isinstance(value, float) and not math.isfinite(value):
        raise wrong(path, value, "a finite number")
    return value


def name_of(hint: Any) -> str:
    names = {int: "an integer", float: "a number", str: "a text", bool: "true or false"}
    return names.get(hint, str(hint))


def check_limits(path: str, limits: Any, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            check_limits(join(path, str(key)), limits, item)
        return
    for item in value if isinstance(value, list) else [value]:
        if "choices" in limits and item not in limits["choices"]:
            raise wrong(path, item, "one of " + ", ".join(json.dumps(choice) for choice in limits["choices"]))
        tests = (
            ("at_least", lambda a, b: a >= b, "at least"),
            ("at_most", lambda a, b: a <= b, "at most"),
            ("above", lambda a, b: a > b, "more than"),
            ("below", lambda a, b: a < b, "less than"),
        )
        if any(name in limits and not holds(item, limits[name]) for name, holds, _ in tests):
            spelled = " and ".join(f"{words} {limits[name]:g}" for name, _, words in tests if name in limits)
            raise wrong(path, item, spelled)
