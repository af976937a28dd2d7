"""Charts of a network profile: bandwidth, time and pairs of ranks; chart of the tuner's result."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle, product

from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator

from slipstream.pipeline.report.pages.charts import DARK, LINE_HEIGHT, figure_of, plot_point
from slipstream.pipeline.report.pages.inline_svg import (
    CARD,
    INK,
    PIXELS_PER_INCH,
    SERIES,
    SOFT,
    WIDTH,
    inline_svg,
    tooltip,
)
from slipstream.shared import formatting as fmt
from slipstream.shared.interconnect.profile import Measurement, ModelPoint, NetworkProfile, TrendPoint, bus_factor
from slipstream.shared.interconnect.tuning import TuningTrial

#: Line styles: every colour solid, then dashed, then dotted.
LINES = tuple((colour, style) for style, colour in product(("-", "--", ":"), SERIES))
#: Largest number of ranks for readable cells of a heat map.
MOST_RANKS_DRAWN = 32
LEGEND_LINE = 20
#: Fewest points of a line.
FEWEST_POINTS = 3
#: Seconds below the resolution of any clock.
SHORTEST_S = 1e-9
#: Height of a setting's text and interval, in lines of text.
SETTING_LINES = 2.2
#: Speedups beyond these limits are cut off: such wide intervals carry no information.
LEAST, MOST = 0.25, 4.0
COLOURS = {"taken": SERIES[0], "may change numbers": SERIES[1]}


def network_charts(
    profile: NetworkProfile, course: Sequence[TrendPoint] = (), model: Sequence[ModelPoint] = ()
) -> dict[str, Markup | None]:
    """Return every chart by name, or None without data.

    ``course`` is the history of bandwidths, ``model`` is the model fitted to all_reduce, if known.
    """
    series = {m.operation: moved for m in profile.measurements if (moved := moving(profile.of(m.operation)))}
    ranks = profile.fingerprint.world
    return {
        "bandwidth": bus_bandwidth(series, model, ranks),
        "time": call_time(series, model),
        "pairs": pairs(profile.pairs, ranks) if profile.pairs and 2 < ranks <= MOST_RANKS_DRAWN else None,
        "course": over_time(course) if len(course) >= FEWEST_POINTS else None,
    }


def moving(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements that move data; a barrier has no size."""
    return [m for m in measurements if m.bytes]


@inline_svg
def bus_bandwidth(
    axes: Axes, series: Mapping[str, Sequence[Measurement]], model: Sequence[ModelPoint] = (), ranks: int = 2
) -> str:
    """Plot bus bandwidth over the message size, one line per collective.

    Bars are intervals over launches. The band is the interval of the model of all_reduce.
    """
    powers_of_ten(axes, [m.busbw() for line in series.values() for m in line], "GB/s")
    # An interval may start at zero.
    band(axes, model, lambda size, seconds: size / max(seconds, SHORTEST_S) / 1e9 * bus_factor("all_reduce", ranks))
    plot(axes, series, lambda m, seconds: m.busbw(seconds))
    return "Bus bandwidth by message size"


@inline_svg
def call_time(axes: Axes, series: Mapping[str, Sequence[Measurement]], model: Sequence[ModelPoint] = ()) -> str:
    """Plot the median call time in microseconds over the message size.

    Bars and band are those of :func:`bus_bandwidth`.
    """
    powers_of_ten(axes, [m.p50 * 1e6 for line in series.values() for m in line], "")
    band(axes, model, lambda _, seconds: seconds * 1e6)
    plot(axes, series, lambda m, seconds: seconds * 1e6)
    axes.yaxis.set_major_formatter(lambda microseconds, _: EngFormatter("s")(microseconds / 1e6))
    return "Time of a call by message size"


def band(axes: Axes, model: Sequence[ModelPoint], figure: Callable[[int, float], float]) -> None:
    if not model:
        return
    sizes = [float(point.bytes) for point in model]  # NumPy's integers are smaller than JSON's
    low = within(axes, [figure(p.bytes, p.low) for p in model])
    middle = within(axes, [figure(p.bytes, p.seconds) for p in model])
    high = within(axes, [figure(p.bytes, p.high) for p in model])
    axes.fill_between(sizes, low, high, color=INK, alpha=0.12, linewidth=0, label="model of all_reduce")
    axes.plot(sizes, middle, color=INK, linewidth=1, alpha=0.6)


def plot(
    axes: Axes, series: Mapping[str, Sequence[Measurement]], figure: Callable[[Measurement, float], float]
) -> None:
    for (colour, style), (name, line) in zip(cycle(LINES), series.items(), strict=False):
        axes.plot([m.bytes for m in line], [figure(m, m.p50) for m in line], style, color=colour, label=name)
        for m in line:
            if interval := m.interval():
                ends = within(axes, [figure(m, seconds) for seconds in interval])
                axes.plot([m.bytes] * 2, ends, color=colour, linewidth=1)
            plot_point(axes, m.bytes, figure(m, m.p50), colour, words(m), diameter=4.0)
    sizes = sorted({m.bytes for line in series.values() for m in line})
    size_axis(axes, sizes)
    lines = -(-len(series) // 3)
    drawing = figure_of(axes)
    drawing.set_figheight(drawing.get_figheight() + lines * LEGEND_LINE / PIXELS_PER_INCH)
    if series:
        drawing.legend(loc="outside upper left", ncols=3, columnspacing=1.2)


def within(axes: Axes, values: Sequence[float]) -> list[float]:
    """Clamp ``values`` to the y-axis, because drawings are not clipped.

    An interval over three launches may have any length.
    """
    least, most = axes.get_ylim()
    return [min(max(value, least), most) for value in values]


def words(m: Measurement) -> str:
    """Describe a measurement: ``all_reduce, 1 MiB: 0.8 GB/s, 1.2 ms (p99 3 ms)``."""
    p99 = m.percentile(99)
    tail = f" (p99 {fmt.microseconds(p99 * 1e6)})" if p99 else ""
    return f"{m.operation}, {fmt.size_text(m.bytes)}: {fmt.bandwidth(m.busbw())}, {fmt.microseconds(m.p50 * 1e6)}{tail}"


def size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Set a logarithmic axis of message sizes, with ticks at no more than seven measured sizes."""
    axes.set_xlabel("message size")
    if not sizes:
        return
    axes.set_xscale("log", base=2)
    shown = [size for size in sizes if all(not size < other < size * 1.5 for other in sizes)]
    shown = shown[:: -(-len(shown) // 7)]
    axes.set_xticks(shown, [fmt.size_text(size) for size in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    if len(sizes) > 1:
        axes.set_xlim(sizes[0], sizes[-1])


def powers_of_ten(axes: Axes, values: Sequence[float], unit: str) -> None:
    """Set a logarithmic axis that starts and ends at powers of ten."""
    axes.set_ylabel(unit)
    positive = [value for value in values if value > 0]
    if positive:
        first = math.floor(math.log10(min(positive)))
        axes.set_yscale("log")
        axes.set_ylim(10.0**first, 10.0 ** max(math.ceil(math.log10(max(positive))), first + 1))
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


@inline_svg
def over_time(axes: Axes, course: Sequence[TrendPoint]) -> str:
    """Plot bus bandwidth of the largest all_reduce over the days, with intervals over launches."""
    days = [(point.measured_at - course[-1].measured_at) / 86_400 for point in course]
    axes.plot(days, [point.busbw for point in course])
    for day, point in zip(days, course, strict=True):
        low, high = point.low, point.high
        if low is not None and high is not None:
            axes.plot([day, day], [low, high], color=SERIES[0], linewidth=1)
        words = f"{fmt.moment(point.measured_at)} UTC: {fmt.bandwidth(point.busbw)}"
        plot_point(axes, day, point.busbw, SERIES[0], words)
    axes.set_ylim(bottom=0)
    axes.set(xlabel="days before this profile", ylabel="GB/s")
    return "Bus bandwidth of the largest all_reduce over time"


@inline_svg
def pairs(axes: Axes, measured: Sequence[Measurement], world: int) -> str:
    """Plot a heat map of every pair of ranks measured separately.

    The shade is the pair's time over the slowest pair's.
    """
    slowest = max(pair.p50 for pair in measured)
    for pair in measured:
        shade, rate = pair.p50 / slowest, fmt.bandwidth(pair.busbw())
        words = f"ranks {pair.ranks[0]} and {pair.ranks[1]}: {rate}, {fmt.microseconds(pair.p50 * 1e6)}"
        for row, column in (pair.ranks, pair.ranks[::-1]):
            cell = Rectangle((column + 0.02, row + 0.02), 0.96, 0.96, facecolor=SERIES[0], alpha=shade, linewidth=0)
            cell.set_gid(tooltip(words))
            axes.add_patch(cell)
            if world <= 8:
                colour = CARD if shade > DARK else INK
                number = fmt.significant(pair.busbw(), 2)
                axes.text(column + 0.5, row + 0.5, number, color=colour, ha="center", va="center_baseline")
    ticks = [index + 0.5 for index in range(world)]
    axes.set_xticks(ticks, [str(rank) for rank in range(world)])
    axes.set_yticks(ticks, [str(rank) for rank in range(world)])
    axes.set(xlim=(0, world), ylim=(world, 0), aspect="equal", xlabel="rank", ylabel="rank")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    figure_of(axes).set_figheight(WIDTH / PIXELS_PER_INCH)
    return f"Bandwidth between {world} ranks, pair by pair"


@inline_svg
def gains(axes: Axes, trials: Sequence[TuningTrial]) -> str:
    """Plot the speedup of every setting with its interval, the first setting on top.

    The speedup is the step time as configured over the step time with the setting. ``trials`` must be measured.
    """
    least = max(LEAST, min(0.9, *(trial.low for trial in trials)))
    most = min(MOST, max(1.1, *(trial.high for trial in trials)))
    for row, trial in enumerate(trials):
        colour = COLOURS.get(trial.verdict, SOFT)
        words = axes.text(least, row - 0.25, f"{trial.setting}: {trial.verdict}", color=INK, va="center_baseline")
        words.set_in_layout(False)  # a long name would leave less room for the intervals
        axes.plot([1, 1], [row, row + 0.4], color=SOFT, linewidth=1)
        low, gain, high = (min(max(share, least), most) for share in (trial.low, trial.gain, trial.high))
        axes.plot([low, high], [row + 0.2] * 2, color=colour, linewidth=2)
        plot_point(axes, gain, row + 0.2, colour, str(trial))
    axes.set(xlim=(least, most), ylim=(len(trials) - 0.4, -0.6), xlabel="times as fast")
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    drawing = figure_of(axes)
    drawing.set_figheight((SETTING_LINES * len(trials) + 3) * LINE_HEIGHT / PIXELS_PER_INCH)
    return f"Gain of {len(trials)} settings, each with its interval"
