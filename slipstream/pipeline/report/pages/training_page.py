"""Page of a running training, shown as the Flyte deck of its task."""

from __future__ import annotations

from datetime import datetime

from slipstream.pipeline.report.pages import charts, device_charts
from slipstream.pipeline.report.pages.rendering import render_page
from slipstream.shared.artifacts.results.devices import TrainingDevices
from slipstream.shared.artifacts.results.training import LiveProgress


def training_page(so_far: LiveProgress, made_at: datetime, devices: TrainingDevices | None = None) -> str:
    return render_page(
        "training_page.html",
        so_far=so_far,
        loss=charts.loss(so_far) if so_far.steps or so_far.evaluations else None,
        learning_rate=charts.learning_rate(so_far) if so_far.steps else None,
        busy=device_charts.busy(devices) if devices else None,
        memory=device_charts.memory(devices) if devices else None,
        made=made_at,
    )
