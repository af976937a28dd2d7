"""Schemas that objects have to fit: Kubernetes' own, by kubernetes-validate, and published definitions of others'."""

import copy
import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubernetes_validate import utils, validate
from referencing import Registry, Resource

from tests.support import REPOSITORY

#: CustomResourceDefinitions as published, next to the checkout; optional.
CRDS = REPOSITORY.parent / "shared/data/crds"
VERSIONS = ("1.31", "1.34", "1.36")
BASE = "https://kubernetes.io/api/"
Schema = dict[str, Any]
#: kubernetes-validate would read its files, of megabytes, for each object.
utils.schema_contents = cache(utils.schema_contents)
Path = tuple[str | int, ...]


def errors(tree: Mapping[str, Any]) -> list[str]:
    """Why no API server takes the object; one line for each flaw that its schema shows."""
    try:
        return [error.message for error in validator(tree["apiVersion"], tree["kind"]).iter_errors(tree)]
    except (KeyError, FileNotFoundError) as error:
        return [f"no schema: {error}"]


@cache
def errors_by_version(text: str) -> tuple[str, ...]:
    """What kubernetes-validate says, strictly, of one of Kubernetes' own objects, as JSON, in each of ``VERSIONS``."""
    found = []
    for version in VERSIONS:
        try:
            validate(json.loads(text), version, strict=True)
        except (utils.ValidationError, utils.SchemaNotFoundError) as error:
            found.append(f"{version}: {error.message}")
    return tuple(found)


def is_core(api_version: str) -> bool:
    """Whether it is a group of Kubernetes' own: those of others have other domains."""
    group = api_version.rpartition("/")[0]
    return "." not in group or (group.endswith(".k8s.io") and group != "kueue.x-k8s.io")


@cache
def validator(api_version: str, kind: str) -> Draft202012Validator:
    schema = core_schema(api_version, kind) if is_core(api_version) else crd_schema(api_version, kind)
    return Draft202012Validator(schema, registry=registry())


@cache
def registry() -> Registry[Any]:
    definitions = utils.schema_contents(f"{folder()}/_definitions.json", VERSIONS[-1])
    return Resource.from_contents(definitions) @ Registry()


def folder() -> str:
    version = next(each for each in utils.all_versions() if each.startswith(f"{VERSIONS[-1]}."))
    return f"kubernetes-json-schema/v{version}-local-strict"


@cache
def core_schema(api_version: str, kind: str) -> Schema:
    schema: Schema = utils.schema_contents(f"{folder()}/{name_of(api_version, kind)}.json", VERSIONS[-1])
    return schema


def name_of(api_version: str, kind: str) -> str:
    """As kubernetes-validate calls its files."""
    group, _, version = api_version.rpartition("/")
    return "-".join(filter(None, (kind.lower(), group.partition(".")[0], version)))


@cache
def crd_schema(api_version: str, kind: str) -> Schema:
    """The definition's, where nothing may stand that it does not name; the metadata are Kubernetes' own."""
    group, _, version = api_version.partition("/")
    for path in sorted(CRDS.glob(f"{group}_*.yaml")):
        definition = yaml.safe_load(path.read_text(encoding="utf-8"))["spec"]
        if definition["names"]["kind"] == kind:
            schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in definition["versions"]}
            found = closed(copy.deepcopy(schemas[version]))
            found["$id"] = f"{BASE}{name_of(api_version, kind)}"
            found["properties"]["metadata"] = core_schema("v1", "ConfigMap")["properties"]["metadata"]
            found["required"] = [*found.get("required", []), "apiVersion", "kind", "metadata"]
            return found
    raise FileNotFoundError(f"{api_version} {kind}")


def closed(schema: Any) -> Any:
    """OpenAPI's schema as JSON Schema has it, closed to other keys but where the API server keeps them."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if made.pop("x-kubernetes-int-or-string", False):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    is_schema = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    return made


def keys(tree: Mapping[str, Any]) -> Iterator[tuple[Path, bool, bool]]:
    """Every key of an object, as the path to it; whether only the schema's own may stand there; whether it must."""
    checker = validator(tree["apiVersion"], tree["kind"])
    resolver = registry().resolver(f"{BASE}_definitions.json")

    def resolved(schema: Schema) -> Schema:
        while "$ref" in schema:
            contents: Schema = resolver.lookup(schema["$ref"]).contents
            schema = contents
        return schema

    yield from keys_of(tree, checker.schema, (), resolved)


def keys_of(
    tree: Any, schema: Schema, path: Path, resolved: Callable[[Schema], Schema]
) -> Iterator[tuple[Path, bool, bool]]:
    schema = resolved(schema)
    if isinstance(tree, list):
        for index, item in enumerate(tree):
            yield from keys_of(item, schema.get("items", {}), (*path, index), resolved)
    if isinstance(tree, dict):
        properties = schema.get("properties", {})
        for key, value in tree.items():
            yield (*path, key), schema.get("additionalProperties") is False, key in schema.get("required", ())
            yield from keys_of(value, properties.get(key, {}), (*path, key), resolved)


def mutated(tree: Mapping[str, Any], path: Path, name: str) -> dict[str, Any]:
    """A copy whose key at ``path`` is called ``name``; without it if that is ""."""
    made = copy.deepcopy(dict(tree))
    above: Any = made
    for step in path[:-1]:
        above = above[step]
    value = above.pop(path[-1])
    if name:
        above[name] = value
    return made
