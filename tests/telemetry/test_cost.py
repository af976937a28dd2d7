"""Costs add up to the cent, for any usage, loss and kill; without a price, hours and no dollars."""

import math
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline.report.costs import AttemptCost, AttemptUsage, Cost, compute_bill
from tests.support.wording import refuses

CENT = Decimal("0.01")
PRICES = st.decimals(min_value="0.001", max_value="99.9999", places=6)


@st.composite
def priced(draw: st.DrawFn) -> AttemptUsage:
    """An attempt whose prices are known; many are killed early, and what they did is lost, in part or whole."""
    on_demand = draw(PRICES)
    seconds = draw(st.floats(0, 2e5))
    return AttemptUsage(
        stage=draw(st.sampled_from(["prepare", "train", "export"])),
        attempt=draw(st.integers(0, 9)),
        seconds=seconds,
        lost_seconds=draw(st.one_of(st.just(0.0), st.just(seconds), st.floats(0, max(seconds, 1)))),
        pods=draw(st.integers(1, 16)),
        gpus=draw(st.integers(0, 8)),
        spot=draw(st.booleans()),
        on_demand_price=on_demand,
        spot_price=draw(PRICES.filter(lambda price: price <= on_demand)),
    )


ATTEMPTS = st.lists(priced(), min_size=1, max_size=30)


def exact(usage: AttemptUsage, seconds: float, price: Decimal | None) -> Fraction:
    assert price is not None
    return Fraction(seconds) * usage.pods * Fraction(price) / 3600


def known(amount: Decimal | None) -> Decimal:
    assert amount is not None and amount == amount.quantize(CENT)
    return amount


def total_of(costs: list[Cost], column: str) -> Decimal:
    return sum((known(getattr(cost, column)) for cost in costs), Decimal(0))


@settings(max_examples=200, deadline=None)
@given(ATTEMPTS)
def test_rows_add_up_to_stages_and_stages_to_all(used: list[AttemptUsage]) -> None:
    found = compute_bill(used)
    for column in ("paid", "lost", "on_demand"):
        for stage, cost in found.stages.items():
            rows = [row.cost for row in found.rows if row.stage == stage]
            assert total_of(rows, column) == known(getattr(cost, column))
        assert total_of(list(found.stages.values()), column) == known(getattr(found.total, column))


@pytest.mark.prove
@settings(max_examples=200, deadline=None)
@given(ATTEMPTS)
def test_the_sums_are_those_of_the_exact_amounts(used: list[AttemptUsage]) -> None:
    """However many attempts: rounding each would let the error grow with them."""
    total = compute_bill(used).total
    paid = sum(exact(usage, usage.seconds, usage.price) for usage in used)
    lost = sum(exact(usage, min(usage.lost_seconds, usage.seconds), usage.price) for usage in used)
    on_demand = sum(exact(usage, usage.seconds, usage.on_demand_price) for usage in used)
    half = Fraction(1, 200)
    assert abs(Fraction(known(total.paid)) - paid) <= half
    assert abs(Fraction(known(total.on_demand)) - on_demand) <= half
    assert abs(Fraction(known(total.lost)) - lost) <= 2 * half


@settings(max_examples=60, deadline=None)
@given(ATTEMPTS)
def test_a_row_contradicts_nothing(used: list[AttemptUsage]) -> None:
    by_row = {(row.stage, number): row for number, row in enumerate(compute_bill(used).rows)}
    stages = list(dict.fromkeys(usage.stage for usage in used))
    for row, usage in zip(by_row.values(), sorted(used, key=lambda usage: stages.index(usage.stage)), strict=True):
        paid, lost, on_demand = known(row.cost.paid), known(row.cost.lost), known(row.cost.on_demand)
        assert (row.stage, row.attempt) == (usage.stage, usage.attempt)
        assert 0 <= lost <= paid <= on_demand
        assert lost == paid or usage.lost_seconds < usage.seconds
        assert lost == 0 or usage.lost_seconds > 0
        assert paid == on_demand or usage.spot
        assert abs(Fraction(paid) - exact(usage, usage.seconds, usage.price)) < Fraction(2, 100)


def test_amounts_that_rounded_alone_would_not_add_up() -> None:
    used = [AttemptUsage("train", number, 3600, on_demand_price=Decimal("0.004")) for number in range(10)]
    found = compute_bill(used)
    assert [int(known(row.cost.paid) * 100) for row in found.rows] == [0, 1, 0, 1, 0, 0, 1, 0, 1, 0]
    assert found.total.paid == Decimal("0.04")


def test_a_killed_attempt_is_paid_for_and_its_lost_work_told_apart() -> None:
    price: dict[str, Any] = {"on_demand_price": Decimal("40.00"), "spot_price": Decimal("16.00")}
    killed = AttemptUsage("train", 0, 1800, lost_seconds=450, pods=2, gpus=8, spot=True, joules=7.2e6, **price)
    finished = AttemptUsage("train", 1, 3600, pods=2, gpus=8, joules=3.6e6, **price)
    found = compute_bill([killed, finished, AttemptUsage("prepare", 0, 900, on_demand_price=Decimal("0.40"))])
    first = found.rows[0].cost
    assert (first.pod_hours, first.gpu_hours, first.watt_hours) == (1.0, 8.0, 2000.0)
    assert (first.paid, first.lost, first.on_demand) == (Decimal("16.00"), Decimal("4.00"), Decimal("40.00"))
    train, prepare = found.stages["train"], found.stages["prepare"]
    assert (train.paid, train.lost, train.on_demand) == (Decimal("96.00"), Decimal("4.00"), Decimal("120.00"))
    assert (train.gpu_hours, train.watt_hours) == (24.0, 3000.0)
    assert prepare.paid == prepare.on_demand == Decimal("0.10") and prepare.watt_hours is None
    assert found.total.paid == Decimal("96.10") and found.total.watt_hours == 3000.0


def test_no_more_is_lost_than_was_done() -> None:
    """Sums of times that were measured apart may say so."""
    (row,) = compute_bill(
        [AttemptUsage("train", 0, 3600, lost_seconds=3600.5, on_demand_price=Decimal("7200.00"))]
    ).rows
    assert row.cost.lost == row.cost.paid == Decimal("7200.00")


def test_rows_stand_in_the_order_of_their_stages() -> None:
    used = [AttemptUsage("prepare", 0, 1), AttemptUsage("train", 0, 1), AttemptUsage("prepare", 1, 1)]
    assert [(row.stage, row.attempt) for row in compute_bill(used).rows] == [
        ("prepare", 0),
        ("prepare", 1),
        ("train", 0),
    ]


def test_no_price_is_hours_and_no_dollars() -> None:
    (row,) = compute_bill([AttemptUsage("train", 0, 7200, pods=2, gpus=4)]).rows
    assert row == AttemptCost("train", 0, Cost(4.0, 16.0, None, None, None, None, unpriced_pod_hours=4.0))


def test_a_spot_price_that_is_not_known_leaves_the_one_on_demand() -> None:
    used = [
        AttemptUsage("train", 0, 3600, lost_seconds=3600, spot=True, on_demand_price=Decimal("2.50")),
        AttemptUsage("train", 1, 3600, on_demand_price=Decimal("2.50")),
    ]
    found = compute_bill(used)
    assert (found.rows[0].cost.paid, found.rows[0].cost.lost) == (None, None)
    assert found.rows[0].cost.on_demand == Decimal("2.50")
    assert (found.total.paid, found.total.on_demand) == (Decimal("2.50"), Decimal("2.50")), "of the same hour"
    assert found.total.unpriced_pod_hours == 1.0
    assert compute_bill(used[:1]).total.on_demand == Decimal("2.50"), "nothing is paid that it could differ from"


def test_hours_without_a_price_on_demand_leave_no_sum_to_compare() -> None:
    used = [
        AttemptUsage("train", 0, 3600, spot=True, spot_price=Decimal("4.00")),
        AttemptUsage("prepare", 0, 3600, on_demand_price=Decimal("1.00")),
    ]
    total = compute_bill(used).total
    assert (total.paid, total.on_demand) == (Decimal("5.00"), None)


@settings(max_examples=100, deadline=None)
@given(ATTEMPTS, st.data())
def test_paid_and_on_demand_are_of_the_same_hours(used: list[AttemptUsage], data: st.DataObject) -> None:
    """The exact sum over the attempts with a known payment."""
    some = [replace(usage, spot_price=None) if data.draw(st.booleans()) else usage for usage in used]
    total = compute_bill(some).total
    priced = [usage for usage in some if usage.price is not None]
    expected = sum(exact(usage, usage.seconds, usage.on_demand_price) for usage in priced or some)
    assert abs(Fraction(known(total.on_demand)) - expected) <= Fraction(1, 200)
    assert (total.paid is None) == (not priced) and (total.paid or 0) <= known(total.on_demand)


def test_nothing_used_costs_nothing_known() -> None:
    assert compute_bill([]).total == Cost(0, 0, None, None, None, None)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"seconds": -1.0}, {"seconds": math.nan}, {"seconds": math.inf}, {"lost_seconds": -1.0}, {"pods": -1}),
        *({"joules": -1.0}, {"on_demand_price": Decimal(-1)}, {"spot_price": Decimal("NaN")}),
    ],
)
def test_amounts_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with refuses(ValueError):
        replace(AttemptUsage("train", 0, 1.0), **wrong)
