"""``training.accumulation: auto``: the fewest micro-batches that fit, searched once and kept in the checkpoint
directory."""

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.gpu.attempts import may_have_children
from slipstream.pipeline.train.checkpoint.home import DECISION, CheckpointDirectory
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.step import micro_batches, padded_rows
from slipstream.pipeline.train.memory import automatic, decision
from slipstream.pipeline.train.memory.automatic import at_least_doubled, fewest_that_fit, legal_numbers
from slipstream.pipeline.train.memory.choices import TracedJob, TraceJob
from slipstream.pipeline.train.memory.command import rows_of_tokens
from slipstream.pipeline.train.memory.decision import DecisionConditions, MicroBatchDecision, data_and_model
from slipstream.pipeline.train.memory.processes import TraceFailure
from slipstream.pipeline.train.memory.trace import Footprint
from slipstream.pipeline.train.memory.tracker import KINDS
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.pipeline.train.parallel.layout import check_plan
from slipstream.pipeline.train.request import TrainingRequest
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import UserError
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.plan import ParallelPlan
from slipstream.shared.storage import storage_for
from tests.support.tokens import LENGTH, SIZES, token_data
from tests.support.training import log, rank_body, refusal, table_of_numbers, trained
from tests.support.wording import refuses, same_wording

MODEL = ModelConfig("transformer", {**SIZES, "vocab_size": 48})
AUTO = TrainingConfig(accumulation="auto", batch_size=24, epochs=1, checkpoint_every=8)
SPACIOUS, NARROW, TOO_LITTLE = 2**30, 800_000, 2**16
#: Bytes that a device has, for the ranks of these tests.
MEMORY = "memory_of_tests"


def job(**changed: Any) -> TraceJob:
    return TraceJob(MODEL, rows_of_tokens(ModelOrigin(MODEL), LENGTH), replace(AUTO, **changed), 1)


def body(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    memory = int(environment.pop(MEMORY))
    decision.device_memory = lambda group: memory
    may_have_children()
    rank_body(rank, world, port, settings, environment)


def train(data: Path, place: Path, memory: int, world: int = 1) -> Path:
    return trained(data, place, world, AUTO, MODEL, {MEMORY: str(memory)}, body)


def traced_as(peaks: dict[int, int], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Traces find these peaks, by the number of micro-batches; returns the numbers that were asked for."""
    asked: list[int] = []

    def trace_all(jobs: list[TraceJob]) -> list[TracedJob]:
        asked.extend(each.training.micro_batches for each in jobs)
        nothing = dict.fromkeys(KINDS, 0)
        return [
            TracedJob(each, Footprint({**nothing, "parameters": peaks[each.training.micro_batches]}, nothing))
            for each in jobs
        ]

    monkeypatch.setattr(automatic, "trace_all", trace_all)
    return asked


def test_it_is_the_fewest_that_fit_found_in_few_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = legal_numbers(job().share, AUTO.parallel)
    assert numbers == [1, 2, 3, 4, 5, 6, 8, 12, 24]
    for fewest in numbers[1:]:
        peaks = {number: 10**9 // number for number in numbers}
        asked = traced_as(peaks, monkeypatch)
        memory = (peaks[fewest] + 10**5) / automatic.USABLE
        assert fewest_that_fit(job(), memory).job.training.micro_batches == fewest
        assert len(asked) <= 5


def test_without_another_layout_that_can_be_traced_a_line_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        automatic, "trace_all", lambda jobs: [TracedJob(each, TraceFailure("not tried")) for each in jobs]
    )
    same_wording(automatic.cheapest_first(job(accumulation=24), 10))


def test_it_is_one_if_all_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = traced_as({1: 10}, monkeypatch)
    assert fewest_that_fit(job(), 2**30).job.training.micro_batches == 1 and asked == [1]


def test_a_pipeline_has_whole_rounds() -> None:
    assert legal_numbers(24, ParallelConfig(pipeline=2)) == [2, 4, 6, 8, 12, 24]
    assert legal_numbers(3, ParallelConfig(pipeline=4)) == [4]


def pieces_of(share: int, number: int) -> int:
    return len(micro_batches(padded_rows(share, number), number))


def test_an_interleaved_pipeline_takes_each_of_them_and_no_other() -> None:
    parallel = ParallelConfig(pipeline=4, schedule="interleaved", stages_per_rank=2)
    plan = ParallelPlan(tuple("abcdefgh"), {}, {}, 0, (1,), lambda *_: None)

    def taken(pieces: int) -> bool:
        with suppress(UserError):
            check_plan(parallel, plan, pieces)
            return True
        return False

    for share in range(8, 80):
        possible = {pieces_of(share, number) for number in range(1, share + 1)}
        legal = legal_numbers(share, parallel)
        assert {pieces_of(share, number) for number in legal} == set(filter(taken, possible)) or legal == [8], share
    assert legal_numbers(79, parallel)[-1] == 40 and legal_numbers(80, parallel)[-1] == 80


def test_batch_statistics_need_two_rows() -> None:
    assert legal_numbers(9, ParallelConfig(), least_rows=2) == [1, 2, 3]


def test_twice_as_many_or_the_next_that_are_possible() -> None:
    numbers = [1, 2, 3, 4, 5, 6, 8, 12, 24]
    assert [at_least_doubled(number, numbers) for number in (1, 2, 3, 5, 8, 12, 24)] == [2, 4, 6, 12, 24, 24, 0]
    assert [at_least_doubled(number, numbers) for number in (7, 13)] == [24, 24]


MADE_FOR = DecisionConditions(2, "none", "none", "fp32", 24, 5, "data", "model")


def test_another_memory_or_layout_is_another_decision() -> None:
    found = MicroBatchDecision(3, MADE_FOR, peak=1)
    assert found.number_for("auto", MADE_FOR) == 3 and found.number_for(1, MADE_FOR) == 0
    # No batch can be cut into more pieces than it has rows, whatever the store says.
    assert MicroBatchDecision(25, MADE_FOR).number_for("auto", MADE_FOR) == 0
    changes: dict[str, Any] = {"processes": 1, "layout": "shard weights", "recompute": "full", "memory": 4}
    others = {"precision": "bf16", "batch_size": 8, "data": "other rows", "model": "a deeper one"}
    for name, value in {**changes, **others}.items():
        assert found.number_for("auto", replace(MADE_FOR, **{name: value})) == 0


def request(data: Path, model: ModelConfig = MODEL) -> TrainingRequest:
    return TrainingRequest(data, model, AUTO, data / "model", str(data / "home"), {})


def test_another_model_or_other_data_is_told_apart_and_not_where_a_base_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    other = table_of_numbers(tmp_path / "other", 8)
    one = data_and_model(request(data))
    assert data_and_model(request(data)) == one
    rows, model = data_and_model(request(other))
    assert rows != one[0] and model == one[1]
    deeper = ModelConfig("transformer", {**MODEL.arguments, "num_hidden_layers": 3})
    rows, model = data_and_model(request(data, deeper))
    assert rows == one[0] and model != one[1]
    monkeypatch.setattr(decision, "shaped_for", lambda config, *_: replace(config, arguments=MODEL.arguments))
    here, there = (data_and_model(request(data, ModelConfig("transformer", base=base))) for base in ("here", "there"))
    assert here == there == one


def test_what_ran_out_of_memory_is_not_asked_for_again_and_more_may_be() -> None:
    found = MicroBatchDecision(4, MADE_FOR, ran_out=2)
    assert [found.number_for(asked, MADE_FOR) for asked in ("auto", 1, 2, 3, 8)] == [4, 4, 4, 0, 0]


def test_who_was_refused_is_refused_again_and_a_new_run_is_not() -> None:
    named, nameless = (
        MicroBatchDecision(24, MADE_FOR, ran_out=24, refused="no", execution=name) for name in ("a run", "")
    )
    assert named.refused_in(Holder("a run")) and not named.refused_in(Holder("another"))
    assert nameless.refused_in(Holder("", 1)) and not nameless.refused_in(Holder("", 0))
    assert not named.refused_in(Holder("", 1)) and not nameless.refused_in(Holder("a run", 1))
    assert not replace(named, refused="").refused_in(Holder("a run"))


@pytest.mark.prove
def test_a_training_decides_and_writes_it_into_its_home(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    train(data, tmp_path / "run", NARROW)
    record = json.loads((tmp_path / "run" / "checkpoints" / DECISION).read_text())
    assert 1 < record["accumulation"] < 24 and record["peak"] <= automatic.USABLE * NARROW
    assert f"auto is {record['accumulation']}: a step takes" in log(tmp_path / "run")


@pytest.mark.prove
def test_a_run_that_cannot_fit_is_one_line_with_remedies(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    train(data, tmp_path / "run", TOO_LITTLE)
    message = refusal(tmp_path / "run", 0)
    assert message.startswith("training.accumulation: no number of micro-batches fits: with 24 a step takes ")
    assert ") devices of at least " in message and "\n" not in message


@pytest.mark.prove
def test_it_is_written_into_the_home_and_read_from_there(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    home = tmp_path / "run" / "checkpoints"
    home.mkdir(parents=True)
    made_for = DecisionConditions.of(AUTO, 2, "fp32", SPACIOUS, data_and_model(request(data)))
    MicroBatchDecision(5, made_for, peak=1).write(CheckpointDirectory(storage_for(str(home))))
    train(data, tmp_path / "run", SPACIOUS, world=2)
    assert "auto is 5, as it was before" in log(tmp_path / "run")


@pytest.mark.prove
def test_what_cannot_be_traced_asks_for_a_number() -> None:
    offload = replace(AUTO, parallel=replace(AUTO.parallel, shard="weights", offload=True))
    with refuses(UserError, match="training.accumulation:"):
        fewest_that_fit(TraceJob(MODEL, rows_of_tokens(ModelOrigin(MODEL), LENGTH), offload, 2), 2**30)
