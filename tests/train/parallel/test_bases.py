"""Under every layout a base's weights are correct, and every process has read only its own part."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model, initial_values
from tests.support.bases import SIGNATURE, make_base, shaped_by_data, some_tokens, theirs
from tests.support.layout_runs import on_ranks

ROWS = 4
PLAIN = {"max_shard_size": "20KB"}
TIED = {"family": "qwen2", "tie_word_embeddings": True, "dtype": torch.bfloat16, "num_hidden_layers": 4}
Job = tuple[dict[str, Any], dict[str, Any]]
JOBS: dict[int, list[Job]] = {
    2: [
        (PLAIN, {}),
        (PLAIN, {"tensor": 2}),
        (PLAIN, {"pipeline": 2}),
        (TIED, {"shard": "weights"}),
        (TIED, {"tensor": 2, "sequence": False}),
        (TIED, {"pipeline": 2, "schedule": "interleaved", "stages_per_rank": 2}),
    ],
    3: [(PLAIN, {"shard": "weights"}), (TIED, {"shard": "optimizer"})],
}
LARGER: dict[int, list[Job]] = {
    4: [
        (PLAIN, {"shard": "weights", "tensor": 2}),
        (TIED, {"shard": "weights", "tensor": 2}),
        (PLAIN, {"shard": "weights", "replicas": 2}),
        (TIED, {"shard": "weights", "pipeline": 2}),
    ]
}


class Found(NamedTuple):
    """What a rank computed, None on the stages of a pipeline before the last; the bytes of the base that it has read
    and those that its parameters take in the base's type."""

    logits: torch.Tensor | None
    read: int
    held: int


def begun(jobs: list[tuple[str, dict[str, Any]]], rows: int) -> list[Found]:
    return [begin(ModelConfig(base=base), parallel, rows) for base, parallel in jobs]


def begin(model: ModelConfig, parallel: dict[str, Any], rows: int) -> Found:
    from slipstream.pipeline.train.checkpoint.staging import local_tensor
    from slipstream.pipeline.train.parallel.config import ParallelConfig
    from slipstream.pipeline.train.parallel.divide import divide_model, fill_part
    from slipstream.pipeline.train.parallel.layout import Layout

    cpu = torch.device("cpu")
    model = shaped_by_data(model)
    whole = build_model(model, SIGNATURE, 0, empty=True).eval()
    values: Any = initial_values(model, whole.network, 0, ModelOrigin(model))
    layout = Layout.connect(ParallelConfig(**parallel), dist.get_rank(), dist.get_world_size(), cpu)
    if not layout.config.divides:
        fill_part(whole, cpu, values)
        held, logits = list(whole.parameters()), whole(some_tokens(rows))
    else:
        divided = divide_model(whole, layout, cpu, values, micro_batches=ROWS, rows=rows // ROWS, precision="fp32")
        held, logits = list(divided.model.parameters()), divided.forward(some_tokens(rows))
    size = next(iter(values.base.tensors.values())).dtype
    elements = sum(local_tensor(parameter).numel() for parameter in held)
    found = None if logits is None else logits.detach()
    return Found(found, values.base.bytes_read, elements * {"F32": 4, "BF16": 2}[size])


@pytest.mark.parametrize("world", [2, *(pytest.param(world, marks=pytest.mark.prove) for world in (3, 4))])
def test_logits_are_those_of_transformers_and_each_rank_reads_its_part(world: int, tmp_path: Path) -> None:
    jobs = (JOBS | LARGER)[world]
    bases = [make_base(tmp_path / f"{number}", **kind) for number, (kind, _) in enumerate(jobs)]
    places = [(str(base), parallel) for base, (_, parallel) in zip(bases, jobs, strict=True)]
    rows = ROWS * (2 if world == 4 else 1)
    ranks = on_ranks(world, partial(begun, places, rows), tmp_path / "out")
    for number, (base, (_, parallel)) in enumerate(zip(bases, jobs, strict=True)):
        expected = theirs(base, some_tokens(rows))
        found: list[Found] = [of_rank[number] for of_rank in ranks]
        logits = [one.logits for one in found if one.logits is not None]
        assert logits and len(logits) == world // parallel.get("pipeline", 1)
        for each in logits:
            torch.testing.assert_close(each, expected, rtol=0, atol=1e-5)
        # No byte more: files are read piece by piece where a rank holds columns.
        assert all(one.read == one.held > 0 for one in found), parallel
