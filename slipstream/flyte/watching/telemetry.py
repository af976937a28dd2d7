"""Telemetry sampler of a stage; samples are stored below ``.slipstream`` locally or below a pod's working directory."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path

from flytekit import current_context

from slipstream.flyte.metadata import SPOT
from slipstream.shared.artifacts.workspaces import STORE
from slipstream.shared.logs import logger
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.stages import STAGES, StageUsage
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.node import NodeFacts, node_facts, process_age, write_facts
from slipstream.shared.telemetry.prices import pod_price
from slipstream.shared.telemetry.series import condense_samples, mean_of_known
from slipstream.shared.telemetry.watch import SAMPLES, telemetry_sampled

#: Number of newest sample directories that are kept.
KEPT = 20
#: Seconds below which a local stage is not sampled, since starting the sampler would slow it noticeably.
SHORT_S = 1.0
LOG = logger("telemetry")
#: Sample directory of the stage running in this thread; None without a sampler.
sampled_directory: ContextVar[Path | None] = ContextVar("sampled_directory", default=None)


class SampledStage:
    """Stage sampled into ``directory``; ``usage`` is None until it ends."""

    def __init__(self, directory: Path, facts: NodeFacts) -> None:
        self.directory, self._facts = directory, facts
        self.usage: StageUsage | None = None

    def ended(self) -> None:
        series = condense_samples(ring.read_samples(self.directory), 0, self._facts.node)
        if series is None:
            return
        kind = series.devices[0].kind
        self.usage = StageUsage(
            node=self._facts.node,
            instance_type=self._facts.instance_type,
            spot=self._facts.spot,
            gpus=len(series.devices) if kind == "gpu" else 0,
            busy=mean_of_known(value for device in series.devices for value in device.busy),
            largest_memory=series.largest_memory,
            joules=series.energy_joules,
        )


@contextmanager
def stage_sampled(stage: str, *, local: bool) -> Iterator[SampledStage]:
    """Sample this machine or pod while ``stage`` runs in the block."""
    placement = current_profile().placement(STAGES[stage].pod_of or stage)
    began_at = time.time() - (0.0 if local else process_age())
    facts = NodeFacts(began_at, socket.gethostname(), "", "", False, False) if local else node_facts(spot(placement))
    facts = replace(facts, started_at=began_at)
    directory = directory_of(stage, local=local)
    write_facts(directory, facts)
    place = sampled_directory.set(directory)
    its = SampledStage(directory, facts)
    try:
        labels, prices = labels_of(stage, facts, local=local), prices_of(placement, facts)
        with telemetry_sampled(directory, labels, prices, SHORT_S if local else 0.0, facts.started_at):
            yield its
    finally:
        sampled_directory.reset(place)
        its.ended()


def spot(placement: Placement) -> bool:
    """Return whether this pod is interruptible: as its execution chose, else as its profile asks."""
    chosen = os.environ.get(SPOT)
    return chosen == "true" if chosen else placement.interruptible


def labels_of(stage: str, facts: NodeFacts, *, local: bool) -> MetricLabels:
    execution = "local" if local else current_context().execution_id.name
    return MetricLabels(execution, stage, int(os.environ.get("FLYTE_ATTEMPT_NUMBER", "0")), facts.node)


def prices_of(placement: Placement, facts: NodeFacts) -> dict[str, float]:
    """Return this pod's prices in dollars per hour, "paid" and "on_demand", as far as they are known."""
    price = pod_price(placement, facts.instance_type)
    if price is None:
        return {}
    known = {"paid": price.paid(facts.spot), "on_demand": price.on_demand}
    return {name: float(dollars) for name, dollars in known.items() if dollars is not None}


def directory_of(stage: str, *, local: bool) -> Path:
    """Return a new directory for a stage's samples; a system temporary directory if ``SAMPLES`` is not writable."""
    base = (STORE if local else Path(current_context().working_directory)) / SAMPLES
    try:
        base.mkdir(parents=True, exist_ok=True)
        older = sorted(base.iterdir(), key=lambda path: path.stat().st_mtime)
        for directory in older[: len(older) - KEPT + 1]:
            shutil.rmtree(directory, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=f"{stage}-", dir=base))
    except OSError as error:
        LOG.warning("%s cannot be used for samples (%s); they go to a temporary directory", base, error.strerror)
        return Path(tempfile.mkdtemp(prefix=f"{stage}-"))
