"""Totals: counted by the sampler, written by it and by the ranks, and read from untrusted files."""

from pathlib import Path

import pytest

from slipstream.shared.telemetry.records import DeviceReading
from slipstream.shared.telemetry.totals import NodeCounter, NodeTotals, read_node, read_totals, write_node, write_totals
from tests.support.sampler_process import device, sample, totals


def test_time_energy_and_dollars_are_counted() -> None:
    counter = NodeCounter({"spot": 3.6, "on_demand": 7.2})
    counter.add(sample(0, device("a", joules=5000), device("b", joules=None)), 10)
    found = counter.add(sample(20, device("a", joules=5600), device("b", joules=None)), 20)
    assert (found.seconds, found.gpu_seconds, found.energy_joules) == (30, 60, {"a": 600})
    assert found.throttled_seconds["b"] == {"sw_power_cap": 30, "hw_thermal_slowdown": 30}
    assert found.cost_dollars == pytest.approx({"spot": 0.03, "on_demand": 0.06})


def test_energy_used_while_a_device_did_not_answer_counts_and_a_counter_that_begins_anew_is_added() -> None:
    counter = NodeCounter({})
    counter.add(sample(0, device(joules=5000)), 1)
    down = counter.add(sample(1, DeviceReading("GPU-0", 0, "", up=False)), 1)
    assert (down.energy_joules, down.gpu_seconds) == ({"GPU-0": 0}, 2)
    assert counter.add(sample(2, device(joules=5300)), 1).energy_joules == {"GPU-0": 300}
    assert counter.add(sample(3, device(joules=40)), 1).energy_joules == {"GPU-0": 340}


def test_totals_come_back_as_they_were(tmp_path: Path) -> None:
    node = NodeTotals(1.5, 3.0, {"a": 2.0}, {"a": {"hw_slowdown": 1.0}}, {"spot": 0.1})
    write_node(tmp_path, node)
    assert read_node(tmp_path) == node
    for rank in (10, 2):
        write_totals(tmp_path, totals(rank))
    write_totals(tmp_path, totals(2, steps=30))
    assert read_totals(tmp_path) == [totals(2, steps=30), totals(10)]
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["10.json", "2.json", "node.json"]


def test_nothing_is_no_totals(tmp_path: Path) -> None:
    assert (read_totals(tmp_path), read_node(tmp_path)) == ([], NodeTotals())
