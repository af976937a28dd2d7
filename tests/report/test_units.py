"""Figures as people read them."""

from __future__ import annotations

import pytest

from tasks.report import units


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (units.percent(0.98888), "98.89 %"),
        (units.percent(None), "—"),
        (units.size(999), "999 B"),
        (units.size(84_310), "84.3 KB"),
        (units.size(3_000_000_000_000_000), "3000 TB"),
        (units.message_size(1024), "1 KiB"),
        (units.message_size(1020), "1020 B"),
        (units.message_size(16 << 20), "16 MiB"),
        (units.milliseconds(0.0612), "61.2 µs"),
        (units.milliseconds(5.5), "5.50 ms"),
        (units.microseconds(2_500_000), "2.50 s"),
        (units.seconds(0.04), "0.0 s"),
        (units.seconds(59.94), "59.9 s"),
        (units.seconds(59.96), "1 min 0 s"),
        (units.seconds(3_840), "1 h 4 min"),
        (units.bandwidth(0.7954), "0.795 GB/s"),
        (units.significant(0.0), "0"),
        (units.significant(2.6e-6, 2), "2.6e-06"),
        (units.significant(12345.6), "12,346"),
        (units.significant(-0.01234), "-0.0123"),
        (units.counted(1, "process"), "1 process"),
        (units.counted(2000, "process"), "2,000 processes"),
        (units.rows(1), "1 row"),
        (units.value(90.0), "90"),
        (units.value(38.6123), "38.61"),
        (units.metric("macro_f1", 0.5), "50.00 %"),
        (units.metric("rmse", 19.1834), "19.18"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text == expected
