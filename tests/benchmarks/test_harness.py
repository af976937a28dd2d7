"""Shared code of the benchmarks."""

from collections.abc import Callable

import pytest
import torch

from harness.dispatch import counted
from harness.table import Column, Table
from slipstream.operations.proofs.turns import in_turns, medians, settled

A, B = torch.zeros(8, 10), torch.zeros(8, 10)
INDEX = torch.zeros(8, 1, dtype=torch.int64)


@pytest.mark.parametrize(
    ("work", "floats"),
    [
        (lambda: A + B, 240),
        (lambda: A.add_(B), 240),
        (lambda: A.copy_(B), 160),
        (lambda: torch.mul(A, B, out=torch.empty(8, 10)), 240),
        (lambda: A.view(-1)[4:], 0),
        (lambda: torch.empty_like(A), 0),
        (lambda: A[:1].expand(8, 10) * B, 170),
        (lambda: A.gather(1, INDEX), 16 + 16),
        (lambda: torch._foreach_lerp_([A], [B], 0.5), 240),
        (lambda: A.bfloat16(), 120),
    ],
)
def test_bytes_are_those_that_an_operation_reads_and_writes(work: Callable[[], object], floats: int) -> None:
    assert counted(work).moved == 4 * floats


def test_contenders_take_turns() -> None:
    order: list[str] = []

    def contender(name: str) -> dict[str, float]:
        order.append(name)
        return {"seconds": len(order)}

    found = in_turns({"a": lambda: contender("a"), "b": lambda: contender("b")}, 20)
    turns = [tuple(order[place : place + 2]) for place in range(0, 40, 2)]
    assert set(turns) == {("a", "b"), ("b", "a")}, "one of them always followed the other"
    assert {name: [figures["seconds"] for figures in of_one] for name, of_one in found.items()} == {
        name: [place + 1 for place, who in enumerate(order) if who == name] for name in "ab"
    }


def test_the_first_turn_does_not_count_where_there_are_others() -> None:
    runs = [{"seconds": 9.0}, {"seconds": 1.0}, {"seconds": 2.0}, {"seconds": 7.0}]
    assert medians(runs) == {"seconds": 4.5}
    assert settled(runs) == {"seconds": 2.0}
    assert settled(runs[:1]) == {"seconds": 9.0}


def test_a_table_is_aligned_and_leaves_out_what_a_row_lacks() -> None:
    columns = (Column("seconds", "s"), Column("MiB", "bytes", "{:.0f}", 1 << 20))
    table = Table("Costs", columns, {"long name": {"s": 1.25, "bytes": 3 << 20}, "b": {"s": 100.0}}, ("a remark",))
    assert str(table).splitlines() == [
        "Costs",
        "           seconds  MiB",
        "long name      1.2    3",
        "b            100.0",
        "a remark",
    ]
    assert table.to_json()["rows"][1] == {"name": "b", "s": 100.0}


def test_a_table_shows_words_beside_figures() -> None:
    table = Table("Verdicts", (Column("cause", "cause"), Column("s", "s")), {"a": {"cause": "none", "s": 2.0}})
    assert str(table).splitlines()[1:] == ["   cause    s", "a   none  2.0"]
    assert table.to_json()["rows"] == [{"name": "a", "cause": "none", "s": 2.0}]
