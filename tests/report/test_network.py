"""Charts of a network profile and the page of a measurement: positions of points and texts."""

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from slipstream.pipeline.report.network_engine import build_network, build_tuning
from slipstream.pipeline.report.pages.inline_svg import SERIES
from slipstream.pipeline.report.pages.network_charts import LINES, network_charts
from slipstream.shared.interconnect.profile import (
    COURSE,
    CSV,
    MODEL,
    TABLE,
    ModelPoint,
    NetworkProfile,
    TrendPoint,
    read_profile,
    write_profile,
)
from slipstream.shared.interconnect.tuning import DdpSettings, Tuning, TuningTrial, write_tuning
from tests.support.network_profiles import launch, network_profile
from tests.support.proving import first_few
from tests.support.report_pages import CHROMIUM, assert_is_inert, too_wide


def points(drawing: str) -> list[tuple[float, float]]:
    """The vertices of the first series."""
    for path in ElementTree.fromstring(drawing).iter("path"):
        if "var(--c0)" in path.get("style", ""):
            numbers = [float(word) for word in re.findall(r"-?[\d.]+", path.attrib["d"])]
            return list(zip(numbers[::2], numbers[1::2], strict=True))
    raise AssertionError("no series")


def chart(profile: NetworkProfile, name: str) -> str:
    found = network_charts(profile)[name]
    assert found is not None
    return str(found)


def test_sizes_are_at_equal_distances_and_times_at_powers_of_ten() -> None:
    time = chart(network_profile(), "time")
    xs = [x for x, _ in points(time)]
    steps = [b - a for a, b in pairwise(xs)]
    assert len(xs) >= 8 and steps[:7] == pytest.approx([steps[0]] * 7, abs=0.02)
    said = {text.text for text in ElementTree.fromstring(time).iter("text")}
    assert {"1 KiB", "100 µs", "1 ms"} <= said


@pytest.mark.prove
def test_every_operation_has_a_line_of_its_own() -> None:
    names = tuple(f"operation_{number}" for number in range(11))
    bandwidth = chart(network_profile(operations=names), "bandwidth")
    assert len(set(LINES[:11])) == 11 and len(SERIES) == 4
    said = {text.text for text in ElementTree.fromstring(bandwidth).iter("text")}
    assert set(names) <= said
    assert "operation_3, 1 KiB: " in bandwidth


def test_the_model_is_a_line_within_a_band_behind_what_was_measured() -> None:
    profile = network_profile()
    ends = profile.of("all_reduce")[:: len(profile.of("all_reduce")) - 1]
    model = [ModelPoint(bytes=m.bytes, seconds=m.p50, low=m.p50 * 0.9, high=m.p50 * 1.1) for m in ends]
    for name in ("bandwidth", "time"):
        assert "model of all_reduce" not in chart(profile, name)
        found = str(network_charts(profile, model=model)[name])
        assert "model of all_reduce" in found
        # The line ends where the first and the last size were measured.
        line = next(
            [(float(x), float(y)) for x, y in re.findall(r"([-.0-9]+) ([-.0-9]+)", path.attrib["d"])]
            for path in ElementTree.fromstring(found).iter("path")
            if "stroke:var(--ink)" in path.get("style", "") and path.get("d", "").count("L") == 1
        )
        measured = points(found)
        assert line[0] == pytest.approx(measured[0], abs=0.5) and line[-1] == pytest.approx(measured[7], abs=0.5)


def test_a_model_of_sizes_beyond_integers_is_drawn() -> None:
    profile = network_profile()
    model = [ModelPoint(bytes=size, seconds=1.0, low=0.5, high=2.0) for size in (1024, 10**30)]
    assert "model of all_reduce" in str(network_charts(profile, model=model)["bandwidth"])


def test_intervals_and_the_model_stay_within_the_axes() -> None:
    profile = network_profile()
    wild = [replace(m, launches=tuple(launch(m.p50 * factor) for factor in (0.1, 1, 10))) for m in profile.measurements]
    profile = replace(profile, measurements=tuple(wild))
    model = [ModelPoint(bytes=m.bytes, seconds=m.p50, low=0.0, high=m.p50 * 1e6) for m in profile.of("all_reduce")]
    for name in ("bandwidth", "time"):
        drawing = str(network_charts(profile, model=model)[name])
        grid = [float(y) for y in re.findall(r'd="M [\d.]+ ([\d.]+) L [^"]*" style="[^"]*var\(--line\)', drawing)]
        bars = re.findall(r'd="M ([\d.]+) (-?[\d.]+) L \1 (-?[\d.]+)" style="fill:none;stroke:var\(--c\d\)"', drawing)
        ends = [float(y) for _, *both in bars for y in both]
        assert len(ends) == 3 * 8 * 2
        assert min(grid) - 0.1 <= min(ends) and max(ends) <= max(grid) + 0.1
        # The band of a model that knows nothing is as high as the axes.
        band = ElementTree.fromstring(re.findall(r"<path id=[^>]*>", drawing)[0]).attrib["d"]
        ys = [float(y) for y in re.findall(r"[ML] -?[\d.]+ (-?[\d.]+)", band)]
        assert max(ys) - min(ys) == pytest.approx(max(grid) - min(grid), abs=0.1)


@pytest.mark.prove
def test_pairs_are_a_heat_map_darker_where_they_are_slow() -> None:
    pairs = chart(network_profile(4, pair_seconds={(0, 2): 0.08}), "pairs")
    root = ElementTree.fromstring(pairs)
    shades = {
        group.findtext("title"): path.get("style")
        for group in root.iter("g")
        if group.find("title") is not None and (path := group.find("path")) is not None
    }
    assert len(shades) == 6
    (slow,) = (style for title, style in shades.items() if title and title.startswith("ranks 0 and 2: "))
    assert slow == "fill:var(--c0)", "the slowest is full"
    assert network_charts(network_profile(2))["pairs"] is None, "a single pair is no map"


@pytest.mark.parametrize("world", first_few([1, 2], 1))
def test_a_network_of_which_nothing_was_measured_has_empty_axes(world: int) -> None:
    empty = replace(network_profile(world), measurements=(), pairs=())
    for name in ("bandwidth", "time"):
        assert "<svg" in chart(empty, name) and "nan" not in chart(empty, name)
        one = replace(empty, measurements=network_profile(world).measurements[:1])
        assert "nan" not in chart(one, name)


def test_the_page_of_a_measurement_holds_charts_table_and_findings(tmp_path: Path) -> None:
    profile = network_profile(4)
    topology = replace(profile.topology, findings=("rank 2 is slow",))
    profile = replace(profile, topology=topology)
    write_profile(
        tmp_path / "in", profile, {}, {TABLE: b"# all <of> it", CSV: b"operation\n", COURSE: b"[]", MODEL: b"[]"}
    )
    summary = build_network(tmp_path / "runs", tmp_path / "in")
    directory = Path(summary.directory)
    assert {path.name for path in directory.iterdir()} == {"network.html", "profile.json", "profile.csv"}
    page = (directory / "network.html").read_text()
    assert page.count("<svg") == 3 and "rank 2 is slow" in page and "# all &lt;of&gt; it" in page
    assert "4 processes, gloo," in page and "3 launches" in page
    assert str(summary).startswith("# all <of> it\n\nReport      ")
    assert (directory / "profile.json").read_bytes() == (tmp_path / "in/profile.json").read_bytes()
    assert read_profile(tmp_path / "in") == profile


def test_the_course_of_the_history_is_drawn_by_day() -> None:
    days = [TrendPoint(measured_at=d * 86400.0, bytes=1, busbw=1.0 + d, low=0.9 + d, high=None) for d in (10, 11, 20)]
    days = [replace(day, high=day.busbw + 0.1) for day in days]
    course = network_charts(network_profile(), days)["course"]
    assert course is not None
    (x0, _), (x1, _), (x2, _) = points(course)
    assert (x1 - x0) * 9 == pytest.approx(x2 - x1, rel=0.01)
    assert "1970-01-21 UTC: 21.0 GB/s" in course
    assert network_charts(network_profile(), days[:1])["course"] is None


TRIALS = (
    TuningTrial("bucket_cap_mb=50", "no change", 1.01, 0.98, 1.04, 20, unseen=0.06),
    TuningTrial("gradient_as_bucket_view=False", "taken", 1.10, 1.07, 1.13, 20),
    TuningTrial("fp16 compression hook", "may change numbers", 1.93, 1.90, 1.96, 20),
    TuningTrial("GLOO_SOCKET_IFNAME=ib0", "failed", why="rank 0: <no> interface"),
)


def test_the_page_of_a_tuning_holds_each_candidate_with_its_interval(tmp_path: Path) -> None:
    chosen = DdpSettings(gradient_as_bucket_view=False)
    tuning = Tuning(network_profile().fingerprint, "model <auto>", chosen, {"NCCL_ALGO": "Tree"}, TRIALS)
    write_tuning(tmp_path / "in", tuning, {})
    summary = build_tuning(tmp_path / "runs", tmp_path / "in")
    directory = Path(summary.directory)
    assert {path.name for path in directory.iterdir()} == {"tuning.html", "tuning.json"}
    page = (directory / "tuning.html").read_text()
    assert_is_inert(page)
    assert "model &lt;auto&gt;" in page and "export NCCL_ALGO=Tree" in page and "No change" not in page
    assert str(summary).startswith(f"{tuning}\n\nReport      ")
    drawing = ElementTree.fromstring(re.findall(r"<svg.*?</svg>", page, re.DOTALL)[0])
    said = [text.text for text in drawing.iter("text")]
    assert "fp16 compression hook: may change numbers" in said and "bucket_cap_mb=50: no change" in said
    # Failed changes have no interval. The longest interval is drawn as long as its figures say.
    lines = [
        (float(x1) - float(x0), style)
        for path in drawing.iter("path")
        for style in [path.get("style", "")]
        for x0, y0, x1, y1 in re.findall(r"^M ([\d.]+) ([\d.]+) L ([\d.]+) ([\d.]+)$", path.get("d", ""))
        if y0 == y1 and "stroke-width:2" in style
    ]
    assert len(lines) == 3
    bucket, view, hook = (length for length, _ in lines)
    assert view == pytest.approx(bucket) == pytest.approx(hook, rel=0.02)
    assert [re.findall(r"var\((--\w+)\)", style)[0] for _, style in lines] == ["--soft", "--c0", "--c1"]


def test_a_tuning_of_which_nothing_could_be_measured_has_no_chart(tmp_path: Path) -> None:
    write_tuning(tmp_path / "in", Tuning(network_profile().fingerprint, "a model", DdpSettings(), {}, TRIALS[3:]), {})
    page = Path(build_tuning(tmp_path / "runs", tmp_path / "in").directory, "tuning.html").read_text()
    assert "<svg" not in page and "No change." in page and "rank 0: &lt;no&gt; interface" in page


@pytest.mark.prove
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the width of a page is what a browser makes of it")
def test_the_page_of_a_tuning_is_not_wider_than_the_screen(tmp_path: Path) -> None:
    long = TuningTrial("NCCL_MIN_CTAS=32, NCCL_MAX_CTAS=32", "may change numbers", 1.2, 0.2, 9.0, 5)
    tuning = Tuning(network_profile().fingerprint, "a model", DdpSettings(), {}, (*TRIALS, long))
    write_tuning(tmp_path / "in", tuning, {})
    page = Path(build_tuning(tmp_path / "runs", tmp_path / "in").directory, "tuning.html").read_text()
    assert too_wide({"tuning": page}, (320, 390, 1280), tmp_path) == []
