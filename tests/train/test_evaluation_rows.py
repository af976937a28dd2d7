"""On GPUs an evaluation's batches are as large as fits on every one, and equal in a resumed run."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.evaluation import fitting_rows, free_bytes
from slipstream.shared.models.factory import BATCH_BYTES, MOST_ROWS
from tests.support.training import rank_body, table_of_numbers, trained

MIB = 2**20
#: The rows that the rule for any machine gives in these trainings; 90 rows are validated.
LEAST = 4
TRAINING = TrainingConfig(epochs=2, batch_size=64, patience=0, checkpoint_every=2)


def test_what_torch_can_still_allocate_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * MIB, 80 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 60 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 15 * MIB)
    assert free_bytes(torch.device("cuda", 1)) == 55 * MIB
    assert free_bytes(torch.device("cpu")) == 0


def test_half_of_the_free_memory_is_filled_in_powers_of_two() -> None:
    assert fitting_rows(BATCH_BYTES, 25 * BATCH_BYTES, 0) == fitting_rows(BATCH_BYTES, 31 * BATCH_BYTES, 0) == 8
    assert fitting_rows(BATCH_BYTES // 13, 2 * BATCH_BYTES, 0) == 13, "never fewer than on any machine"
    assert fitting_rows(2 * BATCH_BYTES, 0, 0) == 1 and fitting_rows(0, 0, 0) == MOST_ROWS
    assert fitting_rows(MIB, 10**6 * MIB, 0) == MOST_ROWS


def test_the_rows_before_stay_while_they_fit() -> None:
    assert fitting_rows(BATCH_BYTES, 8 * BATCH_BYTES, 8) == fitting_rows(BATCH_BYTES, 800 * BATCH_BYTES, 8) == 8
    assert fitting_rows(BATCH_BYTES, 8 * BATCH_BYTES - 1, 8) == 2
    assert fitting_rows(BATCH_BYTES // 13, 0, 13) == 13 and fitting_rows(BATCH_BYTES // 13, 0, 16) == 13


def with_memory(
    free_rows: tuple[int, ...], stops: bool, rank: int, world: int, port: int, settings: dict[str, Any], unused: object
) -> None:
    """Train with room for ``free_rows`` rows of results per rank, and record the rows of the evaluations' batches.

    If ``stops``, the process ends in the first evaluation.
    """
    from slipstream.pipeline.train.loop import evaluation
    from slipstream.shared.errors import UserError
    from slipstream.shared.models.factory import batch_rows

    fitting, batches = evaluation.fitting_rows, evaluation.evaluation_batches

    def noted(data: Any, split: str, rows: int, *arguments: Any, **more: Any) -> Iterator[Any]:
        if stops:
            raise UserError("stopped")
        with Path(f"{settings['directory']}.rows{rank}").open("a") as file:
            file.write(f"{rows}\n")
        return batches(data, split, rows, *arguments, **more)

    def many_free_rows(row_bytes: int, free: int, before: int) -> int:
        return fitting(row_bytes, free_rows[rank] * row_bytes, before)

    evaluation.batch_rows = lambda row_bytes, room=0: batch_rows(row_bytes, room or LEAST * row_bytes)
    evaluation.fitting_rows = many_free_rows
    evaluation.evaluation_batches = noted  # type: ignore[assignment]
    rank_body(rank, world, port, settings, {})


def evaluations(prepared: Path, place: Path, *free_rows: int, stops: bool = False) -> list[dict[str, Any]]:
    model = trained(prepared, place, len(free_rows), TRAINING, body=partial(with_memory, free_rows, stops))
    return [] if stops else json.loads((model / "history.json").read_text())["evaluations"]


def rows_of(place: Path, rank: int = 0) -> set[int]:
    return set(map(int, (place / f"model.rows{rank}").read_text().split()))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("data") / "prepared", 257)


@pytest.mark.prove
def test_all_ranks_take_what_fits_on_the_fullest_and_the_loss_is_the_same(prepared: Path, tmp_path: Path) -> None:
    many, few = (evaluations(prepared, tmp_path / name, *free) for name, free in (("gpu", (100, 20)), ("cpu", (0, 0))))
    assert rows_of(tmp_path / "gpu") == rows_of(tmp_path / "gpu", 1) == {8}
    assert rows_of(tmp_path / "cpu") == rows_of(tmp_path / "cpu", 1) == {LEAST}
    for ours, theirs in zip(many, few, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["accuracy"] == theirs["accuracy"]


@pytest.mark.prove
def test_a_resumed_run_evaluates_in_the_same_batches_bit_for_bit(prepared: Path, tmp_path: Path) -> None:
    undisturbed = evaluations(prepared, tmp_path / "undisturbed", 20)
    assert rows_of(tmp_path / "undisturbed") == {8}
    assert not evaluations(prepared, tmp_path / "resumed", 20, stops=True)
    assert evaluations(prepared, tmp_path / "resumed", 70) == undisturbed
    assert rows_of(tmp_path / "resumed") == {8}, "32 would fit by now"


@pytest.mark.prove
def test_a_resumed_run_with_less_memory_evaluates_in_smaller_batches(prepared: Path, tmp_path: Path) -> None:
    evaluations(prepared, tmp_path / "smaller", 20, stops=True)
    evaluations(prepared, tmp_path / "smaller", 0)
    assert rows_of(tmp_path / "smaller") == {LEAST}
