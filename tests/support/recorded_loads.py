"""Loads of a plan of serving, and its p99 at a steady rate."""

import numpy as np

from slipstream.operations.plan.serving.load import HOURS, load_of
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.operations.plan.serving.recorded_queue import RecordedQueue


def steady_p99(rate: float, service: ServiceTimes, servers: int) -> float:
    """The p99 of Poisson arrivals, recorded by the hour."""
    load = load_of("steady", {hour * 3600: 3600 * rate for hour in HOURS}, 3600)
    return RecordedQueue(load.arrivals, service).p99(np.full(len(HOURS), servers))
