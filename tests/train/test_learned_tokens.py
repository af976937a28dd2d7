"""The loss with some tokens masked: equal numbers for any division of a batch."""

import ast
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
from slipstream.pipeline.train.loop.objective import Teacher, correct_sum, evaluate_split, loss_sum
from slipstream.pipeline.train.loop.optimizer import make_optimizer
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.loop.state import LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.step import padded_rows, train_step
from slipstream.pipeline.train.parallel.replicas import replicate_model
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.artifacts.prepared.token_rows import not_learned, read_tokens
from slipstream.shared.models.config import ModelConfig, TeachingConfig
from slipstream.shared.models.factory import Predictor, build_model
from tests.support import REPOSITORY
from tests.support.groups import on_cpu
from tests.support.layout_runs import on_ranks
from tests.support.proving import first_few

LENGTH, VOCABULARY, ROWS, STEPS = 24, 11, 17, 3
SIGNATURE = Signature(
    (TensorSpec("tokens", "int16", (LENGTH,)),), "next token", "next token", buckets=VOCABULARY, learned=6.5
)
CPU = torch.device("cpu")


def answers(step: int) -> tuple[Tensor, Tensor]:
    """Return ids ``[rows, length]`` and labels of rows whose ends are learned: of some none, of others nearly all."""
    draw = np.random.default_rng(step)
    rows = draw.integers(0, VOCABULARY, (ROWS, LENGTH + 1))
    begins = draw.choice([1, LENGTH - 1, LENGTH, LENGTH + 1], ROWS)
    stored = np.where(np.arange(LENGTH + 1) < begins[:, None], not_learned(rows), rows).astype(np.int16)
    ids, labels = read_tokens(torch.from_numpy(stored))
    return ids[:, :-1], labels[:, 1:]


def small_model() -> Predictor:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_model(ModelConfig("transformer", sizes), SIGNATURE, seed=0).double()


def by_hand() -> dict[str, Tensor]:
    model, config = small_model(), TrainingConfig(clip_norm=0)
    optimizer = make_optimizer(model, config)
    for step in range(STEPS):
        ids, labels = answers(step)
        losses = functional.cross_entropy(model(ids).transpose(1, 2), labels, reduction="sum")
        (losses / SIGNATURE.learned / ROWS).backward()
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
        mine = [each[rank * ROWS // world : (rank + 1) * ROWS // world] for each in answers(step)]
        rows, padded = len(mine[0]), padded_rows(-(-ROWS // world), accumulation)
        ids, labels = (torch.cat([each, each[:1].expand(padded - rows, -1)]) for each in mine)
        train_step(state, config, group, "fp32", Batch((ids,), labels, rows, ROWS, 0, 0.0), STEPS)
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
    model, (ids, target) = small_model(), (each[:16] for each in answers(0))
    outputs = model(ids)
    whole = loss_sum(SIGNATURE, outputs, target)
    halves = [loss_sum(SIGNATURE, outputs[part], target[part]) for part in (slice(8), slice(8, 16))]
    torch.testing.assert_close(halves[0] + halves[1], whole, atol=1e-12, rtol=0)
    counts = [int((target[part] >= 0).sum()) for part in (slice(8), slice(8, 16))]
    means = [half * SIGNATURE.learned / count for half, count in zip(halves, counts, strict=True)]
    whole_mean = whole * SIGNATURE.learned / sum(counts)
    assert counts[0] != counts[1] and abs((means[0] + means[1]) / 2 - whole_mean) > 1e-4


def test_what_is_not_learned_has_no_part_in_loss_and_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, target = answers(1)
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
    ids = target[target >= 0]
    assert found.loss == pytest.approx(functional.cross_entropy(logits, ids).item(), abs=1e-9)
    assert found.accuracy == pytest.approx((logits.argmax(1) == ids).double().mean().item(), abs=1e-9)


def test_documents_of_which_all_is_learned_keep_the_mean(tmp_path: Path) -> None:
    signature, target = replace(SIGNATURE, learned=0.0), answers(2)[1].abs() % VOCABULARY
    outputs = torch.randn(ROWS, LENGTH, VOCABULARY, dtype=torch.float64)
    mean = functional.cross_entropy(outputs.transpose(1, 2), target, reduction="none").mean(dim=1).sum()
    torch.testing.assert_close(loss_sum(signature, outputs, target), mean, atol=1e-12, rtol=0)


@pytest.mark.parametrize("kind", ["<i2", "<i4", "<i8"])
def test_stored_tokens_are_read_as_ids_and_torchs_labels(kind: str) -> None:
    """Also the token 99, whose stored form is -100 where it is not learned."""
    ids = np.array([[0, 1, 99, 100, 32767]])
    learned = np.array([[True, False, True, False, True]])
    stored = np.where(learned, ids, not_learned(ids)).astype(kind)
    unlearned = np.where(~learned, ids, not_learned(ids)).astype(kind)
    for given in (stored, torch.from_numpy(stored)):
        found, labels = read_tokens(given)
        assert found.tolist() == ids.tolist() and labels.tolist() == [[0, -100, 99, -100, 32767]]
    assert read_tokens(unlearned)[1].tolist() == [[-100, 1, -100, 100, -100]]
    assert functional.cross_entropy(torch.zeros(5, 40_000), read_tokens(torch.from_numpy(stored))[1][0]).isfinite()


@pytest.mark.prove
def test_their_stored_form_is_known_in_one_module() -> None:
    def made(node: ast.AST) -> bool:
        return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and ast.unparse(node.left) == "-1"

    sources = sorted((REPOSITORY / "slipstream").rglob("*.py"))
    found = [path.name for path in sources if any(map(made, ast.walk(ast.parse(path.read_text(encoding="utf-8")))))]
    assert found == ["token_rows.py"]


TEACHING = TeachingConfig(weight=0.7, temperature=2.0)


def taught(length: int) -> tuple[Tensor, Tensor]:
    """Labels of conversations in rows of a length, and the gradient of a student's logits under a teacher."""
    signature = replace(SIGNATURE, inputs=(TensorSpec("tokens", "int16", (length,)),), learned=3.0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    teacher = build_model(ModelConfig("transformer", sizes), signature, seed=1).double().eval()
    draw = torch.Generator().manual_seed(3)
    ids = torch.full((5, length), 7)
    ids[:, :12] = torch.randint(0, VOCABULARY, (5, 12), generator=draw)
    labels = torch.full((5, length), -100)
    labels[:, 8:11] = ids[:, 9:12]
    logits = torch.zeros(5, length, VOCABULARY, dtype=torch.float64)
    logits[:, :12] = torch.randn(5, 12, VOCABULARY, dtype=torch.float64, generator=draw)
    logits.requires_grad_()
    loss = loss_sum(signature, logits, labels)
    blended = Teacher(teacher, TEACHING, "fp32").blend(loss, logits, Batch((ids,), labels, 5, 5, 0, 0.0), None)
    with torch.no_grad():
        ours, theirs = (functional.log_softmax(each / 2.0, dim=-1) for each in (logits, teacher(ids)))
        each = (theirs.exp() * (theirs - ours)).sum(dim=-1)[labels >= 0].sum()
    torch.testing.assert_close(blended, 0.3 * loss + 0.7 * 4 * each / 3.0, atol=1e-9, rtol=0)
    blended.backward()
    assert logits.grad is not None
    return labels, logits.grad


@pytest.mark.parametrize("length", [12, 48, 1024])
def test_a_teacher_teaches_answers_only_whatever_the_padding(length: int) -> None:
    labels, gradient = taught(length)
    assert not gradient[labels < 0].any() and gradient[labels >= 0].abs().min() > 0
    torch.testing.assert_close(gradient[:, 8:11], taught(12)[1][:, 8:11], atol=1e-12, rtol=0)
