"""YAML files from the templates in ``templates/``, and the one function by which values get into them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

#: First line of every file, by which a later call recognises its own files.
MARK = "# Written by slipstream manifests"
TEMPLATES = Path(__file__).with_name("templates")
#: Characters that JSON allows in a string and YAML does not, or takes for a line break.
SPECIAL = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


@dataclass(frozen=True)
class ManifestFile:
    """Output file; ``path`` is relative to the output directory, and ``purpose`` is printed."""

    path: str
    purpose: str
    text: str


def quoted(value: object) -> str:
    """Return a value as JSON, which in YAML is the same value on one line, whatever characters it holds."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return SPECIAL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


@cache
def jinja_environment() -> Environment:
    """Return the environment; ``finalize`` passes every value of every template through :func:`quoted`."""
    return Environment(
        loader=FileSystemLoader(TEMPLATES),
        finalize=quoted,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def render_file(path: str, purpose: str, values: Mapping[str, object], template: str = "") -> ManifestFile:
    """Render the template of this path, or ``template``; equal values give equal bytes."""
    head = f"{MARK} for the profile {quoted(values['profile'])}: {purpose}.\n"
    return ManifestFile(path, purpose, head + jinja_environment().get_template(template or path).render(values))
