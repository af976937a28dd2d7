"""Token rows are stored once: a row's target is the row itself, one token later."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
from slipstream.pipeline.train.data_order import GlobalOrder
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.errors import UserError
from tests.support.groups import ALONE
from tests.support.wording import refuses


def test_a_batch_has_rows_and_their_next_tokens(tmp_path: Path) -> None:
    rows = np.arange(50 * 9, dtype=np.int32).reshape(50, 9)
    data = write_token_rows(tmp_path, {"train": rows, "validation": rows[:3]}, vocabulary=450)
    assert data.segment_rows("train") == (50,) and data.signature.record.itemsize == 9 * 8
    order = GlobalOrder(stored_blocks(data, "train"), 20, seed=0)
    seen = []
    for batch in training_batches(data, order, ALONE, stop=50):
        (tokens,) = batch.inputs
        assert tokens.dtype == batch.target.dtype == torch.int64 and tokens.shape[1] == 8
        assert torch.equal(batch.target, tokens + 1)
        seen += (tokens[:, 0] // 9).tolist()
    assert sorted(seen) == list(range(50)) and seen != sorted(seen)


@pytest.mark.parametrize(
    "splits",
    [
        {"train": np.zeros((2, 5), int), "validation": np.zeros((2, 4), int)},
        {"train": np.zeros((2, 1), int)},
        {"train": np.zeros((2, 5))},
        {"train": np.full((2, 5), 9)},
        {"training": np.zeros((2, 5), int)},
    ],
)
def test_other_arrays_are_one_line(splits: dict[str, np.ndarray], tmp_path: Path) -> None:
    with refuses(UserError):
        write_token_rows(tmp_path / "prepared", splits, vocabulary=9)
    assert not (tmp_path / "prepared").exists()
