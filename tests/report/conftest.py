"""Charts are drawn once for equal figures: drawing takes a hundred times as long as the rest of a page."""

from collections.abc import Callable
from dataclasses import fields, replace

import pytest

from slipstream.pipeline.report.pages import network_charts, report_page
from slipstream.pipeline.report.stage_results import StageResults
from slipstream.shared.artifacts.results.evaluation import PlotData

Charts = dict[str, str | None]
Once = Callable[[str, Callable[[], Charts]], Charts]


@pytest.fixture(scope="session")
def once() -> Once:
    drawings: dict[str, Charts] = {}

    def first(figures: str, draw: Callable[[], Charts]) -> Charts:
        if figures not in drawings:
            drawings[figures] = draw()
        return drawings[figures]

    return first


@pytest.fixture(autouse=True)
def drawn_once(once: Once, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = report_page.draw_charts

    def drawn(found: StageResults) -> Charts:
        points = (found.history.steps, found.history.evaluations, found.history.best)
        plots = [getattr(found.evaluation, field.name) for field in fields(PlotData)]
        named = (found.signature.target, found.evaluation.classes, found.evaluation.metric)
        figures = repr((named, points, plots, found.export.variants, found.devices))
        charts = once(figures, lambda: draw(replace(found, network=None)))
        if network := found.network:
            measured = (network.profile, network.course, network.model)
            charts = charts | once(repr(measured), lambda: {**network_charts.network_charts(*measured)})
        return charts

    monkeypatch.setattr(report_page, "draw_charts", drawn)
