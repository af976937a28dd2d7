"""Who or what is slow: a rank (all its pairs), a link (one pair), or a rank that is short of its processor.

Only a factor of two is named, seen in every launch: on a busy machine pairs differ by tens of percent for no reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from slipstream.interconnect.profile import Measurement, NetworkProfile

FACTOR = 2.0


def slow_ranks_and_links(profile: NetworkProfile) -> tuple[str, ...]:
    """One line for each."""
    held_back = stragglers(profile)
    found = [
        f"rank {rank} is a straggler: {why}; look at its processor (quota, neighbours, frequency), not at its link"
        for rank, why in held_back.items()
    ]
    pairs = slow_pairs([pair for pair in profile.pairs if not set(pair.ranks) & held_back.keys()])
    ranks = slow_ranks(pairs, profile.fingerprint.world - len(held_back))
    for rank in ranks:
        times = max(factor for pair, factor in pairs.items() if rank in pair)
        found.append(f"rank {rank} is slow: each of its pairs takes up to {times:.1f} times as long as the others")
    for (first, second), times in pairs.items():
        if first not in ranks and second not in ranks:
            found.append(
                f"the link between ranks {first} and {second} is slow: {times:.1f} times as long as the other pairs"
            )
    return tuple(found)


def slow_pairs(pairs: Sequence[Measurement]) -> dict[tuple[int, int], float]:
    """Pairs that take ``FACTOR`` times as long as the fastest half of all pairs in every launch, and how many times.

    Compared is a pair's fastest iteration: over a slow link none is fast, while a process that is held back runs at
    full speed in between. Half of the pairs, because one slow rank of four makes half of all pairs slow.
    """
    if len(pairs) < 3:
        return {}
    found: dict[tuple[int, int], list[float]] = {}
    for launches in zip(*(pair.launches for pair in pairs), strict=False):
        fastest = [min(launch.seconds) for launch in launches]
        usual = median(sorted(fastest)[: (len(fastest) + 1) // 2])
        for pair, seconds in zip(pairs, fastest, strict=True):
            found.setdefault((pair.ranks[0], pair.ranks[1]), []).append(seconds / usual)
    return {pair: min(factors) for pair, factors in found.items() if min(factors) >= FACTOR}


def slow_ranks(pairs: dict[tuple[int, int], float], world: int) -> list[int]:
    """Ranks all of whose pairs with ranks that are not slow themselves are slow. Of three ranks and more."""
    counts = Counter(rank for pair in pairs for rank in pair)
    found: list[int] = []
    for rank, count in counts.most_common():
        if world > 2 and count >= world - 1 - len(found):
            found.append(rank)
    return sorted(found)


def stragglers(profile: NetworkProfile) -> dict[int, str]:
    """Ranks that need ``FACTOR`` times as long as the median for the same product in every launch; or that arrive late:
    in the smallest all_reduce they wait less than half as long as every other rank, in every launch."""
    found: dict[int, str] = {}
    if profile.fingerprint.world < 2:
        return found
    for rank in range(profile.fingerprint.world):
        factors = [
            seconds[rank] / median(other for at, other in enumerate(seconds) if at != rank)
            for seconds in profile.products
        ]
        if factors and min(factors) >= FACTOR:
            found[rank] = f"the same matrix product takes {min(factors):.1f} times as long on it"
    smallest = next(iter(profile.of("all_reduce")), None)
    return found | {rank: why for rank, why in latecomers(smallest).items() if rank not in found}


def latecomers(smallest: Measurement | None) -> dict[int, str]:
    """Ranks for which all others wait: they come late, and so find everybody there."""
    if smallest is None or not all(launch.by_rank for launch in smallest.launches):
        return {}
    found = {}
    for rank in range(smallest.world):
        shares = [
            launch.by_rank[rank] / min(other for at, other in enumerate(launch.by_rank) if at != rank)
            for launch in smallest.launches
        ]
        if smallest.world > 1 and max(shares) <= 1 / FACTOR:
            late = median(min(o for at, o in enumerate(each.by_rank) if at != rank) for each in smallest.launches)
            found[rank] = f"it arrives late: the others wait {late * 1e3:.2f} ms for it in each all_reduce"
    return found
