"""Charts of device activity over time, with all attempts on one axis."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from matplotlib.axes import Axes

from slipstream.pipeline.report.pages.charts import REFERENCE_LINE, legend, number, percent
from slipstream.pipeline.report.pages.inline_svg import INK, SERIES, SOFT, inline_svg, tooltip
from slipstream.shared import formatting as fmt
from slipstream.shared.artifacts.results.devices import DeviceSeries, TrainingDevices

#: Largest number of lines that can be distinguished; above it, mean and range of all devices are drawn.
MOST_LINES = len(SERIES)
#: Units of the time axis: least seconds that it spans, seconds per unit, and name.
UNITS = ((7200.0, 3600.0, "hours"), (180.0, 60.0, "minutes"), (0.0, 1.0, "seconds"))
MARKS = {"evaluation": "|", "checkpoint": "^"}


@inline_svg
def busy(axes: Axes, devices: TrainingDevices) -> str:
    draw(axes, devices, lambda device: device.busy)
    return "Utilisation of the devices over time"


@inline_svg
def sm_active(axes: Axes, devices: TrainingDevices) -> str:
    """Plot the share of active streaming multiprocessors per device, if the driver reports it."""
    draw(axes, devices, lambda device: device.sm_active or [None] * len(device.busy))
    return "Multiprocessors with work over time"


@inline_svg
def memory(axes: Axes, devices: TrainingDevices) -> str:
    draw(axes, devices, lambda device: device.memory)
    return "Memory of the devices over time"


def draw(axes: Axes, devices: TrainingDevices, values: Callable[[DeviceSeries], list[float | None]]) -> None:
    began = beginning(devices)
    ends = (attempt.began_at + attempt.seconds for attempt in devices.attempts if attempt.began_at)
    end = max(chain(ends, (at for pod in devices.pods for at in pod.at)), default=began + 1.0)
    scale, unit = next((scale, unit) for least, scale, unit in UNITS if end - began >= least)
    names = list(dict.fromkeys(name_of(pod.node, device.name) for pod in devices.pods for device in pod.devices))
    for pod in devices.pods:
        times = [(at - began) / scale for at in pod.at]
        if len(names) > MOST_LINES:
            columns = list(zip(*(values(device) for device in pod.devices), strict=True))
            known = [[value for value in column if value is not None] for column in columns]
            whole = [(at, each) for at, each in zip(times, known, strict=True) if each]
            label = "mean of all" if pod is devices.pods[0] else None
            axes.plot([at for at, _ in whole], [sum(each) / len(each) for _, each in whole], SERIES[0], label=label)
            axes.fill_between(
                [at for at, _ in whole],
                [min(each) for _, each in whole],
                [max(each) for _, each in whole],
                color=SERIES[0],
                alpha=0.15,
                linewidth=0,
            )
            continue
        for device in pod.devices:
            index = names.index(name_of(pod.node, device.name))
            points = [(at, value) for at, value in zip(times, values(device), strict=True) if value is not None]
            first = all(pod.node != each.node for each in devices.pods[: devices.pods.index(pod)])
            axes.plot(
                [at for at, _ in points],
                [value for _, value in points],
                color=SERIES[index],
                linewidth=1.5,
                label=names[index] if first else None,
            )
    mark(axes, devices, began, scale)
    axes.set(ylim=(0, 1.12), xlabel=f"{unit} since the start of training")
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.yaxis.set_major_formatter(percent)
    axes.xaxis.set_major_formatter(number)
    axes.set_xlim(0, max((end - began) / scale, 1e-9))
    legend(axes)


def mark(axes: Axes, devices: TrainingDevices, began: float, scale: float) -> None:
    """Draw ends of attempts (except the last) as lines, and evaluations and checkpoints above 100 %."""
    labelled = set()
    for attempt in devices.attempts:
        start = (attempt.began_at - began) / scale
        for kind, times in attempt.events.items():
            if kind in MARKS:
                axes.plot(
                    [start + at / scale for at in times],
                    [1.06] * len(times),
                    linestyle="",
                    marker=MARKS[kind],
                    markersize=5,
                    color=SOFT,
                    label=None if kind in labelled else kind,
                )
                labelled.add(kind)
        if attempt is not devices.attempts[-1]:
            words = f"attempt {attempt.number}: {attempt.ended}"
            line = {**REFERENCE_LINE, "color": INK}
            axes.axvline(start + attempt.seconds / scale, gid=tooltip(words), **line)


def beginning(devices: TrainingDevices) -> float:
    known = [attempt.began_at for attempt in devices.attempts if attempt.began_at]
    return min(chain(known, (pod.at[0] for pod in devices.pods if pod.at)), default=0.0)


def name_of(node: str, device: str) -> str:
    return fmt.shorten_label(f"{node}: {device}" if node else device)
