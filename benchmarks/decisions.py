"""Planned replicas against a simulation of every request, and billed time against the pods' time.

    python benchmarks/decisions.py [OPTIONS]

``slipstream plan serve`` reads the requests of every second of four days, and plans replicas for each hour. A
discrete-event simulation of the same seconds, in which every request comes at random, finds the fewest replicas of an
hour by itself. Both take the minute with the longest p99.

The main job runs at a dollar a second. Its bill is compared with the seconds that every stage printed at its end.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np

from harness.command import benchmark, part_option
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


WORKFLOWS = Path(__file__).resolve().parents[1] / "workflows"
#: A dollar a second, for every pod.
PROFILE = 'extends = "local"\n[default]\nprice_per_hour = 3600\n[distributed]\nprice_per_hour = 3600\n'
CONFIG = {
    "training": {"epochs": 20},
    "export": {"seconds": 2},
    "collectives": {"operations": ["all_reduce"], "smallest": 1024, "largest": 4096, "budget": 0.01, "launches": 1},
}
STAGE = re.compile(r"^(\w+) +([\d.]+) s ", re.MULTILINE)
BILL = (Column("billed s", "billed_s", "{:.2f}"), Column("took s", "took_s"), Column("share", "share", "{:.3f}"))


def bill() -> dict[str, dict[str, float | str]]:
    """Run the main job; return the dollars and the printed seconds of its stages."""
    random = np.random.default_rng(0)
    rows = "".join(f"{a:.4f},{b:.4f},{'ab'[int(a + b > 1)]}\n" for a, b in random.random((4_000, 2)))
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        (place / "t.csv").write_text(f"a,b,y\n{rows}")
        (place / "run.yaml").write_text(json.dumps(CONFIG))
        (place / "profile.toml").write_text(PROFILE)
        workflow = [str(Path(sys.executable).with_name("pyflyte")), "run", str(WORKFLOWS / "training.py")]
        ended = subprocess.run(
            [*workflow, "train_and_export", "--data", "t.csv", "--target", "y", "--config", "run.yaml"],
            cwd=place,
            env={**os.environ, "COLUMNS": "600", "SLIPSTREAM_PROFILE": str(place / "profile.toml")},
            capture_output=True,
            text=True,
            check=True,
        )
        (summary,) = place.glob("runs/*/summary.json")
        took = {name: float(seconds) for name, seconds in STAGE.findall(ended.stdout)}
        paid = {each["stage"]: each["paid"] for each in json.loads(summary.read_bytes())["costs"]}
    found = {name: (paid[name], took[name]) for name in took}
    found["in all"] = (sum(paid[name] for name in took), sum(took.values()))
    return {name: {"billed_s": here, "took_s": its, "share": here / its} for name, (here, its) in found.items()}


@benchmark
@part_option(("replicas", "bill"))
@click.option("--draws", default=4, show_default=True, help="Simulations of each minute.")
def main(quick: bool, parts: tuple[str, ...], draws: int) -> Iterator[Table]:
    """Compare planned replicas with simulated ones, and the bill of a run with the time of its stages."""
    if "bill" in parts:
        yield Table("The main job at a dollar a second", BILL, bill())
    if "replicas" in parts:
        yield replicas(quick, draws)


def replicas(quick: bool, draws: int) -> Table:
    rows = {
        f"{name}, {hour:02} h": compare(name, counts, hour, draws)
        for name, counts in recorded_days(RATE).items()
        for hour in ((12,) if quick else (9, 12, 21))
        if not quick or name == "flat"
    }
    equal = sum(row["planned"] == row["simulated"] for row in rows.values())
    off = max(abs(float(row["ratio"]) - 1) for row in rows.values())
    remark = f"replicas equal in {equal} of {len(rows)} hours; the p99 of the same replicas is off by at most {off:.1%}"
    return Table(f"{RATE:.0f} requests a second, {BUSY} replicas busy on average", COLUMNS, rows, (remark,))


if __name__ == "__main__":
    main()
