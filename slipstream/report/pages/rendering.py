"""Renders the templates to HTML pages of one file each, which load nothing from elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slipstream.report import formatting

TEMPLATES = Path(__file__).with_name("templates")


@cache
def environment(templates: Path = TEMPLATES) -> Environment:
    """Whatever is not marked as HTML is escaped: column names, labels and values come from the user's data. Templates
    know the functions of :mod:`slipstream.report.formatting` as ``fmt``."""
    jinja = Environment(
        loader=FileSystemLoader(templates),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.globals["fmt"] = formatting
    return jinja


def render(template: str, **context: object) -> str:
    """The template with ``context``."""
    return environment().get_template(template).render(context)
