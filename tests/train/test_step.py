"""One optimiser step: no synchronisation, one decision, loss scaling, averaged weights, chosen arithmetic."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from harness.dispatch import counted
from slipstream.operations.proofs.gpu.waits import NoWaits
from slipstream.pipeline.train.checkpoint.manager import RestoredCheckpoint
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.objective import evaluate_split
from slipstream.pipeline.train.loop.optimizer import (
    AveragedWeights,
    GradientCheck,
    check_gradient,
    learning_rate,
    make_optimizer,
    may_exceed,
    step_unless_skipped,
)
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import (
    FIRST_SCALE,
    RESCALED,
    SKIPPED,
    USED,
    LossScaler,
    Progress,
    TrainingState,
    copy_weights,
    kernels_configured,
)
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.factory import Predictor
from tests.support import nets
from tests.support.groups import ALONE, on_cpu
from tests.support.small_run import Run

CPU = torch.device("cpu")
SIGNATURE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))


def batch_of(rows: int, padding: int = 0, spoilt: bool = False) -> Batch:
    torch.manual_seed(5)
    numeric = torch.randn(rows + padding, 5)
    if spoilt:
        numeric[2, 1] = float("nan")
    target = torch.arange(rows + padding, dtype=torch.int32) % 3
    return Batch((numeric,), target, rows, rows, rows, 0.0)


def state_of(network: nn.Module, config: TrainingConfig, fp16: bool = False) -> TrainingState:
    model = Predictor(SIGNATURE, network)
    traits = probe_model(model, CPU)
    return TrainingState(
        ReplicatedModel(model, traits),
        make_optimizer(model, config),
        LossScaler(CPU, enabled=fp16),
        copy_weights(model),
        Progress(),
        traits,
        AveragedWeights(model, config.ema) if config.ema else None,
    )


def everything(state: TrainingState) -> list[torch.Tensor]:
    moments = [tensor for of in state.optimizer.state.values() for tensor in of.values()]
    averages = state.averaged.weights.values() if state.averaged else ()
    return [tensor.clone() for tensor in (*state.model.state_dict().values(), *moments, *averages)]


@pytest.mark.parametrize("fp16", [False, True])
def test_on_a_cpu_a_spoilt_step_does_not_touch_what_a_checkpoint_may_be_copying(fp16: bool) -> None:
    config = TrainingConfig(ema=0.9)
    state = state_of(nets.with_unused(SIGNATURE), config, fp16)
    train_step(state, config, ALONE, "fp16" if fp16 else "fp32", batch_of(12), 10)
    assert state.averaged is not None
    averages = list(state.averaged.weights.values())
    before, versions = everything(state), [tensor._version for tensor in averages]
    train_step(state, config, ALONE, "fp16" if fp16 else "fp32", batch_of(12, spoilt=True), 10)
    assert all(torch.equal(a, b) for a, b in zip(before, everything(state), strict=True))
    assert [tensor._version for tensor in averages] == versions
    train_step(state, config, ALONE, "fp16" if fp16 else "fp32", batch_of(12), 10)
    assert all(tensor._version > version for tensor, version in zip(averages, versions, strict=True))


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_step_never_makes_the_host_wait_and_a_spoilt_one_changes_nothing(
    fp16: bool, spoilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As on a GPU.
    monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor: False)
    config = TrainingConfig(accumulation=2, ema=0.9)
    state = state_of(nets.batch_norm(SIGNATURE), config, fp16)
    precision = "fp16" if fp16 else "fp32"
    train_step(state, config, ALONE, precision, batch_of(12), 10)
    before = everything(state)
    with NoWaits():
        result = train_step(state, config, ALONE, precision, batch_of(12, spoilt=spoilt), 10)
    same = [torch.equal(a, b) for a, b in zip(before, everything(state), strict=True)]
    assert all(same) == any(same) == spoilt
    # With a large loss scale it may have been that; only the scale changes.
    assert result.outcome.item() == ((RESCALED if fp16 else SKIPPED) if spoilt else USED)
    if fp16:
        assert state.scaler.scale.item() == (FIRST_SCALE / 2 if spoilt else FIRST_SCALE)


def test_padding_has_no_part_in_the_gradient() -> None:
    configs = [TrainingConfig(accumulation=pieces, clip_norm=0) for pieces in (1, 3)]
    plain, padded = (state_of(nets.with_unused(SIGNATURE), config) for config in configs)
    padded.model.load_state_dict(plain.model.state_dict())
    whole = batch_of(8, padding=4)
    alone = Batch((whole.inputs[0][:8],), whole.target[:8], 8, 8, 8, 0.0)
    results = [
        train_step(state, config, ALONE, "fp32", batch, 10)
        for state, config, batch in zip((plain, padded), configs, (alone, whole), strict=True)
    ]
    torch.testing.assert_close(sum(results[0].losses), sum(results[1].losses))
    for a, b in zip(everything(plain), everything(padded), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_the_norm_is_torchs_and_one_verdict_decides_for_every_kind_of_optimiser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2))]
    for p in parameters[:2]:
        p.grad = torch.randn_like(p)
    grads = [p.grad.clone() for p in parameters[:2] if p.grad is not None]
    model = ReplicatedModel(nn.ParameterList(parameters))  # type: ignore[arg-type]  # only its parameters count
    verdict = check_gradient(model.norm())
    assert verdict.norm.item() == pytest.approx(sum((g**2).sum().item() for g in grads) ** 0.5) and not verdict.skip
    model.clip(verdict.norm, 0.5)
    expected = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(expected, grads, strict=True):
        p.grad = g
    nn.utils.clip_grad_norm_(expected, 0.5)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(parameters, expected, strict=False))  # type: ignore[arg-type]
    for fused, known in ((True, True), (True, False), (False, True)):
        monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor, known=known: known)
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        before = [p.detach().clone() for p in parameters]
        step_unless_skipped(optimizer, GradientCheck(verdict.norm, torch.ones(())))
        assert all(torch.equal(p, old) for p, old in zip(parameters, before, strict=True))
        step_unless_skipped(optimizer, verdict)
        assert not torch.equal(parameters[0], before[0]) and torch.equal(parameters[2], before[2])
        assert not hasattr(optimizer, "found_inf")


@pytest.mark.parametrize("largest", [1e-6, 0.1, 1.0, 3.0])
def test_a_gradient_that_is_not_scaled_down_would_not_have_changed(largest: float) -> None:
    torch.manual_seed(0)
    whole, judged = torch.randn(50), []
    for ratio in (*np.linspace(0.5, 1.5, 101).tolist(), *(1 + np.linspace(-3e-6, 3e-6, 101)).tolist()):
        p = nn.Parameter(torch.zeros(50))
        p.grad = whole * (largest * ratio / whole.norm())
        before, norm = p.grad.clone(), nn.utils.get_total_norm([p.grad])
        judged.append(may_exceed(norm, largest))
        nn.utils.clip_grads_with_norm_([p], largest, norm)
        assert judged[-1] or torch.equal(p.grad, before)
    # Those of 1e-6 are smaller than what torch adds to them.
    assert any(judged) and (largest < 1e-5 or not all(judged))
    assert may_exceed(torch.tensor(math.nan), largest)


def test_the_loss_scale_follows_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.pipeline.train.loop.state.STEPS_TO_GROW", 3)
    ours = LossScaler(CPU, enabled=True)
    theirs = torch.amp.GradScaler("cpu", growth_interval=3)
    p, q = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.SGD([q], lr=0.0)
    for spoilt in (False, True, False, False, False, False, True, False):
        factor = float("inf") if spoilt else 1.0
        (p.sum() * factor).backward(ours.scale)
        ours.unscale([p])
        theirs.scale(q.sum() * factor).backward()
        theirs.unscale_(optimizer)
        assert spoilt or torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        theirs.step(optimizer)
        theirs.update()
        ours.update(check_gradient(p.grad.norm()))  # type: ignore[union-attr]
        p.grad = q.grad = None
        assert ours.scale.item() == theirs.get_scale()
    known = theirs.state_dict()
    assert ours.state_dict() == {name: known[name] for name in ("scale", "_growth_tracker")}
    resumed = LossScaler(CPU, enabled=True)
    resumed.load_state_dict(known)
    assert resumed.state_dict() == ours.state_dict()
    assert LossScaler(CPU, enabled=False).state_dict() == {} == torch.amp.GradScaler("cpu", enabled=False).state_dict()


@pytest.mark.parametrize("known", [True, False])
def test_averaged_weights_are_those_of_the_formula_and_what_is_evaluated(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where the verdict is not known to the host, as on a GPU, the average is computed in another way.
    monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor: known)
    config = TrainingConfig(ema=0.5, learning_rate=0.1)
    state = state_of(nets.with_unused(SIGNATURE), config)
    averaged = state.averaged
    assert averaged is not None
    name = "network.layers.0.weight"
    expected = state.model.state_dict()[name].double().clone()
    for step in range(6):
        train_step(state, config, ALONE, "fp32", batch_of(12), 100)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * state.model.state_dict()[name].double()
        state.progress.step += 1
    torch.testing.assert_close(averaged.weights[name].double(), expected, rtol=1e-5, atol=1e-6)
    inputs = batch_of(4).inputs
    own, mean = state.model(*inputs), averaged.forward(*inputs)
    state.stage_best_weights()()
    state.model.load_state_dict(state.best_weights)
    assert torch.equal(state.model(*inputs), mean) and not torch.equal(own, mean)


def test_weights_filled_late_are_copied_to_the_average_and_the_best() -> None:
    state = state_of(nets.with_unused(SIGNATURE), TrainingConfig(ema=0.5))
    with torch.no_grad():
        for parameter in state.model.parameters():
            parameter.fill_(3.0)
    state.copy_initial_weights()
    assert state.averaged and all((w == 3).all() for w in (*state.averaged.weights.values(), *state.weights().values()))
    assert all((state.best_weights[name] == 3).all() for name in state.averaged.weights)


@pytest.mark.parametrize("known", [True, False])
def test_average_and_clipping_move_the_fewest_bytes(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An average reads both weights and writes one; a clipped step takes no pass over the gradients of its own."""
    monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor: known)
    state = state_of(nn.Linear(5, 3000), TrainingConfig(ema=0.5))
    averaged = state.averaged
    assert averaged is not None
    weights = sum(p.numel() for p in state.parameters)
    moved = counted(lambda: averaged.update(3, torch.zeros(()))).moved
    assert 12 * weights <= moved < 12.1 * weights
    train_step(state, TrainingConfig(), ALONE, "fp32", batch_of(12), 9)  # makes the optimiser's state
    clipped, plain = (
        counted(partial(train_step, state, TrainingConfig(clip_norm=norm), ALONE, "fp32", batch_of(12), 9)).moved
        for norm in (1e-3, 0.0)
    )
    assert clipped - plain < 0.1 * weights


def test_a_clipped_step_is_that_of_torch() -> None:
    ours, theirs = (state_of(nets.with_unused(SIGNATURE), TrainingConfig()) for _ in range(2))
    theirs.model.load_state_dict(ours.model.state_dict())
    theirs.parallel.clips_in_step = False
    before = everything(ours)
    for state in (ours, theirs):
        for _ in range(3):
            train_step(state, TrainingConfig(clip_norm=1e-4), ALONE, "fp32", batch_of(12), 9)
    for found, expected in zip(everything(ours), everything(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    assert not torch.equal(before[0], everything(ours)[0])
    assert not hasattr(ours.optimizer, "grad_scale")


def test_an_older_checkpoint_goes_on_with_its_kind_of_adamw(tmp_path: Path) -> None:
    older = Run(tmp_path)
    older.steps(2)
    older.save(2)
    older.steps(3)
    newer = Run(tmp_path, fused=True)
    assert newer.optimizer.param_groups[0]["fused"]
    newer.checkpoints.restore()
    assert not newer.optimizer.param_groups[0]["fused"]
    newer.steps(3)
    assert all(torch.equal(a, b) for a, b in zip(older.model.parameters(), newer.model.parameters(), strict=True))


def test_tf32_is_for_both_kinds_of_products_or_for_neither_and_determinism_is_the_default() -> None:
    was = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    for tf32 in (False, True):
        with kernels_configured(TrainingConfig(tf32=tf32)):
            assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == tf32
            assert torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.benchmark
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == was
    assert not torch.are_deterministic_algorithms_enabled()
    with kernels_configured(TrainingConfig(deterministic=False)):
        assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.benchmark
    assert not torch.backends.cudnn.benchmark


def test_best_weights_take_no_memory_of_the_device() -> None:
    # "meta" stands for a device: what is on it has no data, so that nothing but a real copy can be on the host.
    model = nn.Linear(2, 2)
    kept = copy_weights(model)  # type: ignore[arg-type]
    assert all(tensor.device == CPU and tensor.data_ptr() != model.weight.data_ptr() for tensor in kept.values())
    with pytest.raises(NotImplementedError, match="meta"):
        copy_weights(nn.Linear(2, 2, device="meta"))  # type: ignore[arg-type]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_evaluation_computes_in_the_precision_of_training(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    model = Predictor(SIGNATURE, nets.with_unused(SIGNATURE))
    seen: list[torch.dtype] = []
    model.network.layers[0].register_forward_hook(lambda *given: seen.append(given[2].dtype))  # type: ignore[index,union-attr]
    batch = batch_of(6, padding=3)
    found = evaluate_split(model, model, [batch], CPU, precision)
    assert seen == [torch.bfloat16 if precision == "bf16" else torch.float32]
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(batch.inputs[0][:6]), batch.target[:6].long()).item()
    assert found.loss == pytest.approx(expected, rel=1e-6 if precision == "fp32" else 1e-2)


def test_predictions_of_a_regression_are_in_float32_whatever_the_network_computes_in() -> None:
    inputs = (TensorSpec("numeric", "float32", (5,)),)
    prices = Signature(inputs, "regression", "price", target_mean=200_000.0, target_std=100.0)
    model = Predictor(prices, nets.with_unused(prices))
    rows = batch_of(50).inputs
    with torch.no_grad():
        exact = model(*rows)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(*rows)
    assert found.dtype == torch.float32
    # A number in bfloat16 would be a multiple of 1024.
    assert (found - exact).abs().max() < 2 and exact.std() > 5


def test_the_learning_rate_of_a_step_is_the_schedules() -> None:
    config = TrainingConfig()
    state = state_of(nets.with_unused(SIGNATURE), config)
    state.progress.step = 3
    train_step(state, config, ALONE, "fp32", batch_of(12), 10)
    assert {group["lr"] for group in state.optimizer.param_groups} == {learning_rate(3, 10, 2e-3, 0.05)}


POINTS = [{"losses": [1.0, 2.0], "points": [[8, 3.0, 4.0]]}, {"losses": [10.0, 20.0], "points": [[8, 30.0, 40.0]]}]


@pytest.mark.parametrize(
    ("owns", "same_world", "rank", "losses", "points"),
    [
        (POINTS, True, 1, [10.0, 20.0], [(8, [30.0, 40.0])]),
        # All ranks exchange the same points: where their number changed rank 0 has all losses, the others none.
        (POINTS, False, 0, [11.0, 22.0], [(8, [33.0, 44.0])]),
        (POINTS, False, 1, [0.0, 0.0], [(8, [0.0, 0.0])]),
        # As older checkpoints have it.
        ([[1.0, 2.0], [10.0, 20.0]], True, 1, [10.0, 20.0], []),
        ([[1.0, 2.0], [10.0, 20.0]], False, 0, [11.0, 22.0], []),
    ],
)
def test_losses_that_were_not_added_up_yet_come_back(
    owns: list[Any], same_world: bool, rank: int, losses: list[float], points: list[Any]
) -> None:
    state = state_of(nets.with_unused(SIGNATURE), TrainingConfig())
    progress = {"progress": {"step": 9}, "best_weights": state.best_weights}
    state.apply(RestoredCheckpoint(9, progress, tuple(owns), "", same_world, ()), on_cpu(rank, 2))
    assert (state.loss_sums, state.pending_points, state.progress.step) == (losses, points, 9)
    resaved = state.rank_state()
    state.apply(RestoredCheckpoint(9, progress, (resaved, resaved), "", True, ()), on_cpu(rank, 2))
    assert (state.loss_sums, state.pending_points) == (losses, points)
