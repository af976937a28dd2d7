"""Text tables on a terminal, with any text in their cells."""

from slipstream.shared.text_table import aligned_table, numbered_line

FORGED = "a\n1  b\x1b[2J\u202e"


def test_a_cell_is_one_line_that_a_terminal_does_not_obey() -> None:
    shown = r"a 1 b\x1b[2J\u202e"
    lines = aligned_table(("name", "size"), [[FORGED, "1"], ["b", "20"]], left=("name",)).split("\n")
    cells = (("name", "size"), (shown, "   1"), ("b", "  20"))
    assert lines == [f"{name.ljust(len(shown))}  {size}" for name, size in cells]
    assert numbered_line(7, [FORGED, "x"]) == f"   7  {shown}  x"
