"""Renderer of self-contained, single-file HTML pages, among them that of a running training."""

from __future__ import annotations

from datetime import datetime
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from slipstream.shared import formatting
from slipstream.shared.artifacts.results.devices import TrainingDevices
from slipstream.shared.artifacts.results.training import LiveProgress

TEMPLATES = Path(__file__).with_name("templates")


@cache
def jinja_environment(templates: Path = TEMPLATES) -> Environment:
    """Return the Jinja environment, which escapes everything not marked as HTML.

    Column names and values come from the user's data. Templates know :mod:`slipstream.shared.formatting` as ``fmt``.
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


def training_page(so_far: LiveProgress, made_at: datetime, devices: TrainingDevices | None = None) -> str:
    from slipstream.pipeline.report.pages import charts, device_charts  # they load Matplotlib

    return render_page(
        "training_page.html",
        so_far=so_far,
        loss=charts.loss(so_far) if so_far.steps or so_far.evaluations else None,
        learning_rate=charts.learning_rate(so_far) if so_far.steps else None,
        busy=device_charts.busy(devices) if devices else None,
        memory=device_charts.memory(devices) if devices else None,
        made=made_at,
    )
