"""``--config``: files, JSON and single values of settings, combined in their order."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, TypeVar, cast, get_args, get_origin

import yaml

from slipstream.config import RunConfig
from slipstream.shared.errors import UserError
from slipstream.shared.logs import logger
from slipstream.shared.settings import (
    Settings,
    TwiceError,
    each_once,
    kinds_of,
    nested_classes,
    resolved,
    settings_schema,
    with_defaults,
)
from slipstream.shared.spelling import old_spellings

#: A single value, such as ``training.epochs=3``.
VALUE = re.compile(r"([A-Za-z_]\w*(?:\.[^=/\\]+)*)=(.*)", re.DOTALL)
#: Unquoted texts that mean null in YAML.
NULLS = ("", "~", "null", "Null", "NULL")
LEADING_ZEROS = re.compile(r"^([-+]?)0+(?=\d)")
S = TypeVar("S", bound=Settings)


class YamlLoader(yaml.SafeLoader):
    """YAML as editors and JSON Schema interpret it.

    Unlike for PyYAML, ``1e-3`` is a number, ``010`` is 10, dates and ``1:30`` are text, and repeated keys are errors.
    """

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int | str:
        text = str(self.construct_scalar(node)).replace("_", "")
        if ":" in text:
            return text
        return int(text) if LEADING_ZEROS.match(text) else super().construct_yaml_int(node)

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        lines: dict[object, int] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                name, line = self.construct_object(key), key.start_mark.line + 1
                if name in lines:
                    raise TwiceError(name, f", line {line}", f", first in line {lines[name]}")
                lines[name] = line
        super().flatten_mapping(node)


YamlLoader.add_constructor("tag:yaml.org,2002:timestamp", YamlLoader.construct_yaml_str)
YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.construct_yaml_int)
YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_settings(cls: type[S], texts: Sequence[str]) -> S:
    """Return the settings that the values of ``--config`` give. Raises ``UserError``."""
    return combined(cls, [read_part(cls, text) for text in texts])


def combined(cls: type[S], parts: Sequence[Any]) -> S:
    """Return the settings of parts from :func:`read_part`: later ones override; one warning per old spelling."""
    if odd := [part for part in parts if not isinstance(part, Mapping | None)]:
        return cls.from_dict(odd[0])  # raises
    tree = reduce(with_defaults, parts, cast("object", {}))
    schema = settings_schema(cls)
    start = f"{cls.section}." if cls.section else ""
    for old, new in old_spellings(schema, tree, partial(resolved, schema), start):
        logger("settings").warning("%s: is read as in earlier releases; write %s", old, new)
    return cls.from_dict(tree)


def read_part(cls: type[Settings], text: str) -> Any:
    """Return what one value of ``--config`` says: a file, JSON, or ``setting=value``. Raises ``UserError``."""
    if text.lstrip().startswith(("{", "[")):
        try:
            given = json.loads(text, object_pairs_hook=each_once)
        except TwiceError as error:
            raise UserError(str(error)) from None
        except (ValueError, RecursionError):
            return cls.from_json(text)  # raises
    elif single := VALUE.fullmatch(text):
        given = single_value(cls, *single.groups())
    else:
        given = read_file(Path(text))
    return own_section(cls, given)


def own_section(cls: type[Settings], given: Any) -> Any:
    """Return the part for a section, whether ``given`` has all sections or only its settings."""
    sections = nested_classes(RunConfig)
    if sections.get(cls.section) is not cls or not isinstance(given, Mapping) or not given:
        return given
    return given.get(cls.section) if set(given) <= set(sections) - set(kinds_of(cls)) else given


def single_value(cls: type[Settings], path: str, text: str) -> dict[str, Any]:
    """Return the settings with the value ``text``, in YAML, of the one at ``path``."""
    names, kind, tree = [], cls if path.partition(".")[0] in kinds_of(cls) else RunConfig, path
    while tree:
        name, _, tree = tree.partition(".")
        names.append(name)
        kinds = kinds_of(kind)
        kind = nested_classes(kind).get(name, kind)
        if name in kinds and tree and dict in (kinds[name], get_origin(kinds[name])):
            names.append(tree)  # a column or a path, which may have dots
            break
    return reduce(lambda below, name: {name: below}, reversed(names), yaml_value(path, text, kinds.get(names[-1])))


def yaml_value(path: str, text: str, kind: object) -> Any:
    """Return a value in YAML; a setting of type text takes all but quoted texts and null unchanged."""
    plain = text.strip() or text
    of_text = kind is str or all(isinstance(choice, str) for choice in get_args(kind) or [0])
    if of_text and not (plain in NULLS or (len(plain) > 1 and plain[0] == plain[-1] in "'\"")):
        return plain
    try:
        value = yaml.load(LEADING_ZEROS.sub(r"\1", text) if kind else text, YamlLoader)
    except (TwiceError, ValueError, RecursionError, yaml.YAMLError) as error:
        if not of_text:
            raise UserError(f"{path}={text}: is not valid YAML: {' '.join(str(error).split())}") from None
        return plain
    return plain if of_text and not isinstance(value, str | None) else value


def read_file(path: Path) -> Any:
    """Return the content of a YAML file, or of JSON for other suffixes. Raises ``UserError``, with the line."""
    try:
        with path.open(encoding="utf-8") as file:
            is_yaml = path.suffix in (".yaml", ".yml")
            return yaml.load(file, YamlLoader) if is_yaml else json.load(file, object_pairs_hook=each_once)
    except TwiceError as error:
        raise UserError(f"{path}{error.where}: {error}") from None
    except FileNotFoundError:
        raise UserError(
            f"{path}: no such file; expected a YAML or JSON file of settings, JSON itself, or one value such as "
            "training.epochs=3"
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UserError(f"{path}{where}: not valid YAML: {error.problem or error.context}") from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path}, line {error.lineno}, column {error.colno}: not valid JSON: {error.msg}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from None
