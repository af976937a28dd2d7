"""The diagnosis from given times: every cause alone, none, and causes that are never named."""

from dataclasses import replace

import numpy as np
import pytest

from slipstream.shared.artifacts.results import devices as causes
from slipstream.shared.artifacts.results.devices import AttemptLosses, Bottleneck
from slipstream.shared.telemetry.bottleneck import AttemptMeasurements, diagnose_training, measure_losses
from slipstream.shared.telemetry.step_blocks import BLOCK_STEPS, BLOCKS, PER_EXCHANGE, PER_STEP, StepBlocks
from tests.support.wording import same_wording

STEPS = 320
#: Seconds of a step on every rank: 20 ms, nearly all computing.
HEALTHY = {"data": 0.0002, "compute": 0.018, "exchange": 0.0005, "optimizer": 0.001, "rest": 0.0003}
HEALTHY |= {"compute_cpu": 0.018}


def blocks_of(
    *ranks: dict[str, float], beside: dict[str, float] | None = None, noise: float = 0.02, steps: int = STEPS
) -> StepBlocks:
    """Steps of ranks that differ from the healthy one as given, with some noise of their own work; who is early waits
    for the others in the exchange."""
    blocks, generator = StepBlocks(len(ranks)), np.random.default_rng(0)
    extra = np.array([[(beside or {}).get(name, 0.0) / steps for name in PER_EXCHANGE]] * len(ranks))
    for _ in range(steps):
        rows = np.array([[(HEALTHY | rank).get(name, 0.0) for name in PER_STEP] for rank in ranks])
        rows[:, PER_STEP.index("compute")] *= 1 + noise * np.abs(generator.normal(size=len(ranks)))
        local = rows[:, [PER_STEP.index(name) for name in ("data", "compute", "optimizer", "rest")]].sum(axis=1)
        rows[:, PER_STEP.index("exchange")] += local.max() - local
        blocks.add(rows[:, None, :], [1], extra)
    return blocks


def verdict_of(blocks: StepBlocks, around: AttemptMeasurements | None = None) -> Bottleneck:
    observed = measure_losses(blocks, around or AttemptMeasurements(overhead=0.0004))
    assert observed is not None
    found = diagnose_training([observed])
    assert found is not None
    return found


def test_nothing_is_blamed_in_a_healthy_run() -> None:
    found = verdict_of(blocks_of({}, {}))
    assert (found.verdict, found.also, found.gain) == ("", [], 1.0)
    assert found.useful == pytest.approx(0.9, abs=0.05)


@pytest.mark.parametrize("slow", [(0, 1), (1,)])
def test_data_that_is_late_for_all_or_for_one(slow: tuple[int, ...]) -> None:
    late = {"data": 0.0152}
    ranks = [late if rank in slow else {} for rank in range(2)]
    found = verdict_of(blocks_of(*ranks, beside={"store": 3.0, "gathering": 1.0}))
    assert found.verdict == causes.DATA
    assert found.shares[causes.DATA] == pytest.approx(15 / 35, abs=0.03)
    assert found.gain == pytest.approx(35 / 20, abs=0.1)
    assert ("every rank" if len(slow) == 2 else "rank 1") in found.sentence
    assert "data_cache_gib" in found.sentence
    same_wording(found.sentence)


def test_augmentation_that_holds_steps_up_is_named() -> None:
    found = verdict_of(blocks_of({"data": 0.0152}, beside={"gathering": 1.0, "augmentation": 3.0}))
    assert found.verdict == causes.DATA and "spent most time on augmentation" in found.sentence
    assert "fewer transforms in training.augment" in found.sentence


def test_a_slow_exchange_is_not_mistaken_for_a_slow_rank() -> None:
    found = verdict_of(
        blocks_of({"exchange": 0.02}, {"exchange": 0.02}), AttemptMeasurements(exchanged_bytes=3_200_000)
    )
    assert found.verdict == causes.COMMUNICATION
    assert found.shares[causes.COMMUNICATION] == pytest.approx(20 / 40, abs=0.03)
    assert causes.STRAGGLER not in found.shares and "3.2 MB" in found.sentence
    assert "hook" not in found.sentence, "nothing to gain for a small model"


def test_compression_is_advised_for_large_gradients() -> None:
    found = verdict_of(blocks_of({"exchange": 0.02}, {"exchange": 0.02}), AttemptMeasurements(exchanged_bytes=10**8))
    assert "training.gradients.hook" in found.sentence


def test_a_slow_rank_is_named_and_its_peers_waits_are_not_communication() -> None:
    found = verdict_of(blocks_of({}, {}, {"compute": 0.028}, {}))
    assert found.verdict == causes.STRAGGLER and "rank 2 " in found.sentence
    assert found.shares[causes.STRAGGLER] == pytest.approx(10 / 30, abs=0.03)
    assert found.shares[causes.COMMUNICATION] < 0.05


def test_a_rank_that_waits_for_a_processor_is_no_straggler() -> None:
    found = verdict_of(blocks_of({}, {"compute": 0.028, "processor_wait": 0.01}))
    assert found.verdict == causes.CONTENDED and causes.STRAGGLER not in found.shares


def test_ranks_that_are_slow_in_turn_are_no_stragglers() -> None:
    blocks = StepBlocks(2)
    generator = np.random.default_rng(1)
    for _ in range(STEPS):
        rows = np.array([[HEALTHY.get(name, 0.0) for name in PER_STEP]] * 2)
        rows[:, PER_STEP.index("compute")] += generator.exponential(0.01, size=2)
        blocks.add(rows[:, None, :], [1], np.zeros((2, len(PER_EXCHANGE))))
    assert causes.STRAGGLER not in verdict_of(blocks).shares


def test_a_divided_model_has_no_straggler_and_says_that_it_cannot_be_told_apart() -> None:
    found = verdict_of(blocks_of({"exchange": 0.02}, {"exchange": 0.02}), AttemptMeasurements(divided=True))
    assert found.verdict == causes.COMMUNICATION
    same_wording(found.sentence)


def test_passes_that_take_as_long_over_fewer_rows() -> None:
    found = verdict_of(blocks_of({}, {}), AttemptMeasurements(overhead=0.009, pieces=2))
    assert found.verdict == causes.LAUNCH
    assert found.shares[causes.LAUNCH] == pytest.approx(0.9, abs=0.05), "a pass of 9 ms for each of two micro-batches"


@pytest.mark.parametrize(("periods", "verdict"), [(60, causes.THROTTLED), (20, "")])
def test_a_quota_counts_if_it_stops_a_quarter_of_the_periods(periods: int, verdict: str) -> None:
    beside = {"throttled_seconds": 5.0, "throttled_periods": periods, "periods": 100}
    found = verdict_of(blocks_of({}, {}, beside=beside), AttemptMeasurements(threads=2))
    assert found.verdict == verdict
    if verdict:
        assert found.shares[verdict] == pytest.approx(2.5 / (STEPS * 0.0205), rel=0.05)


def test_gpus_that_are_clocked_down() -> None:
    found = verdict_of(blocks_of({}, {}, beside={"clocked_down": 3.0}))
    assert found.verdict == causes.THROTTLED and found.shares[causes.THROTTLED] == pytest.approx(3 / 6.56, rel=0.05)
    same_wording(found.sentence)


@pytest.mark.parametrize(
    ("around", "verdict"),
    [
        (AttemptMeasurements(checkpoint=4.0), causes.CHECKPOINT),
        (AttemptMeasurements(evaluation=4.0), causes.EVALUATION),
        (AttemptMeasurements(late_pods=4.0), causes.LATE_PODS),
    ],
)
def test_what_happens_between_steps(around: AttemptMeasurements, verdict: str) -> None:
    found = verdict_of(blocks_of({}, {}), around)
    steps = STEPS * 0.0205
    assert found.verdict == verdict and found.shares[verdict] == pytest.approx(4 / (4 + steps), rel=0.03)
    assert found.gain == pytest.approx((4 + steps) / steps, rel=0.03)


def test_causes_below_a_fifth_are_listed_only() -> None:
    found = verdict_of(blocks_of({}, {}), AttemptMeasurements(evaluation=STEPS * 0.0205 / 6))
    assert (found.verdict, found.also) == ("", [causes.EVALUATION])
    assert found.sentence.endswith("; next evaluation (14 %)")


def test_attempts_are_weighted_by_their_time() -> None:
    first = measure_losses(blocks_of({}, {}), AttemptMeasurements(evaluation=6.0))
    assert first is not None
    idle = replace(first, seconds=10 * first.seconds, lost={}, evidence={})
    found, alone = diagnose_training([first, idle]), diagnose_training([first])
    assert found and alone and alone.verdict == causes.EVALUATION and found.verdict == ""
    assert found.shares[causes.EVALUATION] == pytest.approx(alone.shares[causes.EVALUATION] / 11)
    assert diagnose_training([]) is None


def test_no_step_no_verdict() -> None:
    assert measure_losses(StepBlocks(2), AttemptMeasurements()) is None


def test_long_trainings_keep_few_blocks_and_lose_no_step() -> None:
    blocks = StepBlocks(1)
    row = np.array([[[0.5 ** (3 + number) for number in range(len(PER_STEP))]]])
    steps = 3 * BLOCKS * BLOCK_STEPS
    for _ in range(steps):
        blocks.add(row, [1], np.zeros((1, len(PER_EXCHANGE))))
    assert len(blocks.blocks) <= BLOCKS and blocks.total is not None
    assert blocks.total.steps == steps and blocks.total.sums.tolist() == (steps * row[0]).tolist()


def test_what_a_later_version_observed_is_no_traceback() -> None:
    from slipstream.shared.artifacts.results.ledger import AttemptRecord, observed_in

    known = measure_losses(blocks_of({}, {}), AttemptMeasurements())
    assert isinstance(known, AttemptLosses)
    from slipstream.shared.artifacts.records import to_tree

    records = [
        AttemptRecord(1, 2, observed=to_tree(known)),
        AttemptRecord(2, 2, observed={"something": "else"}),
        AttemptRecord(3, 2),
    ]
    assert observed_in(records) == [known]
