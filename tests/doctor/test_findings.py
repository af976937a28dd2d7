"""Counts and layout of findings."""

import pytest

from slipstream.operations.doctor.findings import DoctorReport, Finding, NodeReading, readings_text
from tests.support.wording import same_wording

DISK = [Finding("warning", f"task {number}", "no disk", "evicted first", "ask for some") for number in range(5)]
GPU = Finding("error", "train", "no GPU " * 12, "runs on a CPU", "set gpu")


def test_findings_of_one_kind_are_one_line_and_errors_come_first() -> None:
    lines = DoctorReport((*DISK, GPU), ("much",), ("little",)).text(None).splitlines()
    same_wording(lines[0])
    assert lines[1:] == [
        "warning: task 0, task 1, task 2 and 2 more: no disk: evicted first; ask for some",
        "checked: much",
        "not checked: little",
        "1 error, 1 warning",
    ]


def test_a_table_is_aligned_and_fits_the_terminal() -> None:
    *lines, count = DoctorReport((*DISK, GPU)).text(60).splitlines()
    assert count == "1 error, 1 warning" and all(len(line) <= 60 for line in lines)
    assert [line[:9].strip() for line in lines if line[0] != " "] == ["error", "warning"]
    assert all(line[7:9] == "  " and line[9] != " " for line in lines), "text begins in one column"
    assert [line[9:] for line in lines][-2:] == ["in task 0, task 1, task 2 and 2 more", "fix: ask for some"]


FORGED = "train\r\nOK: nothing is missing\x1b[2J"


@pytest.mark.parametrize("width", [None, 200])
def test_names_from_a_package_forge_no_line(width: int | None) -> None:
    report = DoctorReport((Finding("error", FORGED, "no GPU", "runs on a CPU", "set gpu"),), (FORGED,), (FORGED,))
    said = f"{report.text(width)}\n{readings_text([NodeReading('GPU', FORGED, FORGED)], width)}"
    lines = said.split("\n")
    assert all(line.isprintable() for line in lines), lines
    assert sum("OK: nothing is missing" in line for line in lines) == sum("train OK" in line for line in lines) == 4


def test_readings_are_aligned() -> None:
    lines = readings_text(
        [NodeReading("CPU", "2 cores"), NodeReading("/dev/shm", "64 MiB", "too small")], 80
    ).splitlines()
    assert [line.split()[0] for line in lines] == ["what", "CPU", "/dev/shm"]
    assert lines[2].index("too small") == lines[0].index("problem")
    assert readings_text([NodeReading("CPU", "2 cores")], None) == "CPU: 2 cores"
