"""The phases of a step, and the exchange of all ranks' times together with the gradients."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from slipstream.pipeline.train.checkpoint.home import CheckpointDirectory
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.device_clock import DeviceClock
from slipstream.pipeline.train.fault_tolerance.goodput import GoodputRecorder
from slipstream.pipeline.train.telemetry.marks import ProcessorWait, StepMarks
from slipstream.pipeline.train.telemetry.step_times import GROUPS, StepPhases, StepTimes
from slipstream.pipeline.train.telemetry.totals import safe_diagnosis, shared_steps
from slipstream.shared.artifacts.results.ledger import ACTIVITIES, AttemptRecord, read_attempts
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.storage import storage_for
from slipstream.shared.telemetry.metrics import metrics_exposition
from slipstream.shared.telemetry.records import STEP_BOUNDS
from slipstream.shared.telemetry.step_blocks import PER_EXCHANGE, PER_STEP
from slipstream.shared.telemetry.totals import NodeTotals, read_totals, steps_file, write_totals
from tests.support.sampler_process import LABELS, totals
from tests.support.training import table_of_numbers, trained
from tests.support.worker_groups import in_group


def step_of(number: int, rank: int = 0) -> StepPhases:
    """Return times whose sums are all exact."""
    return StepPhases(data=number, compute=2 * number, exchange=0.25 * rank, optimizer=1.0, rest=0.5)


def test_what_all_ranks_send_comes_to_each() -> None:
    both = [StepTimes(rank, 2) for rank in range(2)]
    for rank, times in enumerate(both):
        for number in range(1, 101):
            times.add(step_of(number, rank))
        times.loader.gathering += 3.0 + rank
    received = torch.stack([times.to_send() for times in both]).max(dim=0).values.tolist()
    for times in both:
        times.received(received)
        assert times.steps == 100 and times.phases["data"] == 5050.0
        assert times.to_send().numel() == 0, "nothing is new"
        times.received([])
    first, second = both
    total = first.blocks.total
    assert total is not None and total.steps == 100 and second.blocks.total is None
    by_name = dict(zip(PER_STEP, total.sums.T.tolist(), strict=True))
    assert by_name["data"] == [5050.0, 5050.0] and by_name["exchange"] == [0.0, 25.0]
    assert total.least_exchange == 0.0 and total.slowest == 5050 * 3 + 150
    assert first.blocks.beside[:, 2].tolist() == [3.0, 4.0]
    assert StepPhases._fields == PER_STEP


def test_what_is_sent_stays_small() -> None:
    for world, groups in ((2, GROUPS), (512, 4), (4096, 1)):
        times = StepTimes(0, world)
        for number in range(1000):
            times.add(step_of(number))
        assert times.to_send().numel() <= world * (groups * len(PER_STEP) + len(PER_EXCHANGE))


def test_the_histogram_counts_each_step_once_in_each_bound_that_holds_it() -> None:
    times = StepTimes(0, 1)
    for took in (0.0005, 0.001, 0.0011, 100.0):
        times.add(StepPhases(0.0, took, 0.0, 0.0, 0.0))
    times.received(times.to_send().tolist())
    assert times.within[:2] == [2, 3] and times.within[-1] == 3 and len(times.within) == len(STEP_BOUNDS)


class SlowGradient(torch.autograd.Function):
    """Function that delays its backward pass by the given seconds."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return gradient, None


def phases_of_one_step(context: object, rank_that_is_late: int) -> list[float]:
    import torch.distributed as dist

    model = DistributedDataParallel(nn.Linear(4, 4))
    for _ in range(2):  # DDP orders its buckets
        model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    marks = StepMarks(DeviceClock(), 0.0)
    late = 0.3 if dist.get_rank() == rank_that_is_late else 0.0
    loss = SlowGradient.apply(model(torch.ones(2, 4)), late).sum()
    marks.backward_of(loss)
    loss.backward()
    marks.has_exchanged()
    assert marks.gradient and marks.exchanged
    begin, gradient, exchanged = marks.begin.wait(), marks.gradient.wait(), marks.exchanged.wait()
    phases = [gradient - begin, exchanged - gradient]
    gathered: list[list[float]] = [[] for _ in range(2)]
    dist.all_gather_object(gathered, phases)
    return [value for each in gathered for value in each]


@pytest.mark.prove
def test_who_is_late_computes_and_the_other_waits() -> None:
    computes, waits, others_compute, others_wait = in_group(2, phases_of_one_step, 0)
    assert computes > 0.3 > 0.15 > waits, "the late rank's peer was ready"
    assert others_wait > 0.15 > others_compute


def test_micro_batches_end_with_the_last() -> None:
    marks, model = StepMarks(DeviceClock(), 0.0), nn.Linear(3, 1)
    for _ in range(3):
        loss = model(torch.ones(2, 3)).sum()
        marks.backward_of(loss)
        loss.backward()
    first = marks.gradient
    assert first is not None
    loss = model(torch.ones(2, 3)).sum()
    marks.backward_of(loss)
    loss.backward()
    assert marks.gradient is not None and marks.gradient.wait() > first.wait() and marks.compute_cpu > 0
    marks.backward_of(torch.zeros(()))  # a rank without rows, or a loss that needs no gradient


def test_waiting_for_a_processor_is_counted() -> None:
    wait = ProcessorWait()
    before = wait.seconds()
    for _ in range(1000):
        time.sleep(0)
    assert wait.seconds() >= before
    wait.close()
    assert wait.seconds() == 0.0


SETTINGS = TrainingConfig(epochs=4, batch_size=30, patience=0)


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with data, a training of two ranks in ``run`` and its samples."""
    place = tmp_path_factory.mktemp("watched")
    data = table_of_numbers(place / "data", 900)
    trained(data, place / "run", 2, SETTINGS, sampled=place / "sampled")
    return place


def test_a_training_leaves_its_phases_and_its_verdict(watched: Path) -> None:
    attempt = read_attempt(watched / "run/model")
    found = attempt.bottleneck
    assert found is not None
    # The times of the first step, and of those since the last exchange, have not come together.
    assert 0 < found.steps <= 119 and found.phases.keys() == {"data", "compute", "exchange", "optimizer", "rest"}
    ledger = attempt.ledger
    between = ledger.seconds["evaluation"] + ledger.seconds["stall"]
    assert found.seconds == pytest.approx(sum(found.phases.values()) + between, rel=1e-6)
    assert found.seconds <= ledger.wall
    log = (watched / "run/model.log0").read_text()
    assert attempt.device == "cpu"
    assert found.seconds < 10 and "times as fast" not in log, "nothing is advised for seconds"
    record = read_attempts(storage_for(str(watched / "run/checkpoints")))[0]
    assert record.began_at == pytest.approx(time.time(), abs=120) and record.observed and record.pods == 1
    assert len(record.events["evaluation"]) == 4 and record.events["checkpoint"]
    assert all(0 < at <= record.wall + 1 for times in record.events.values() for at in times)


def test_older_and_newer_records_of_attempts_are_read(tmp_path: Path) -> None:
    storage = storage_for(str(tmp_path))
    steps = {"first_step": 0, "last_step": 9, "saved_step": 6}
    older: dict[str, object] = {"attempt": 1, "world": 2, **steps, "wall": 5.0, "ended": "finished"}
    older["seconds"] = dict.fromkeys(("start", "restore", "steps"), 1.0)
    newer = {**older, "attempt": 2, "seconds": dict.fromkeys((*ACTIVITIES, "waiting"), 1.0), "colour": "green"}
    for record in (older, newer):
        storage.put(f"ledger/{record['attempt']:04d}.json", json.dumps(record).encode())
    storage.put("ledger/0003.json", b"[1]")
    one, two = read_attempts(storage)
    assert one.seconds["stall"] == 0.0 and one.began_at == 0.0 and one.observed is None
    assert two.seconds == dict.fromkeys(ACTIVITIES, 1.0) and two.last_step == 9


def test_each_rank_writes_its_totals(watched: Path) -> None:
    first, second = read_totals(watched / "sampled")
    assert (first.rank, second.rank) == (0, 1) and first.steps == second.steps == 119
    assert first.samples + second.samples == 4 * 900, "the first step has samples, too"
    assert first.goodput is not None and 0 < first.goodput <= 1 and second.goodput is None
    assert first.steps_within[-1] == 119 and first.last_step_at == pytest.approx(time.time(), abs=120)
    assert all(0 <= share <= 1 for share in first.bottlenecks.values())


@pytest.mark.prove
def test_times_change_no_number(watched: Path, tmp_path: Path) -> None:
    unwatched = trained(watched / "data", tmp_path / "unwatched", 2, SETTINGS, body=without_marks)
    assert (watched / "run/model/last.safetensors").read_bytes() == (unwatched / "last.safetensors").read_bytes()
    assert read_attempt(unwatched).bottleneck is not None
    assert np.isclose(read_attempt(unwatched).bottleneck.phases["exchange"], 0.0)  # type: ignore[union-attr]


def without_marks(*arguments: object) -> None:
    from slipstream.pipeline.train.loop import train_loop
    from tests.support.training import rank_body

    step = train_loop.train_step
    train_loop.train_step = lambda *given: step(*given[:6])
    rank_body(*arguments)  # type: ignore[arg-type]


def test_a_diagnosis_that_fails_costs_neither_the_record_nor_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = CheckpointDirectory(storage_for(str(tmp_path)))
    recorder = GoodputRecorder(home, 1, 1, writes=True, started=time.perf_counter())
    recorder.observe = lambda: 1 / 0  # type: ignore[assignment,return-value]
    recorder.begin(0)
    recorder.record.last_step = 7
    recorder.end("finished")
    assert [(each.last_step, each.ended) for each in read_attempts(home.storage)] == [(7, "finished")]
    assert capsys.readouterr().err.count("could not be recorded (ZeroDivisionError") == 1
    broken = {"seconds": 1.0, "steps": 1, "phases": {"compute": -5.0}, "lost": {}, "evidence": {}}
    assert safe_diagnosis([AttemptRecord(1, 1, observed={**broken, "waited_for_processor": 0.0})]) is None
    assert "bottleneck analysis failed (ValueError" in capsys.readouterr().err


def test_ranks_in_lockstep_show_equal_steps_whenever_they_are_scraped(tmp_path: Path) -> None:
    """Their totals are written at other times, and count the steps of the last exchange only."""
    ranks = [StepTimes(rank, 2) for rank in range(2)]
    for rank, times in enumerate(ranks):
        times.done = shared_steps(steps_file(tmp_path, rank), times.done)
        write_totals(tmp_path, totals(rank, steps=24 * rank))
    for step in range(1, 31):
        for times in ranks:
            times.add(StepPhases(0.0, 0.1, 0.0, 0.0, 0.0))
        text = metrics_exposition(None, NodeTotals(), read_totals(tmp_path), LABELS)
        shown = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith("slipstream_steps_total{")]
        assert shown == [str(max(step, 24 * rank)) for rank in range(2)]
    (tmp_path / "ranks/0.steps").write_bytes(b"half")
    assert read_totals(tmp_path)[0].steps_now == 0
