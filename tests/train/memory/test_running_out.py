"""Out of memory in a step: the next attempt continues with smaller micro-batches, to the same bit."""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.operations.proofs.gpu.attempts import may_have_children
from slipstream.pipeline.train.checkpoint.home import DECISION, CheckpointDirectory
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.memory import automatic, running_out
from slipstream.pipeline.train.memory.decision import DecisionConditions, MicroBatchDecision, read_decision
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.artifacts.results.ledger import read_attempts
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.errors import OutOfMemory, UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.storage import StorageUnavailable, storage_for
from tests.support.little_memory import LARGE, ROWS, STEPS_PER_EPOCH, large_steps, newest_step, take_memory_away
from tests.support.tokens import SIZES, token_data
from tests.support.training import log, rank_body, refusal, started, table_of_numbers, trained
from tests.support.wording import same_wording

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SHARDED = {"parallel": ParallelConfig(shard="weights")}
HOLDER = Holder("a run")
RAN_OUT = "rank 1 ran out of memory at 1 micro-batch: goes on with 2 from the last checkpoint"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "table", STEPS_PER_EPOCH * ROWS)


def digests(place: Path) -> dict[str, str]:
    files = json.loads((place / "model" / "manifest.json").read_bytes())["files"]
    return {name: files[name]["sha256"] for name in ("last.safetensors", "best.safetensors", "history.json")}


def run_out(data: Path, place: Path, settings: Any) -> int:
    """Train until a rank runs out of memory, which is taken away from the other; returns the step of the newest
    checkpoint."""
    ranks = started(data, place, 2, settings, LARGE, ONE_THREAD, holder=HOLDER)
    home = place / "checkpoints"
    take_memory_away(ranks[1].pid or 0, lambda: newest_step(home) >= 1)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [1, 1], log(place)
    assert RAN_OUT in log(place, 1)
    # Rank 0, which writes the ledger, saw but a lost peer.
    assert RAN_OUT not in log(place, 0)
    assert [attempt.ended for attempt in read_attempts(storage_for(str(home)))] == [RAN_OUT]
    return newest_step(home)


@pytest.mark.prove
@pytest.mark.parametrize("more", [{}, SHARDED], ids=["DDP", "FSDP2"])
def test_it_goes_on_with_twice_as_many(more: Mapping[str, Any], data: Path, tmp_path: Path) -> None:
    place, other = tmp_path / "run", tmp_path / "other"
    step = run_out(data, place, large_steps(2, **more))
    other.mkdir()
    shutil.copytree(place / "checkpoints", other / "checkpoints", ignore=shutil.ignore_patterns(DECISION))
    trained(data, place, 2, large_steps(2, **more), LARGE, ONE_THREAD, holder=HOLDER)
    said = log(place)
    assert "training.accumulation: 1 is 2, as it was before: with 1 a rank ran out of memory" in said
    assert f"resumes from step {step} " in said and "not bit for bit (accumulation 1 -> 2)" in said
    # As the user would have done it.
    trained(data, other, 2, large_steps(2, **more, accumulation=2), LARGE, ONE_THREAD, holder=HOLDER)
    assert digests(place) == digests(other)
    ledger = json.loads((place / "model" / "attempt.json").read_bytes())["ledger"]
    assert ledger["ends"] == [RAN_OUT, "finished"]


def out_of_memory(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    """A rank whose third step takes too much, at whatever number of micro-batches."""
    from slipstream.pipeline.train.loop import train_loop

    steps, real = [], train_loop.train_step

    def train_step(*arguments: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.")
        return real(*arguments)

    vars(train_loop)["train_step"] = train_step
    may_have_children()
    rank_body(rank, world, port, settings, environment)


def test_several_ranks_at_once_double_it_once(data: Path, tmp_path: Path) -> None:
    training = TrainingConfig(batch_size=ROWS, accumulation=3, epochs=1)
    ranks = started(data, tmp_path / "run", 2, training, environment=ONE_THREAD, body=out_of_memory)
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [1, 1]
    for rank in range(2):
        assert f"rank {rank} ran out of memory at 3 micro-batches: goes on with 6 " in log(tmp_path / "run", rank)
    record = json.loads((tmp_path / "run/checkpoints" / DECISION).read_bytes())
    assert (record["accumulation"], record["ran_out"]) == (6, 3)


MADE_FOR = DecisionConditions(1, "none", "none", "fp32", 64, 5, "data", "model")


def ended(
    home: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch, most: int = 64, rank: int = 0
) -> OutOfMemory | UserError:
    """Return the error of a rank that ran out of memory with 4 micro-batches, if at most ``most`` are possible."""
    monkeypatch.setattr(
        running_out, "possible_numbers", lambda setup: [n for n in (1, 2, 4, 8, 16, 32, 64) if n <= most]
    )
    group = SimpleNamespace(rank=rank, device=torch.device("cpu"))
    setup: Any = SimpleNamespace(training=SimpleNamespace(micro_batches=4), group=group)
    checkpoints: Any = SimpleNamespace(home=home, attempt=home.claim(HOLDER))
    request: Any = SimpleNamespace(holder=HOLDER)
    return running_out.after_running_out(setup, request, MADE_FOR, checkpoints, "no memory")


@pytest.mark.parametrize(
    ("known", "more"),
    [
        (MicroBatchDecision(64, MADE_FOR), 64),
        (MicroBatchDecision(6, MADE_FOR, ran_out=3), 8),
        (MicroBatchDecision(64, replace(MADE_FOR, memory=6)), 8),
    ],
    ids=["a larger one found by a trace", "a smaller one", "one for another memory"],
)
def test_the_next_attempt_takes_more_whatever_the_home_knew(
    known: MicroBatchDecision, more: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = CheckpointDirectory(storage_for(str(tmp_path)))
    known.write(home)
    ending = ended(home, monkeypatch)
    assert isinstance(ending, OutOfMemory) and ending.micro_batches == 4
    same_wording(str(ending))
    left = read_decision(home)
    assert left and left.ran_out == 4 and left.number_for(4, MADE_FOR) == left.number_for("auto", MADE_FOR) == more


@pytest.mark.parametrize(
    ("error", "ending", "said"),
    [
        (UserError("home: is full"), UserError, r"cannot be set to 8 \(home: is full\); expected 8, or a writable "),
        (
            StorageUnavailable("home"),
            OutOfMemory,
            r"goes on with 8 from the last checkpoint, if that number is set: it ",
        ),
        (MemoryError(), OutOfMemory, r"goes on with 8 from the last checkpoint, if that number is set: it "),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_home_that_refuses_the_number_ends_the_training(
    error: Exception, ending: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = CheckpointDirectory(storage_for(str(tmp_path)))

    def put(key: str, source: object) -> None:
        raise error

    monkeypatch.setattr(home.storage, "put", put)
    found = ended(home, monkeypatch)
    assert type(found) is ending and re.search(said, str(found))


@pytest.mark.parametrize("error", [UserError("no"), StorageUnavailable("no"), OSError("no"), MemoryError("no")])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_refusal_is_recorded_before_one_rank_of_a_machine_traces(
    rank: int, error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, before = CheckpointDirectory(storage_for(str(tmp_path))), list[str]()

    def leaner(*_: object) -> str:
        known = read_decision(home)
        before.append(known.refused if known else "")
        raise error

    monkeypatch.setattr(automatic, "suggest_remedies", leaner)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    ending, left = ended(home, monkeypatch, most=4, rank=rank), read_decision(home)
    start = f"training.accumulation: rank {rank} ran out of memory at 4 micro-batches, the most that are possible "
    untraced = f"{start}(no memory); {running_out.EXPECTED}"
    assert before == ([] if rank else [untraced])
    traced = f"{start}(no memory); settings that take less memory are unknown, as the step cannot be traced (no); "
    said = untraced if rank else traced + running_out.EXPECTED
    assert isinstance(ending, UserError) and ending.message == said
    assert left and (left.refused, left.execution, left.ran_out) == (said, HOLDER.execution, 4)


OFFLOADED = ParallelConfig(shard="weights", offload=True)


@pytest.mark.prove
@pytest.mark.parametrize(
    ("parallel", "ending"),
    [
        (ParallelConfig(), r"; by its trace a step takes \d+ KiB .*; cheapest first: 1\) .*\) devices of "),
        (
            OFFLOADED,
            r"; settings that take less memory are unknown, as the step cannot be traced \(.+\); expected training",
        ),
    ],
    ids=["traced", "not traced"],
)
def test_with_a_row_in_each_no_attempt_is_made_again(parallel: ParallelConfig, ending: str, tmp_path: Path) -> None:
    rows = token_data(tmp_path / "data").artifact.directory
    training = TrainingConfig(accumulation=8, batch_size=8, epochs=1, checkpoint_every=2, parallel=parallel)
    tokens = ModelConfig("transformer", {**SIZES, "vocab_size": 48})
    place = tmp_path / "run"
    trained(rows, place, 1, training, tokens, body=out_of_memory, holder=HOLDER)
    message = refusal(place, 0)
    assert message.startswith(
        "training.accumulation: rank 0 ran out of memory at 8 micro-batches, the most that are possible "
        "(DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.)"
    )
    assert re.search(ending, message) and "\n" not in message
    assert [each.ended for each in read_attempts(storage_for(str(place / "checkpoints")))] == [f"UserError: {message}"]
    # Restarted workers of the same execution refuse before their model is built; another execution may find more.
    (place / "model.refused0").unlink()
    trained(rows, place, 1, training, tokens, holder=HOLDER)
    assert refusal(place, 0) == message
    if not parallel.offload:
        trained(rows, place, 1, training, tokens, holder=Holder("another run"))
        assert "resumes from step 2 " in log(place)
