"""The loss with some tokens masked: equal numbers for any division of a batch."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.objective import correct_sum, evaluate_split, loss_sum
from slipstream.pipeline.train.loop.optimizer import make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.step import padded_rows, train_step
from slipstream.pipeline.train.parallel.replicas import replicate_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor, build_model
from tests.support.groups import on_cpu
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few

LENGTH, VOCABULARY, ROWS, STEPS = 24, 11, 17, 3
SIGNATURE = Signature(
    (TensorSpec("tokens", "int16", (LENGTH,)),), "next token", "next token", buckets=VOCABULARY, learned=6.5
)
CPU = torch.device("cpu")


def answers(step: int) -> Tensor:
    """Return rows ``[rows, length + 1]`` whose ends are learned: nothing of some, nearly all of others."""
    draw = np.random.default_rng(step)
    rows = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    begins = draw.choice([1, LENGTH - 1, LENGTH, LENGTH + 1], ROWS)
    return torch.from_numpy(np.where(np.arange(LENGTH + 1) < begins[:, None], -1 - rows, rows).astype(np.int16))


def small_model() -> Predictor:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_model(ModelConfig("transformer", sizes), SIGNATURE, seed=0).double()


def by_hand() -> dict[str, Tensor]:
    model, config = small_model(), TrainingConfig(clip_norm=0)
    optimizer = make_optimizer(model, config)
    for step in range(STEPS):
        rows = answers(step)
        stored = rows[:, 1:].long()
        ids, learned = torch.where(stored < 0, -1 - stored, stored), stored >= 0
        logits = model(rows[:, :-1])
        each = functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        (each[learned].sum() / SIGNATURE.learned / ROWS).backward()
        set_rate(optimizer, step, config)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def set_rate(optimizer: torch.optim.Optimizer, step: int, config: TrainingConfig) -> None:
    from slipstream.pipeline.train.loop.optimizer import learning_rate

    for group in optimizer.param_groups:
        group["lr"] = learning_rate(step, STEPS, config.learning_rate, config.warmup)


def divided(accumulation: int, fault: str = "") -> dict[str, Tensor]:
    """One rank's part of the same training."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model, config = small_model(), TrainingConfig(clip_norm=0, accumulation=accumulation)
    group = on_cpu(rank, world)
    parallel = replicate_model(model, ModelTraits(), group)
    optimizer = make_optimizer(model, config)
    state = TrainingState(
        parallel, optimizer, LossScaler(CPU, enabled=False), copy_weights(model), Progress(), ModelTraits()
    )
    for step in range(STEPS):
        state.progress.step = step
        rows = answers(step)
        mine = rows[rank * ROWS // world : (rank + 1) * ROWS // world]
        padded = padded_rows(-(-ROWS // world), accumulation)
        filled = torch.cat([mine, mine[:1].expand(padded - len(mine), -1)])
        train_step(
            state, config, group, "fp32", Batch((filled[:, :-1],), filled[:, 1:], len(mine), ROWS, 0, 0.0), STEPS
        )
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@functools.cache
def expected() -> dict[str, Tensor]:
    return by_hand()


def divided_each() -> list[dict[str, Tensor]]:
    return [divided(accumulation) for accumulation in (1, 2, 5)]


@pytest.mark.parametrize("world", first_few([2, 1, 3]))
def test_however_a_batch_is_divided_the_weights_are_the_same(world: int, tmp_path: Path) -> None:
    for found in itertools.chain(*on_ranks(world, divided_each, tmp_path)):
        for name, parameter in expected().items():
            torch.testing.assert_close(found[name], parameter, atol=1e-12, rtol=0)


def test_a_mean_over_the_tokens_of_each_part_would_be_found() -> None:
    """What the test above is for: of parts with as many rows the means over their tokens do not add up."""
    model, rows = small_model(), answers(0)[:16]
    outputs, target = model(rows[:, :-1]), rows[:, 1:]
    whole = loss_sum(SIGNATURE, outputs, target)
    halves = [loss_sum(SIGNATURE, outputs[part], target[part]) for part in (slice(8), slice(8, 16))]
    torch.testing.assert_close(halves[0] + halves[1], whole, atol=1e-12, rtol=0)
    counts = [int((target[part] >= 0).sum()) for part in (slice(8), slice(8, 16))]
    means = [half * SIGNATURE.learned / count for half, count in zip(halves, counts, strict=True)]
    whole_mean = whole * SIGNATURE.learned / sum(counts)
    assert counts[0] != counts[1] and abs((means[0] + means[1]) / 2 - whole_mean) > 1e-4


def test_what_is_not_learned_has_no_part_in_loss_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = answers(1)
    inputs, target = rows[:, :-1], rows[:, 1:]
    outputs = torch.randn(ROWS, LENGTH, VOCABULARY, dtype=torch.float64)
    other = torch.where((target < 0).unsqueeze(2), torch.randn_like(outputs), outputs)
    assert loss_sum(SIGNATURE, outputs, target) == loss_sum(SIGNATURE, other, target)
    assert correct_sum(SIGNATURE, outputs, target) == correct_sum(SIGNATURE, other, target)
    # The evaluation tells means over the learned tokens.
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    model = small_model()
    found = evaluate_split(model, model, [Batch((inputs,), target, ROWS, ROWS, 0, 0.0)], CPU)
    with torch.no_grad():
        logits = model(inputs)[target >= 0]
    ids = target[target >= 0].long()
    assert found.loss == pytest.approx(functional.cross_entropy(logits, ids).item(), abs=1e-9)
    assert found.accuracy == pytest.approx((logits.argmax(1) == ids).double().mean().item(), abs=1e-9)


def test_documents_of_which_all_is_learned_keep_the_mean(tmp_path: Path) -> None:
    signature, rows = replace(SIGNATURE, learned=0.0), answers(2).abs() % VOCABULARY
    outputs = torch.randn(ROWS, LENGTH, VOCABULARY, dtype=torch.float64)
    mean = functional.cross_entropy(outputs.transpose(1, 2), rows[:, 1:].long(), reduction="none").mean(dim=1).sum()
    torch.testing.assert_close(loss_sum(signature, outputs, rows[:, 1:]), mean, atol=1e-12, rtol=0)
