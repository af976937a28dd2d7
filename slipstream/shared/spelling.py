"""Spelling of settings for users, where it differs from the stored value.

Users write ``null`` for off, automatic and unlimited, and alternatives as one setting with variants. Inside they remain
the values of earlier releases, so digests, caches and checkpoints of before are found. TOML has no null; there, and in
every other place, the values of earlier releases are read, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from slipstream.shared.errors import UserError

Schema = dict[str, Any]
#: Keys of this module in pydantic's JSON schemas.
NULL, VARIANT = "slipstream_null", "slipstream_variant"


@dataclass(frozen=True)
class Null:
    """Annotation of a setting that may be null, which is the value ``stored`` inside."""

    stored: object

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def read(value: object) -> object:
            return self.stored if value is None else value

        return core_schema.no_info_before_validator_function(read, handler(source))

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {**handler(core), NULL: self.stored}


@dataclass(frozen=True)
class SettingVariant:
    """Annotation of a number that is the variant ``name`` of the setting ``of``; 0 inside if it is not chosen."""

    of: str
    name: str

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> Schema:
        return {**handler(core), VARIANT: [self.of, self.name]}


#: Annotations by the kind of value inside.
NO_TEXT, NO_NUMBER, NONE = Null(""), Null(0), Null("none")


@cache
def variants_of(cls: Any) -> dict[str, dict[str, str]]:
    """Return the fields of a class's settings with variants, by setting and variant."""
    found: dict[str, dict[str, str]] = {}
    for name, each in vars(cls)["__pydantic_fields__"].items():
        for mark in each.metadata:
            if isinstance(mark, SettingVariant):
                found.setdefault(mark.of, {})[mark.name] = name
    return found


def with_fields(cls: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the fields for those with variants. Raises ``UserError`` for other than one variant."""
    found = dict(given)
    for setting, fields in variants_of(cls).items():
        if (chosen := found.pop(setting, None)) is None:
            continue
        path, expected = f"{cls.section}.{setting}", f"null or one of {', '.join(f'{{{each}: …}}' for each in fields)}"
        if not isinstance(chosen, Mapping) or len(chosen) != 1 or not set(chosen) <= set(fields):
            raise UserError(f"{path}: {chosen!r} is not allowed; expected {expected}")
        ((name, value),) = chosen.items()
        if not value:
            raise UserError(f"{path}.{name}: {value!r} is not allowed; expected more than 0, or {path} null")
        found[fields[name]] = value
    return found


def users_schema(schema: Schema) -> Schema:
    """Return pydantic's schema as users spell settings."""
    found = dict(schema)
    if "$defs" in schema:
        found["$defs"] = {name: users_schema(node) for name, node in schema["$defs"].items()}
    if "properties" in schema:
        found["properties"] = users_properties(schema["properties"])
    if NULL not in found:
        return found
    stored, title, default = found.pop(NULL), found.pop("title", ""), found.pop("default", None)
    outer = {"title": title, "default": None if default == stored else default}
    return {"anyOf": [found, {"type": "null"}], **outer}


def users_properties(properties: Schema) -> Schema:
    found: Schema = {}
    for name, node in properties.items():
        if VARIANT not in node:
            found[name] = users_schema(node)
            continue
        of, variant = node[VARIANT]
        former = {key: value for key, value in node.items() if key != VARIANT}
        found[name] = {**former, "deprecated": True}
        limited = {key: value for key, value in former.items() if key not in ("default", "minimum")}
        it = {"type": "object", "title": node["title"], "properties": {variant: {**limited, "exclusiveMinimum": 0}}}
        kinds = found.setdefault(of, {"title": of.replace("_", " ").capitalize(), "anyOf": [], "default": None})
        kinds["anyOf"] = [each for each in kinds["anyOf"] if each != {"type": "null"}]
        kinds["anyOf"] += [{**it, "required": [variant], "additionalProperties": False}, {"type": "null"}]
    return found


def present_names(node: Schema) -> list[str]:
    """Return the names of settings without those of earlier releases."""
    return [name for name, each in users_properties(node.get("properties", {})).items() if "deprecated" not in each]


def as_users_write(node: Schema, tree: Mapping[str, Any], below: Callable[[Schema], Schema]) -> dict[str, Any]:
    """Return settings as users spell them; ``below`` resolves references of the schema."""
    found: dict[str, Any] = {}
    for name, value in tree.items():
        child = node.get("properties", {}).get(name, {})
        if VARIANT in child:
            of, variant = child[VARIANT]
            found[of] = {variant: value} if value else found.get(of)
        elif isinstance(value, Mapping):
            found[name] = as_users_write(below(child), value, below)
        else:
            found[name] = None if NULL in child and value == child[NULL] else value
    return found


def old_spellings(
    node: Schema, tree: object, below: Callable[[Schema], Schema], path: str = ""
) -> Iterator[tuple[str, str]]:
    """Yield paths of settings in the spelling of earlier releases, with the present one."""
    for name, value in tree.items() if isinstance(tree, Mapping) else ():
        child, where = node.get("properties", {}).get(name, {}), f"{path}{name}"
        if VARIANT in child:
            of, variant = child[VARIANT]
            yield where, f"{path}{of}: {{{variant}: {value}}}" if value else f"{path}{of}: null"
        elif NULL in child and type(value) in (int, float, str) and value == child[NULL]:
            yield where, f"{where}: null"
        elif isinstance(value, Mapping):
            yield from old_spellings(below(child), value, below, f"{where}.")
