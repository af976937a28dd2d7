"""Settings: frozen pydantic dataclasses whose errors are one line that names the setting.

All entry points apply the same checks: :meth:`Settings.from_json` and :meth:`Settings.from_dict` for a user's text, the
constructor for Python callers, launch plans and Flyte's decoder. They are dataclasses because flytekit's command line
requires ``from_json``; a pydantic model's errors would reach the user as tracebacks, and flytekit would accept ``"3"``
for an ``int``.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, field, fields
from dataclasses import Field as DataclassField
from functools import cache, partial, wraps
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Self,
    TypeGuard,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
)

import pydantic.dataclasses
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import ArgsKwargs

from slipstream.shared.errors import UserError
from slipstream.shared.spelling import NULL, as_users_write, present_names, users_schema, with_fields
from slipstream.shared.toml_file import read_toml

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, validate_default=True)
Schema = dict[str, Any]
#: Largest integers: for counts, as in Flyte, Kubernetes and libraries; and for seeds and numbers of bytes, which stay
#: exact in programs that read JSON's numbers as float64.
LARGEST, LARGEST_EXACT = 2**31 - 1, 2**53 - 1
#: Maximum number of characters of a value that a message shows.
SHOWN = 100
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Seed = Annotated[int, Field(ge=0, le=LARGEST_EXACT)]
#: Annotation of settings that are newer than stored digests: at its default such a setting enters no digest.
LATER = "enters no digest at its default"


class TwiceError(Exception):
    """Error for a repeated key of a mapping."""

    def __init__(self, key: object, where: str = "", before: str = "") -> None:
        self.where = where
        super().__init__(f"{key!r} is given twice{before}; expected it once")


def each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object's pairs as a dictionary. Raises ``TwiceError`` for a repeated key."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise TwiceError(key)
        found[key] = value
    return found


class Settings:
    """Base of every settings class. ``section`` is its path in the user's file."""

    section: ClassVar[str] = ""
    if TYPE_CHECKING:  # :func:`settings` makes a dataclass of every subclass
        __dataclass_fields__: ClassVar[dict[str, DataclassField[Any]]]

    @model_validator(mode="before")
    @classmethod
    def _as_meant(cls, data: object) -> object:
        """Turn integral floats into integers (Flyte may send 3.0), and null (an empty ``training:``) into defaults."""
        if isinstance(data, ArgsKwargs):
            named = with_fields(cls, data.kwargs or {})
            return ArgsKwargs(
                tuple(map(integral_as_integer, data.args)), {name: integral_as_integer(v) for name, v in named.items()}
            )
        if isinstance(data, dict):
            return {name: integral_as_integer(value) for name, value in with_fields(cls, data).items()}
        return {} if data is None else data

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        self.check()
        return self

    def check(self) -> None:
        """Reject invalid combinations of valid settings; subclasses override it."""

    def reject(self, name: str, expected: str) -> UserError:
        """Return the error for one setting: its path, its value and the allowed values."""
        return wrong(path_of(self.section, [name]), getattr(self, name), expected)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the user's JSON. Raises ``UserError`` with the path of the first wrong setting."""
        try:
            with suppress(ValueError, RecursionError):  # pydantic explains these
                given = json.loads(text, object_pairs_hook=each_once)
                if isinstance(given, Mapping) and (defaults := cls.defaults_for(given)):
                    text = json.dumps(with_defaults(defaults, given))
            return TypeAdapter(cls).validate_json(text)
        except TwiceError as error:
            raise UserError(str(error)) from None
        except ValidationError as error:
            raise explain(cls, error) from None

    @classmethod
    def defaults_for(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return defaults that apply to what ``given``, the user's settings, lack at any level."""
        return own_defaults(cast("Any", cls))  # for mypy no dataclass can be hashed, nor its class

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Build from nested dictionaries, as YAML or TOML give them; dates become text. Raises ``UserError``."""
        try:
            return cls.from_json(json.dumps(data, default=str))
        except RecursionError:
            raise UserError(f"{cls.section or 'config'}: is nested too deeply; settings have fewer levels") from None

    @classmethod
    def from_toml(cls, path: Path, missing: str = "") -> Self:
        """Read a TOML file like :func:`.read_toml`. Raises ``UserError`` with the paths of file and setting."""
        tables = read_toml(path, missing)
        try:
            return cls.from_dict(tables)
        except UserError as error:
            raise UserError(f"{path}: {error.message}") from None


def integral_as_integer(value: object) -> object:
    """Return an integral float as an integer, also in a list; fields of type float accept integers.

    Floats above the largest exact integer remain; records hold no integers of that size.
    """
    if isinstance(value, list):
        return [integral_as_integer(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_EXACT else value


S = TypeVar("S", bound=Settings)


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def settings(cls: type[S]) -> type[S]:
    """Make a subclass of :class:`Settings` a frozen dataclass; its constructor raises ``UserError``.

    The docstring below a field becomes its description in the schema. Defaults go into the field itself or into
    ``dataclasses.field(default_factory=...)``, as flytekit does not understand pydantic's ``Field`` there.
    """
    made: Any = pydantic.dataclasses.dataclass(frozen=True, config=STRICT)(cls)
    validate = made.__init__

    @wraps(validate)
    def construct(self: S, *arguments: Any, **named: Any) -> None:
        try:
            validate(self, *arguments, **named)
        except ValidationError as error:
            raise explain(made, error) from None

    made.__init__ = construct
    return made


def to_dict(value: Settings) -> dict[str, Any]:
    """Return settings as digests and records have them."""
    return asdict(value)


def as_written(value: Settings) -> dict[str, Any]:
    """Return settings as users write them, with ``null`` and variants."""
    schema = settings_schema(type(value))
    return as_users_write(schema, to_dict(value), partial(resolved, schema))


def counted_settings(value: Settings) -> dict[str, Any]:
    """Return settings as a dictionary for digests: without :data:`LATER` settings that have their default."""
    counted = {}
    for name, about in vars(type(value))["__pydantic_fields__"].items():
        found = getattr(value, name)
        if LATER not in about.metadata or found != about.get_default(call_default_factory=True):
            counted[name] = each_of(found, counted_settings)
    return counted


def each_of(value: object, change: Callable[[Settings], object]) -> object:
    """Return settings, or a list of settings, changed; any other value as it was."""
    if isinstance(value, list):
        return [each_of(item, change) for item in value]
    return change(value) if isinstance(value, Settings) else value


@cache
def own_defaults(cls: Any) -> dict[str, Any]:
    factories = {each.name: each.default_factory for each in fields(cls) if each.default_factory is not MISSING}
    defaults = {name: made for name, factory in factories.items() if isinstance(made := factory(), Settings)}
    found = {name: differences(to_dict(made), to_dict(type(made)())) for name, made in defaults.items()}
    return {name: changed for name, changed in found.items() if changed}


def differences(tree: Mapping[str, Any], usual: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: differences(value, usual[name]) if isinstance(value, Mapping) and usual[name] else value
        for name, value in tree.items()
        if value != usual[name]
    }


def with_defaults(defaults: object, value: object) -> object:
    """Return ``value``, with entries that its nested mappings lack taken from ``defaults``. None counts as empty."""
    if value is None and isinstance(defaults, Mapping):
        return defaults
    if not (isinstance(defaults, Mapping) and isinstance(value, Mapping)):
        return value
    return {**defaults, **{key: with_defaults(defaults.get(key), item) for key, item in value.items()}}


def settings_schema(cls: type[Settings]) -> Schema:
    """Return the JSON Schema of the input of :meth:`Settings.from_json`."""
    return TypeAdapter(cls).json_schema()


def described_schema(cls: type[Settings]) -> Schema:
    """Return the JSON Schema of what users write, with descriptions of the fields.

    pydantic itself would read the descriptions from the sources at the start of every command: a third of a second.
    """
    schema, classes = users_schema(settings_schema(cls)), {each.__name__: each for each in subclasses(Settings)}
    for name, node in (schema.get("$defs", {}) | {cls.__name__: schema}).items():
        for its_field, description in descriptions_of(classes[name]).items():
            node["properties"][its_field]["description"] = description
    return schema


def subclasses(cls: type[Settings]) -> Iterator[type[Settings]]:
    for each in cls.__subclasses__():
        yield each
        yield from subclasses(each)


def descriptions_of(cls: type[Settings]) -> dict[str, str]:
    """Return the docstrings below the fields of a class and its bases, by field."""
    (base,) = cls.__bases__
    found = descriptions_of(base) if base is not Settings else {}
    (tree,) = ast.parse(inspect.getsource(cls)).body
    for statement, below in pairwise(ast.iter_child_nodes(tree)):
        match statement, below:
            case ast.AnnAssign(target=ast.Name(its_field)), ast.Expr(ast.Constant(str(text))):
                found[its_field] = inspect.cleandoc(text)
    return found


def explain(cls: type[Settings], error: ValidationError) -> UserError:
    """Return the first of pydantic's errors as one line: the setting's path, its value and the allowed values."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, UserError):  # raised by check()
        return cause
    if first["type"] == "json_invalid":
        return UserError(f"the configuration is not valid JSON: {cause}")
    is_unknown = first["type"] == "unexpected_keyword_argument"
    node, place = walk(settings_schema(cls), first["loc"][:-1] if is_unknown else first["loc"])
    path, message = path_of(cls.section, place), first["msg"]
    if is_unknown:
        return UserError(unknown_setting(path, str(first["loc"][-1]), present_names(node)))
    expected = limits_of(node) if first["type"].startswith(("greater_than", "less_than")) else kind_of(node)
    if first["type"] == "missing":
        return UserError(f"{path}: is missing; expected {expected}")
    if first["type"] in ("finite_number", "dataclass_exact_type") or not expected:
        expected = message.removeprefix("Input should be ")
    return wrong(path or "config", first["input"], expected + (", or null" if NULL in node else ""))


def path_of(section: str, place: Sequence[str | int]) -> str:
    """Return the path of a setting, such as ``data.columns[1]``."""
    path = section + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place)
    return path.removeprefix(".")


def wrong(path: str, value: object, expected: str) -> UserError:
    text = json.dumps(each_of(value, to_dict), default=str)
    shown = text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."
    return UserError(f"{path}: {shown} is not allowed; expected {expected}")


def unknown_setting(section: str, key: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{path_of(section, [key])}: unknown setting; {hint}allowed here: {', '.join(sorted(names))}"


def nested_classes(cls: type[Settings]) -> dict[str, type[Settings]]:
    """Return the sections of a class by field."""
    return {name: kind for name, kind in kinds_of(cls).items() if is_settings(kind)}


def is_settings(kind: object) -> TypeGuard[type[Settings]]:
    return isinstance(kind, type) and issubclass(kind, Settings)


def kinds_of(cls: type[Settings]) -> dict[str, Any]:
    """Return the types of a class's fields, without limits."""
    return {name: field.annotation for name, field in vars(cls)["__pydantic_fields__"].items()}


def as_integers(value: object) -> object:
    """Return a value with integral floats as integers, at any depth."""
    if isinstance(value, Mapping):
        return {name: as_integers(item) for name, item in value.items()}
    return [as_integers(item) for item in value] if isinstance(value, list) else integral_as_integer(value)


def takes_integers(kind: object, default: object = None) -> bool:
    """Return True for the type of a parameter, or without one for a default, of integers or sequences of them."""
    words = set(re.findall(r"\w+", inspect.formatannotation(kind)))
    if words & {"int", "float"}:
        return "float" not in words
    items = default if isinstance(default, list | tuple) and default else [default]
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def with_integers(value: object, kind: object, default: object = None) -> object:
    """Return ``value`` with integral floats as integers where ``kind``, its type, has integers.

    Without a type that says so, the ``default`` of the parameter decides.
    """
    if is_settings(kind) and isinstance(value, Mapping):
        kinds = kinds_of(kind)
        return {name: with_integers(item, kinds.get(name)) for name, item in value.items()}
    return as_integers(value) if takes_integers(kind, default) else value


# Literals of Flyte


def portable(value: Settings) -> dict[str, Any]:
    """Return settings as a dictionary, in which those of any type are JSON text."""
    unrestricted = open_fields(type(value))

    def as_sent(name: str, of: object) -> object:
        return json.dumps(of) if name in unrestricted else each_of(of, portable)

    return {each.name: as_sent(each.name, getattr(value, each.name)) for each in fields(value)}


def open_fields(cls: type[Settings]) -> set[str]:
    """Return the fields of a class that take values of any type, such as ``model.arguments``."""
    return {name for name, kind in kinds_of(cls).items() if not {dict, list}.isdisjoint((kind, *get_args(kind)))}


# Allowed values in words


def walk(schema: Schema, location: Sequence[str | int]) -> tuple[Schema, list[str | int]]:
    """Return the schema's node for the setting at pydantic's ``location``, and the path in the user's terms.

    The path lacks the members of unions, which ``location`` names. The node is empty where the schema does not restrict
    values.
    """
    node, place = resolved(schema, schema), []
    for step in location:
        if member := node.get("discriminator", {}).get("mapping", {}).get(step):
            node = resolved(schema, {"$ref": member})
            continue
        below = node.get("items") if isinstance(step, int) else node.get("properties", {}).get(step)
        node = resolved(schema, below or node.get("additionalProperties") or {})
        place.append(step)
    return node, place


def resolved(schema: Schema, node: Schema) -> Schema:
    return schema["$defs"][node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def kind_of(node: Schema) -> str:
    if "enum" in node:
        return one_of(each for each in node["enum"] if NULL not in node or each != node[NULL])
    if union := node.get("discriminator"):
        return f"a mapping whose {union['propertyName']!r} is {one_of(union['mapping'])}"
    kinds = {"integer": "an integer", "number": "a number", "string": "a text", "boolean": "true or false"}
    if node.get("type") == "array":
        return f"a list of {kind_of(node['items'])}"
    return "a mapping" if "$ref" in node or node.get("type") == "object" else kinds.get(node.get("type", ""), "")


def one_of(choices: Iterable[object]) -> str:
    return "one of " + ", ".join(json.dumps(choice) for choice in choices)


def limits_of(node: Schema) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "more than",
        "maximum": "at most",
        "exclusiveMaximum": "less than",
    }
    return " and ".join(f"{said} {number(node[limit])}" for limit, said in words.items() if limit in node)


def number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
