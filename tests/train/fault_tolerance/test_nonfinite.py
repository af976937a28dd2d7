"""Non-finite losses and gradients: skipped, named, rolled back from, and exact through kills."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.checkpoint.shards import read_index, read_tensor
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import ParallelConfig
from slipstream.shared.models.config import ModelConfig
from tests.support.training import log, refusal, table_of_numbers, trained

ROWS = 600  # 8 steps of 75 to an epoch
SPOILT = {17: math.nan, 400: math.nan}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("clean") / "prepared", ROWS)


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("spoilt") / "prepared", ROWS, SPOILT)


def history(job: TrainingJob) -> dict[str, Any]:
    return json.loads((job.output / "history.json").read_bytes())


def all_finite(job: TrainingJob) -> bool:
    """Whether the model and every checkpoint that is kept hold finite numbers only."""
    tensors = list(load_file(job.output / "last.safetensors").values())
    for checkpoint in Path(job.home).glob("step-*"):
        for entry in read_index(checkpoint).values():
            tensors += [read_tensor(checkpoint, chunk.piece, entry.dtype, chunk.sizes) for chunk in entry.chunks]
    return len(tensors) > 40 and all(bool(tensor.isfinite().all()) for tensor in tensors)


def test_steps_with_spoilt_rows_are_skipped_and_named_and_kills_change_nothing(spoilt: Path, tmp_path: Path) -> None:
    whole = TrainingJob(spoilt, tmp_path / "whole", 2, str(tmp_path / "whole/home"))
    assert run_attempt(whole).finished
    skipped = history(whole)["skipped"]
    named = [(one["step"] - 1) // 8 for one in skipped for _ in one["rows"]]
    assert sorted(named) == [0, 0, 1, 1, 2, 2], "both rows once in each of three epochs"
    assert {row for one in skipped for row in one["rows"]} == set(SPOILT)
    assert all_finite(whole)
    said = (whole.place / "log-0").read_text()
    assert f"skips step {skipped[0]['step']}: its loss or gradient is non-finite (rows " in said
    killed = TrainingJob(spoilt, tmp_path / "killed", 2, str(tmp_path / "killed/home"))
    assert run_attempt(killed, InjectedFault("step", rank=1, at=9)).fired == 1
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)


@pytest.mark.prove
def test_of_a_divided_model_the_rows_are_named_too(spoilt: Path, tmp_path: Path) -> None:
    divided = TrainingJob(spoilt, tmp_path, 2, str(tmp_path / "home"), training={"parallel": ParallelConfig("weights")})
    assert run_attempt(divided).finished
    skipped = history(divided)["skipped"]
    assert sorted((one["step"] - 1) // 8 for one in skipped for _ in one["rows"]) == [0, 0, 1, 1, 2, 2]
    assert {row for one in skipped for row in one["rows"]} == set(SPOILT)


@pytest.mark.prove
@pytest.mark.parametrize(
    "faults",
    [
        [InjectedFault("step", rank=1, at=12)],
        [InjectedFault("step", rank=0, at=17)],
        [InjectedFault("step", rank=0, at=14), InjectedFault("step", rank=1, at=4)],
        [InjectedFault("step", what="SIGTERM", rank=1, at=11)],
        [InjectedFault("manifest", at=3)],
        [InjectedFault("load", rank=0)],
    ],
    ids=lambda faults: "-".join(f"{fault.what}-{fault.where}-{fault.at}" for fault in faults),
)
def test_it_goes_back_to_the_last_checkpoint_and_on_without_the_window(
    faults: list[InjectedFault], clean: Path, tmp_path: Path
) -> None:
    # Four in a row, one more than may be skipped; the last regular checkpoint before them is that of step 9.
    whole = TrainingJob(clean, tmp_path / "whole", 2, str(tmp_path / "whole/home"), poisoned=(11, 12, 13, 14))
    assert run_attempt(whole).finished
    found = history(whole)
    assert found["left_out"] == [{"after": 9, "through": 14}]
    assert [one["step"] for one in found["skipped"]] == [11, 12, 13, 14]
    assert found["steps_total"] == 24 and all_finite(whole)
    assert "rolls back to step 9, and continues without steps 10 to 14" in (whole.place / "log-0").read_text()
    killed = dataclasses.replace(whole, place=tmp_path / "killed", home=str(tmp_path / "killed/home"))
    for fault in faults:
        assert run_attempt(killed, fault).fired == 1
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)


@pytest.mark.prove
@pytest.mark.parametrize(
    "parallel", [{"shard": "weights"}, pytest.param({"shard": "weights", "offload": True}, marks=pytest.mark.prove)]
)
def test_a_divided_model_goes_back_too(parallel: dict[str, Any], clean: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"training": {"parallel": ParallelConfig(**parallel)}}
    job = TrainingJob(
        clean, tmp_path / "divided", 2, str(tmp_path / "divided/home"), poisoned=(11, 12, 13, 14), **settings
    )
    assert run_attempt(job).finished
    found = history(job)
    assert found["left_out"] == [{"after": 9, "through": 14}] and all_finite(job)
    whole = TrainingJob(clean, tmp_path / "whole", 2, str(tmp_path / "whole/home"), poisoned=(11, 12, 13, 14))
    assert run_attempt(whole).finished
    losses = [[point["loss"] for point in one["steps"]] for one in (found, history(whole))]
    # The masks of the dropout differ: each part draws its own.
    assert losses[0] == pytest.approx(losses[1], rel=0.3)


@pytest.mark.prove
@pytest.mark.parametrize("factory", ["with_unused", "with_sometimes_unused"])
def test_a_model_with_a_parameter_that_had_no_gradient_is_resumed(factory: str, clean: Path, tmp_path: Path) -> None:
    whole = TrainingJob(
        clean, tmp_path / "whole", 2, str(tmp_path / "whole/home"), factory=f"tests.support.nets:{factory}"
    )
    assert run_attempt(whole).finished
    killed = dataclasses.replace(whole, place=tmp_path / "killed", home=str(tmp_path / "killed/home"))
    assert run_attempt(killed, InjectedFault("step", rank=1, at=11)).fired == 1
    assert run_attempt(killed).finished
    assert "resumes from step" in (killed.place / "log-0").read_text()
    assert result_digests(killed) == result_digests(whole)


@pytest.mark.prove
def test_without_a_checkpoint_since_the_last_time_it_ends_with_the_cause(clean: Path, tmp_path: Path) -> None:
    steps = (11, 12, 13, 14, 15, 16, 17, 18)
    job = TrainingJob(clean, tmp_path, 2, str(tmp_path / "home"), poisoned=steps)
    assert not run_attempt(job).finished
    said = (tmp_path / "log-1").read_text()
    assert "AgreedUserError" in said or "training.learning_rate: the loss or its gradient became non-finite" in said
    assert "in 4 steps in a row, the last 18 (no single row causes it: history.json lists the batch)" in said
    assert "and there is no checkpoint to roll back to" in said
    assert not (job.output / "manifest.json").exists()


@pytest.mark.prove
def test_a_gradient_that_is_no_number_is_found_though_the_loss_is_one(tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 200, {31: 7.0})
    config = TrainingConfig(epochs=2, batch_size=40, patience=0)
    model = trained(prepared, tmp_path, 1, config, ModelConfig("tests.support.nets:fragile"))
    skipped = json.loads((model / "history.json").read_text())["skipped"]
    assert [one["rows"] for one in skipped] == [[31], [31]]
    assert all(31 in one["batch"] and len(set(one["batch"])) == 40 for one in skipped)
    assert "(rows 31 of the training split cause it)" in log(tmp_path)


@pytest.mark.prove
def test_batch_statistics_do_not_keep_what_was_skipped(tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 200, {31: math.nan})
    config = TrainingConfig(epochs=2, batch_size=40, patience=0)
    model = trained(prepared, tmp_path, 2, config, ModelConfig("tests.support.nets:batch_norm"))
    weights = load_file(model / "last.safetensors")
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    assert weights["network.layers.1.num_batches_tracked"] == 2 * (5 - 1)


@pytest.mark.prove
def test_a_validation_loss_that_is_no_number_is_refused(tmp_path: Path) -> None:
    prepared = table_of_numbers(tmp_path / "prepared", 200, split="validation", spoilt={3: math.nan})
    trained(prepared, tmp_path, 2, TrainingConfig(epochs=2, batch_size=40))
    assert refusal(tmp_path, 0) == refusal(tmp_path, 1)
    assert refusal(tmp_path, 0).startswith("training.learning_rate: the validation loss became nan by step 5")
