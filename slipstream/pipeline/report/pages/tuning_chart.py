"""Chart of the tuner's result: speedup per tested setting."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from slipstream.pipeline.report.pages.charts import LINE_HEIGHT, figure_of, plot_point
from slipstream.pipeline.report.pages.inline_svg import INK, PIXELS_PER_INCH, SERIES, SOFT, inline_svg
from slipstream.shared.interconnect.tuning import TuningTrial

#: Height of a setting's text and interval, in lines of text.
LINES = 2.2
#: Speedups beyond these limits are cut off: such wide intervals carry no information.
LEAST, MOST = 0.25, 4.0
COLOURS = {"taken": SERIES[0], "may change numbers": SERIES[1]}


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
    drawing.set_figheight((LINES * len(trials) + 3) * LINE_HEIGHT / PIXELS_PER_INCH)
    return f"Gain of {len(trials)} settings, each with its interval"
