"""The arithmetic of the charts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tasks.report.svg import Axis, Series, chart, nice_step, powers, scale


@pytest.mark.parametrize(("low", "high", "step"), [(0, 1, 0.2), (0, 12, 2), (0.613, 0.8995, 0.05), (-3e6, 4e6, 1e6)])
def test_steps_are_round(low: float, high: float, step: float) -> None:
    assert nice_step(low, high) == pytest.approx(step)


@pytest.mark.parametrize("values", [(0.613, 0.8995), (0.0, 1e-9), (-5.0, -1.0), (7.0, 7.0), (0.0, 0.0), (1e12, 3e12)])
def test_a_linear_scale_covers_its_values_and_ends_on_ticks(values: tuple[float, float]) -> None:
    found = scale(Axis("", str), values, 0, 100)
    assert found.low <= min(values) <= max(values) <= found.high
    assert found.ticks[0] == pytest.approx(found.low)
    assert found.ticks[-1] == pytest.approx(found.high)
    assert 3 <= len(found.ticks) <= 9
    assert found(found.low) == 0
    assert found(found.high) == 100


def test_powers_cover_the_range() -> None:
    assert powers(150, 20_000, 10) == (100, 1000, 10_000, 100_000)
    assert powers(1024, 16 << 20, 4) == tuple(4**n for n in range(5, 13))
    assert powers(100, 100, 10) == (100, 1000)


def test_a_logarithmic_scale_puts_equal_ratios_at_equal_distances() -> None:
    found = scale(Axis("", str, low=1024, high=1 << 24, log=4), [1024, 1 << 24], 0, 140)
    assert [found(4.0**n) for n in range(5, 13)] == pytest.approx([20.0 * n for n in range(8)])
    assert found.ticks == tuple(4.0**n for n in range(5, 13))


def test_points_lie_where_the_axes_say() -> None:
    drawn = chart([Series("one", 0, [0, 5, 10], [0, 50, 100])], Axis("x", str), Axis("", str), "title")
    svg = ElementTree.fromstring(drawn).find("svg")
    assert svg is not None
    line = svg.find("g/polyline")
    assert line is not None
    (x0, y0), (x1, y1), (x2, y2) = (tuple(map(float, p.split(","))) for p in line.attrib["points"].split())
    grid = {float(each.attrib["y1"]) for each in svg.findall("line[@class='grid']")}
    assert {y0, y1, y2} & grid == {y0, y2}  # 0 and 100 are ticks of the axis, 50 is between 40 and 60
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 == pytest.approx((y0 + y2) / 2)
    assert y0 > y2


def test_a_chart_without_points_is_still_a_chart() -> None:
    drawn = chart([Series("none", 0, [], [])], Axis("x", str), Axis("", str), "title")
    assert not re.search(r"nan|inf", drawn)
    ElementTree.fromstring(drawn)
