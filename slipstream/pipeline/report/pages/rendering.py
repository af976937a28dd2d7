"""Renderer of self-contained, single-file HTML pages."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slipstream.shared import formatting

TEMPLATES = Path(__file__).with_name("templates")


@cache
def jinja_environment(templates: Path = TEMPLATES) -> Environment:
    """Return the Jinja environment, which escapes everything not marked as HTML.

    Column names, labels and values come from the user's data. Templates know :mod:`slipstream.shared.formatting` as
    ``fmt``.
    """
    jinja = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.globals["fmt"] = formatting
    return jinja


def render_page(template: str, **context: object) -> str:
    return jinja_environment().get_template(template).render(context)
