"""Profiles as text in the columns of nccl-tests, as CSV and as JSON."""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.collectives.output import csv_text, results_table, write_results
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.interconnect.profile import COURSE, FILE, TABLE, Launch, NetworkProfile
from tests.support.network_profiles import network_profile


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    profile = network_profile(3)
    said = results_table(profile).splitlines()
    head = next(line for line in said if "size" in line)
    assert head.split()[1:10] == ["size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong"]
    lines = [line.split() for line in said if not line.startswith("#")]
    assert len(lines) == 24
    first = dict(zip(head.split()[1:], lines[0], strict=False))
    assert first["size"] == "1024" and first["count"] == "256" and first["type"] == "float32"
    assert first["redop"] == "sum" and first["root"] == "-1" and float(first["time"]) == pytest.approx(300.85, abs=0.1)
    last = dict(zip(head.split()[1:], lines[7], strict=False))
    assert float(last["busbw"]) == pytest.approx(float(last["algbw"]) * 4 / 3, abs=2e-3)
    assert said[0] == "# 3 processes, gloo, torch 2.13.0, 3 launches"


def test_what_too_few_iterations_support_is_not_quoted() -> None:
    profile = network_profile()
    few = replace(profile.measurements[0], launches=(Launch((0.001, 0.0012, 0.0011), narrow=False),))
    line = next(
        line for line in results_table(replace(profile, measurements=(few,))).splitlines() if not line.startswith("#")
    )
    # p10, p90, p99 and the interval over launches are dashes; the star says that the time was over.
    assert line.split()[-5:] == ["-", "-", "-", "-", "3*"]


def test_findings_and_what_was_left_out_are_said() -> None:
    profile = network_profile(4, pair_seconds={(0, 1): 0.5})
    topology = replace(profile.topology, findings=("the link between ranks 0 and 1 is slow",))
    said = results_table(replace(profile, topology=topology, left_out=("send_recv: one process",)))
    assert "# FINDING: the link between ranks 0 and 1 is slow" in said
    assert "# skipped: send_recv: one process" in said
    assert "# slowest pair: ranks 0 and 1, 0.002 GB/s each way" in said
    assert "# 90% of all_reduce of 1048576 bytes is hidden by a matmul that takes as long\n" in said


def test_csv_has_a_line_for_each_case_and_pair() -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(network_profile(3)))))
    assert len(rows) == 24 + 3
    assert rows[0]["operation"] == "all_reduce" and rows[0]["p99_us"] == "" and float(rows[0]["low_us"]) > 0
    assert rows[-1]["ranks"] == "1 2"


def test_json_comes_back(tmp_path: Path) -> None:
    profile = network_profile(3)
    write_results(tmp_path / "profile", profile, [], {}, "an answer\n\n")
    assert from_json((tmp_path / "profile" / FILE).read_bytes(), NetworkProfile, "here") == profile
    assert (tmp_path / "profile" / TABLE).read_text() == f"an answer\n\n{results_table(profile)}"
    (point,) = json.loads((tmp_path / "profile" / COURSE).read_text())
    assert point["measured_at"] == profile.measured_at
