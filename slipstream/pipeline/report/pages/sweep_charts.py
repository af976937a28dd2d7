"""Charts of a sweep's trials."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup
from matplotlib.axes import Axes

from slipstream.pipeline.report.pages.charts import REFERENCE_LINE, legend, number, plot_point
from slipstream.pipeline.report.pages.inline_svg import SERIES, SOFT, inline_svg
from slipstream.shared.artifacts.results.sweep import Sweep, SweepTrial

#: Ratio of largest to smallest loss above which the axis is logarithmic.
WIDE = 8.0
MARKS = {"complete": SERIES[0], "pruned": SOFT, "unfinished": SERIES[2]}


def sweep_charts(sweep: Sweep) -> dict[str, Markup]:
    """Return the charts by name; empty if no trial has a loss."""
    if not any(trial.loss is not None for trial in sweep.trials):
        return {}
    return {"history": history(sweep), "curves": curves(sweep)}


@inline_svg
def history(axes: Axes, sweep: Sweep) -> str:
    """Plot the smallest validation loss of every trial, and the best of the complete trials until then."""
    known = [(trial, trial.loss) for trial in sweep.trials if trial.loss is not None]
    for trial, loss in known:
        size = 9.0 if trial.number == sweep.best else 5.0
        words = f"trial {trial.number}, {trial.state}: {loss:.4g} ({trial.settings})"
        plot_point(axes, trial.number, loss, MARKS[trial.state], words, size)
    best: list[tuple[int, float]] = []
    for trial, loss in known:
        if trial.state == "complete":
            best.append((trial.number, min(loss, best[-1][1] if best else loss)))
    last = max(trial.number for trial in sweep.trials)
    axes.step(
        [*(place for place, _ in best), last],
        [*(loss for _, loss in best), best[-1][1]] if best else [],
        where="post",
        label="best complete trial until then",
        color=SERIES[0],
    )
    axes.set_xlabel("trial")
    axes.set_xlim(-0.5, last + 0.5)
    axes.locator_params(axis="x", integer=True)
    over_losses(axes, [loss for _, loss in known])
    legend(axes)
    return "Validation loss of each trial"


@inline_svg
def curves(axes: Axes, sweep: Sweep) -> str:
    """Plot the smallest validation loss of every trial over the epochs, with rungs as lines."""
    for rung in sweep.rungs:
        axes.axvline(rung, **REFERENCE_LINE)
    shown: list[float] = []
    named: set[str] = set()
    for trial in sorted(sweep.trials, key=lambda each: (each.number == sweep.best, each.state == "complete")):
        if trial.curve:
            draw_curve(axes, trial, best=trial.number == sweep.best, named=named)
            shown += [loss for _, loss in trial.curve]
    axes.set_xlabel("epoch" if not sweep.rungs else "epoch (dashed: where trials are compared)")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(number)
    over_losses(axes, shown)
    legend(axes)
    return "Validation loss of the trials over the epochs"


def draw_curve(axes: Axes, trial: SweepTrial, *, best: bool, named: set[str]) -> None:
    name = "the best" if best else trial.state
    label = None if name in named else name
    named.add(name)
    epochs, losses = [epoch for epoch, _ in trial.curve], [loss for _, loss in trial.curve]
    width, alpha = (2.6, 1.0) if best else (1.2, 0.6)
    colour = SERIES[1] if best else MARKS.get(trial.state, SOFT)
    axes.plot(epochs, losses, color=colour, linewidth=width, alpha=alpha, label=label)
    if len(epochs) == 1:
        axes.plot(epochs, losses, color=colour, linestyle="", marker="o", markersize=3, alpha=alpha)


def over_losses(axes: Axes, losses: Sequence[float]) -> None:
    low, high = min(losses), max(losses)
    if low > 0 and high > WIDE * low:
        axes.set_yscale("log")
    axes.margins(y=0.08)
    axes.yaxis.set_major_formatter(number)
