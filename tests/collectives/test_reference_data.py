"""Reference data of results: distinguishes ranks and positions, and every type holds its sums exactly."""

import numpy as np
import pytest
import torch

from slipstream.pipeline.collectives.operations.reference_data import (
    DTYPES,
    EXACT,
    PERIOD,
    POISON,
    TOLERANCE,
    TURN,
    ReferenceData,
    chunk_ranges,
    random_levels,
    repeat_period,
)

COUNT = 1 << 16


def test_every_stretch_tells_the_ranks_apart() -> None:
    for dtype in DTYPES:
        values = ReferenceData(dtype, 64, "sum")
        for other in (1, 7, 8, 63):
            differ = values.sent(0, 0, COUNT) != values.sent(other, 0, COUNT)
            # In each stretch of 64 elements, and so wherever a piece of a message goes astray.
            assert differ.reshape(-1, 64).any(dim=1).all(), (dtype, other)


@pytest.mark.parametrize("shift", [1 << n for n in range(15)] + [1021, 5000])
def test_no_shift_goes_unseen(shift: int) -> None:
    data = ReferenceData("bfloat16", 32, "sum").sent(3, 0, COUNT)
    moved = (data[shift:] != data[:-shift])[: (COUNT - shift) // 64 * 64]
    assert moved.reshape(-1, 64).any(dim=1).all()


def test_a_piece_is_the_data_at_its_positions() -> None:
    values = ReferenceData("float32", 5, "sum")
    assert torch.equal(values.sent(2, 1000, 500), values.sent(2, 0, 1500)[1000:])
    assert torch.equal(values.reduced(1000, 500), values.reduced(0, 1500)[1000:])
    assert [sum(n for _, n in chunk_ranges(c)) for c in (0, 5, 3 << 20)] == [0, 5, 3 << 20]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", [1, 2, 3, 32])
@pytest.mark.parametrize("reduction", ["sum", "max", "avg"])
def test_reductions_are_what_the_type_itself_adds_up_to(dtype: str, world: int, reduction: str) -> None:
    values = ReferenceData(dtype, world, reduction)
    sent = torch.stack([values.sent(rank, 500, 2000) for rank in range(world)])
    exact = {"sum": sent.double().sum(0), "max": sent.double().amax(0), "avg": sent.double().mean(0)}[reduction]
    if reduction == "avg" and dtype.startswith("int"):
        exact = exact.floor()
    assert torch.equal(values.reduced(500, 2000), exact.to(DTYPES[dtype]))
    assert sent.min() > POISON
    if reduction == "sum":
        # Step by step, as a ring adds: exact in bfloat16 up to 32 ranks.
        total = sent[0].clone()
        for each in sent[1:]:
            total += each
        assert torch.equal(total.double(), exact) and values.tolerance == 0
        assert exact.max() <= EXACT[dtype]


def test_beyond_what_a_type_adds_exactly_the_tolerance_is_that_of_nccl_tests() -> None:
    many = ReferenceData("bfloat16", 33, "sum")
    assert many.tolerance == TOLERANCE["bfloat16"] == 1e-2
    expected = many.reduced(0, 100)
    assert many.first_wrong(expected, expected) is None
    off = expected.clone()
    off[7] = off[7] * 1.05
    assert many.first_wrong(off, expected) == 7
    off[3] = float("nan")
    assert many.first_wrong(off, expected) == 3
    assert ReferenceData("float32", 3, "avg").tolerance > 0 and ReferenceData("float32", 4, "avg").tolerance == 0


def test_values_are_those_of_the_definition() -> None:
    """Position p holds entry (p + p // PERIOD * TURN) mod PERIOD of the rank's row."""
    for start, count in ((0, 5000), (1020, 3), (123_456, 4000), (5, 0), (PERIOD * 7, PERIOD)):
        at = np.arange(start, start + count)
        expected = random_levels(3, 100)[(at + at // PERIOD * TURN) % PERIOD]
        assert np.array_equal(repeat_period(random_levels(3, 100), start, count, "int64").numpy(), expected), start
