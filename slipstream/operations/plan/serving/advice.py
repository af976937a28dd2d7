"""Serving recommendation, its savings, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.operations.plan.serving.decide import (
    COOLDOWN_S,
    DAYS,
    MONTHS,
    ServingOption,
    ServingRequirements,
    p99_at_random,
    recommended_option,
    request_rate_limit,
    saved_by_optimising,
    scale_to_zero,
)
from slipstream.operations.plan.serving.load import RequestLoad
from slipstream.operations.plan.serving.model import FP32
from slipstream.operations.plan.serving.queueing import BEYOND
from slipstream.shared.formatting import count_with_noun, dollars, duration, significant


def serving_advice(rows: Sequence[ServingOption], load: RequestLoad, wanted: ServingRequirements) -> Iterator[str]:
    best = recommended_option(rows)
    assert best and best.planned
    yield (
        f"Take {best.variant} on {best.host.name}: {spread(best.planned.replicas)}, {dollars(best.dollars)} a month"
        f"{at_worst(best)}, {dollars(per_million(best, load))} per million requests; p99 "
        f"{duration(best.planned.p99)} at most."
    )
    around_the_clock = 24 * max(best.planned.instances) * best.host.per_hour * DAYS
    if around_the_clock > best.dollars:
        saved = dollars(around_the_clock - best.dollars)
        yield f"It saves {saved} a month over the instances of the busiest hour around the clock."
    yield from optimisation(rows, best, wanted)
    yield from nightly(rows, best)
    yield from no_replica(best, load, wanted)
    yield from what_changes_it(rows, best, load, wanted)


def optimisation(rows: Sequence[ServingOption], best: ServingOption, wanted: ServingRequirements) -> Iterator[str]:
    """Yield sentences on whether the savings of a faster model are worth an engineer's time."""
    saved = saved_by_optimising(rows, best)
    if saved is not None:
        worth = f"in {MONTHS} months {dollars(MONTHS * saved)}"
        yield f"{best.variant} saves {dollars(saved)} a month over {FP32}, {worth}{pays(saved, wanted)}."
    # One instance must always run.
    assert best.planned
    possible = best.dollars - 24 * best.host.per_hour * DAYS
    if max(best.planned.instances) == 1:
        yield "A faster model saves nothing there: one instance, the minimum, is enough."
    elif saved is None:
        worth = f"in {MONTHS} months {dollars(MONTHS * possible)}"
        yield f"A model that took no time would save {dollars(possible)} a month, {worth}{pays(possible, wanted)}."


def pays(saved: float, wanted: ServingRequirements) -> str:
    if wanted.effort is None:
        return ", and pays if it costs less (--engineer-hours, --engineer-rate)"
    return f": it {'pays' if MONTHS * saved > wanted.effort else 'does not pay'}, at a cost of {dollars(wanted.effort)}"


def nightly(rows: Sequence[ServingOption], best: ServingOption) -> Iterator[str]:
    least = min(rows, key=lambda row: row.nightly)
    if least.nightly < best.dollars:
        yield (
            f"If predictions may be a day old: scoring a day's requests each night takes {dollars(least.nightly)} a "
            f"month, {least.variant} on {least.host.name}."
        )


def no_replica(best: ServingOption, load: RequestLoad, wanted: ServingRequirements) -> Iterator[str]:
    its = scale_to_zero(best, load, wanted)
    spell = (COOLDOWN_S + wanted.cold_start) / 60
    how = f"{its.spells:.3g} idle periods a month" if its.spells else "one idle period a day"
    pays_from = (
        f"Scaling to zero pays from an idle share of {its.pays_from:.2%} on ({how}, {spell:.3g} min paid in each)"
    )
    if its.saves <= 0:
        yield f"{pays_from}; the load is idle for {its.idle:.2%}."
        return
    late = f"{its.late:.2%} of the requests are late"
    kept = "which keeps the p99" if its.late <= BEYOND else "which does not keep the p99"
    gone = f"as a start takes {wanted.cold_start:.3g} s and its backlog is gone after {its.backlog:.3g} s"
    saves = dollars(its.saves)
    yield f"{pays_from}; the load is idle for {its.idle:.2%}: it saves {saves}, but {late}, {kept}, {gone}."


def what_changes_it(
    rows: Sequence[ServingOption], best: ServingOption, load: RequestLoad, wanted: ServingRequirements
) -> Iterator[str]:
    assert best.planned
    busiest = significant(max(load.rates))
    up_to = significant(request_rate_limit(best, load, wanted))
    yield f"An instance more is needed from {up_to} requests/s on; the busiest minute has {busiest}."
    at_random = p99_at_random(best, load)
    if at_random > best.planned.p99:
        said = duration(at_random)
        yield f"Its replicas share one queue; if each request goes to one of them at random, the p99 is {said}."
    if best.at_worst is None:
        yield "If requests take longer by the largest known prediction error, no number of replicas keeps the p99."
    if best.time.error:
        yield f"Its times are {best.time.how}: a model exported there would measure them."
    sure = recommended_option([row for row in rows if not row.time.error])
    if best.time.error and sure:
        yield f"Measured: {sure.variant} on {sure.host.name}, {dollars(sure.dollars)} a month."


def per_million(row: ServingOption, load: RequestLoad) -> float:
    return row.dollars / load.month * 1e6


def at_worst(row: ServingOption) -> str:
    if not row.time.error:
        return ""
    return f" (up to {dollars(row.worst_dollars)})" if row.at_worst else ""


def spread(replicas: Sequence[int]) -> str:
    low, high = min(replicas), max(replicas)
    return f"{low} to {high} replicas" if low < high else count_with_noun(high, "replica")
