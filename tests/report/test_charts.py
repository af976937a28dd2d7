"""Charts: positions of points, labels of axes, and robustness to odd values and labels."""

import re
import sys
import warnings
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pytest
from markupsafe import Markup
from matplotlib.axes import Axes

from slipstream.pipeline.report.pages import charts
from slipstream.pipeline.report.pages.inline_svg import inline_svg, tooltip
from slipstream.shared.artifacts.results.evaluation import Scatter
from slipstream.shared.artifacts.results.training import LossPoint, ValidationPoint
from tests.support.report_runs import history


@inline_svg
def line(axes: Axes, xs: list[float], ys: list[float], label: str = "x") -> str:
    axes.plot(xs, ys, gid=tooltip("a line"))
    axes.set_xlabel(label)
    return f"ys over {label}"


def points(drawing: Markup) -> list[tuple[float, float]]:
    """The vertices of the first series."""
    for path in ElementTree.fromstring(drawing).iter("path"):
        if "var(--c0)" in path.get("style", ""):
            numbers = [float(word) for word in re.findall(r"-?[\d.]+", path.attrib["d"])]
            return list(zip(numbers[::2], numbers[1::2], strict=True))
    raise AssertionError("no series")


def test_points_lie_where_the_values_say() -> None:
    (x0, y0), (x1, y1), (x2, y2) = points(line([0, 5, 10], [0, 50, 100]))
    assert (x1, y1) == (pytest.approx((x0 + x2) / 2), pytest.approx((y0 + y2) / 2))
    assert x2 > x0 and y0 > y2, "up is less in SVG"


def test_a_drawing_is_named_and_sized_by_the_page() -> None:
    root = ElementTree.fromstring(line([0, 1], [0, 1]))
    assert root.attrib == {"viewBox": "0 0 420 260", "role": "img", "aria-label": "ys over x"}
    assert [title.text for title in root.iter("title")] == ["a line"]
    assert not list(root.iter("clipPath")) and not list(root.iter("style"))


@pytest.mark.parametrize(
    "label", ["$\\frac{1}$", 'a < b & "c"', "\x00\x1b[0m", "数据 \N{GRINNING FACE}", "#000001", "var(--c0)", ""]
)
def test_any_label_is_drawn_as_it_is(label: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        root = ElementTree.fromstring(line([0, 1], [0, 1], label))
    printed = re.sub(r"[\x00-\x08\x0e-\x1f]", "\N{REPLACEMENT CHARACTER}", label)
    assert root.get("aria-label") == f"ys over {printed}"
    assert printed in {text.text or "" for text in root.iter("text")} | {""}


def test_the_settings_of_a_user_do_not_reach_the_charts() -> None:
    before = line([0, 1], [0, 1])
    with matplotlib.rc_context({"axes.facecolor": "red", "lines.linewidth": 9, "svg.fonttype": "path"}):
        assert line([0, 1], [0, 1]) == before
        assert matplotlib.rcParams["lines.linewidth"] == 9


def test_no_global_figure_is_made() -> None:
    line([0, 1], [0, 1])
    assert "matplotlib.pyplot" not in sys.modules


@pytest.mark.parametrize("ys", [[], [7.0], [7.0, 7.0], [0.0, 1e-9], [-5.0, -1.0], [1e12, 3e12], [1e300, -1e300]])
def test_any_values_give_a_drawing(ys: list[float]) -> None:
    xs = [float(x) for x in range(len(ys))]
    evaluations = [ValidationPoint(int(x), x, y) for x, y in zip(xs, ys, strict=True)]
    steps = [LossPoint(int(x), x, y, 1e-3) for x, y in zip(xs, ys, strict=True)]
    best = ValidationPoint(0, 0.0, 0.0)
    drawn = charts.loss(replace(history("accuracy"), steps=steps, evaluations=evaluations, best=best))
    assert "nan" not in drawn and "inf" not in drawn
    if len(ys) < 2:
        return
    assert "nan" not in charts.predicted_against_actual(Scatter(ys, ys), "y")


def test_the_best_evaluation_is_marked() -> None:
    drawn = charts.validation_metric(history("accuracy"), "accuracy")
    assert re.findall("<title>(.*?)</title>", drawn) == ["best: 88.98 % at step 1,210"]


def test_a_confusion_matrix_shades_by_the_share_of_the_class() -> None:
    root = ElementTree.fromstring(charts.confusion_matrix([[3, 1], [0, 4]], ["no", "yes"]))
    cells = {group.findtext("title"): group.find("path") for group in root.iter("g") if group.find("title") is not None}
    shades = {words: path.get("style") for words, path in cells.items() if path is not None}
    assert shades == {
        "no predicted as no: 3 rows (75.00 %)": "fill:var(--c0);opacity:0.75",
        "no predicted as yes: 1 row (25.00 %)": "fill:var(--c1);opacity:0.25",
        "yes predicted as no: 0 rows (0.00 %)": "fill:var(--c0);opacity:0.04",
        "yes predicted as yes: 4 rows (100.00 %)": "fill:var(--c0)",
    }
