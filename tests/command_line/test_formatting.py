"""Formats of figures, and text tables on a terminal with any text in their cells."""

import pytest

from slipstream.shared import formatting


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formatting.percent(0.98888), "98.89 %"),
        (formatting.percent(None), "—"),
        (formatting.file_size(999), "999 B"),
        (formatting.file_size(84_310), "84.3 KB"),
        (formatting.file_size(3_000_000_000_000_000), "3000 TB"),
        (formatting.size_text(1024), "1 KiB"),
        (formatting.size_text(1020), "1020 B"),
        (formatting.size_text(16 << 20), "16 MiB"),
        (formatting.milliseconds(0.0612), "61.2 µs"),
        (formatting.milliseconds(5.5), "5.50 ms"),
        (formatting.microseconds(2_500_000), "2.50 s"),
        (formatting.seconds(0.04), "0.0 s"),
        (formatting.seconds(59.94), "59.9 s"),
        (formatting.seconds(59.96), "1 min 0 s"),
        (formatting.seconds(3_840), "1 h 4 min"),
        (formatting.age(119), "119 s"),
        (formatting.age(-1), "0 s"),
        (formatting.age(3 * 3600), "3 h"),
        (formatting.age(3.2 * 86400), "3 d"),
        (formatting.duration(3.3611 * 3600), "3.36 h"),
        (formatting.duration(600), "10.0 min"),
        (formatting.duration(float("inf")), "never"),
        (formatting.dollars(1234.5), "$1,234.50"),
        (formatting.dollars(0.005521), "$0.00552"),
        (formatting.bandwidth(0.7954), "0.795 GB/s"),
        (formatting.significant(0.0), "0"),
        (formatting.significant(2.6e-6, 2), "2.6e-06"),
        (formatting.significant(12345.6), "12,346"),
        (formatting.significant(-0.01234), "-0.0123"),
        (formatting.count_with_noun(1, "process"), "1 process"),
        (formatting.count_with_noun(2000, "process"), "2,000 processes"),
        (formatting.rows(1), "1 row"),
        (formatting.value(90.0), "90"),
        (formatting.value(-9_999_999.0), "-9,999,999"),
        (formatting.value(123456789012345.0), "1.235e+14"),
        (formatting.value(float("inf")), "inf"),
        (formatting.moment(0), "1970-01-01"),
        (formatting.moment(-60), "1969-12-31 23:59"),
        (formatting.moment(1e18), "1e+18"),
        (formatting.column_figure({"type": "time", "std": 129_600.0}, "std"), "1.50 days"),
        (formatting.column_figure({"type": "time", "min": 86_400.0}, "min"), "1970-01-02"),
        (formatting.column_figure({"type": "number", "min": 86_400.0}, "min"), "86,400"),
        (formatting.column_figure({"type": "number"}, "median"), ""),
        (formatting.value(38.6123), "38.61"),
        (formatting.metric("macro_f1", 0.5), "50.00 %"),
        (formatting.metric("rmse", 19.1834), "19.18"),
        (formatting.with_limits(0.5, -0.25, 2.0), "0.50 (-0.25 to 2.00)"),
        (formatting.with_limits(0.5, -1e6, 1e6), "0.50 (no limit to no limit)"),
    ],
)
def test_figures(text: str, expected: str) -> None:
    assert text == expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("short", "short"),
        ("a\n b\tc", "a b c"),
        ("fourteen chars", "fourteen chars"),
        ("fifteen letters", "fifteen lette…"),
    ],
)
def test_labels_are_one_short_line(label: str, expected: str) -> None:
    assert formatting.shorten_label(label) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(True, "true"), ([1, "a"], "1, a"), ((), "none"), ({}, "none"), (None, "none"), (" ", '" "')],
)
def test_settings_are_spelled_as_in_yaml(value: object, expected: str) -> None:
    assert formatting.setting(value) == expected


FORGED = "a\n1  b\x1b[2J\u202e"


def test_a_cell_is_one_line_that_a_terminal_does_not_obey() -> None:
    shown = r"a 1 b\x1b[2J\u202e"
    lines = formatting.aligned_table(("name", "size"), [[FORGED, "1"], ["b", "20"]], left=("name",)).split("\n")
    cells = (("name", "size"), (shown, "   1"), ("b", "  20"))
    assert lines == [f"{name.ljust(len(shown))}  {size}" for name, size in cells]
    assert formatting.numbered_line(7, [FORGED, "x"]) == f"   7  {shown}  x"
