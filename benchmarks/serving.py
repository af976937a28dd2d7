"""Planned replicas against a simulation of every request.

    python benchmarks/serving.py [OPTIONS]

``slipstream plan serve`` reads the requests of every second of four days, and plans replicas for each hour. A
discrete-event simulation of the same seconds, in which every request comes at random, finds the fewest replicas of an
hour by itself. Both take the minute with the longest p99.
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import numpy as np

from harness.command import benchmark
from harness.simulated_queue import RecordedDay, recorded_days
from harness.table import Column, Table
from slipstream.operations.plan.serving.load import HOURS, Arrivals, load_of
from slipstream.operations.plan.serving.queueing import ServiceTimes
from slipstream.operations.plan.serving.recorded_queue import RecordedQueue, replicas_by_hour

RATE, BUSY = 300.0, 1.5
#: Shape of a measured model's times: half of the requests take as long, a hundredth twice as long.
SERVICE = ServiceTimes.weighted((1.0, 1.1, 1.2, 2.0), (0.5, 0.4, 0.09, 0.01))
#: Limits of the p99 in mean times of a request.
LIMITS = {"flat": 5, "bursty": 100, "smooth": 5, "idle night": 5}
COLUMNS = (
    Column("planned", "planned", "{:.0f}"),
    Column("simulated", "simulated", "{:.0f}"),
    Column("p99 ms", "p99_s", "{:.2f}", 1e-3),
    Column("simulated", "simulated_s", "{:.2f}", 1e-3),
    Column("ratio", "ratio", "{:.3f}"),
)


def compare(name: str, counts: np.ndarray, hour: int, draws: int) -> dict[str, float | str]:
    service = SERVICE.times_as_long(BUSY / RATE / SERVICE.mean)
    limit = LIMITS[name] * service.mean
    load = load_of(name, dict(enumerate(counts.astype(float).tolist())), 1)
    planned = replicas_by_hour(load.arrivals, load.rates, service, limit)
    assert planned
    replicas = planned[0][hour]
    servers, found = RecordedDay(counts, service.times, service.shares, draws).fewest(hour, limit)
    chosen = load.arrivals.hours == hour
    alone = Arrivals(load.arrivals.at[chosen], load.arrivals.requests[chosen], load.arrivals.length)
    p99 = RecordedQueue(alone, service).p99(np.full(len(HOURS), servers))
    return {"planned": replicas, "simulated": servers, "p99_s": p99, "simulated_s": found, "ratio": p99 / found}


@benchmark
@click.option("--draws", default=4, show_default=True, help="Simulations of each minute.")
def main(quick: bool, draws: int) -> Iterator[Table]:
    """Compare planned replicas with simulated ones."""
    rows = {
        f"{name}, {hour:02} h": compare(name, counts, hour, draws)
        for name, counts in recorded_days(RATE).items()
        for hour in ((12,) if quick else (9, 12, 21))
        if not quick or name == "flat"
    }
    equal = sum(row["planned"] == row["simulated"] for row in rows.values())
    off = max(abs(float(row["ratio"]) - 1) for row in rows.values())
    remark = f"replicas equal in {equal} of {len(rows)} hours; the p99 of the same replicas is off by at most {off:.1%}"
    yield Table(f"{RATE:.0f} requests a second, {BUSY} replicas busy on average", COLUMNS, rows, (remark,))


if __name__ == "__main__":
    main()
