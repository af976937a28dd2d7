"""SGD with momentum against plain PyTorch, through kills and layouts, in the memory plan, and its refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.config import FineTuneConfig
from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.pipeline.train.config import TrainingConfig, first_difference, resume_settings
from slipstream.pipeline.train.data_loader import Batch
from slipstream.pipeline.train.loop.optimizer import learning_rate, make_optimizer
from slipstream.pipeline.train.loop.probe import probe_model
from slipstream.pipeline.train.loop.state import RESCALED, SKIPPED, LossScaler, Progress, TrainingState, copy_weights
from slipstream.pipeline.train.loop.step import train_step
from slipstream.pipeline.train.memory.lasting import ModelState
from slipstream.pipeline.train.parallel.replicas import ReplicatedModel
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import Predictor
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.settings import to_dict, with_defaults
from tests.support import adapters
from tests.support.groups import ALONE
from tests.support.tokens import SIZES, token_data
from tests.support.training import refusal, table_of_numbers, trained

CPU = torch.device("cpu")
SIGNATURE = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
SGD: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.05}
STEPS, ROWS = 50, 12


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def batches(dtype: torch.dtype = torch.float64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (
            torch.randn(ROWS, 5, generator=generator, dtype=dtype),
            torch.randint(3, (ROWS,), generator=generator).int(),
        )
        for _ in range(STEPS)
    ]


def state_of(net: nn.Module, config: TrainingConfig) -> TrainingState:
    model = Predictor(SIGNATURE, net)
    traits = replace(probe_model(Predictor(SIGNATURE, network().float()), CPU))
    scaler = LossScaler(CPU, enabled=False)
    optimizer = make_optimizer(model, config)
    return TrainingState(ReplicatedModel(model, traits), optimizer, scaler, copy_weights(model), Progress(), traits)


def stepped(state: TrainingState, config: TrainingConfig, inputs: torch.Tensor, target: torch.Tensor) -> float:
    batch = Batch((inputs,), target, ROWS, ROWS, ROWS, 0.0)
    outcome = train_step(state, config, ALONE, "fp32", batch, STEPS).outcome
    state.progress.step += 1
    return float(outcome)


def of_torch(config: TrainingConfig, data: list[tuple[torch.Tensor, torch.Tensor]], start: nn.Module) -> nn.Module:
    """The loop that a user of plain PyTorch writes."""
    decayed = [p for p in start.parameters() if p.ndim > 1]
    others = [p for p in start.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=config.momentum, nesterov=config.nesterov, foreach=False)
    for step, (inputs, target) in enumerate(data):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, STEPS, config.learning_rate, config.warmup)
        optimizer.zero_grad()
        nn.functional.cross_entropy(start(inputs), target.long()).backward()
        if config.clip_norm:
            nn.utils.clip_grad_norm_(start.parameters(), config.clip_norm)
        optimizer.step()
    return start


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip_norm", [0.0, 0.3])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, False), (0.9, True), (0.0, False)])
def test_50_steps_are_plain_pytorchs_in_float64(
    momentum: float, nesterov: bool, clip_norm: float, weight_decay: float
) -> None:
    chosen = {"momentum": momentum, "nesterov": nesterov, "clip_norm": clip_norm, "weight_decay": weight_decay}
    config = TrainingConfig(**{**SGD, **chosen})
    state = state_of(network(), config)
    for inputs, target in batches():
        stepped(state, config, inputs, target)
    expected = of_torch(config, batches(), network())
    for ours, theirs in zip(state.parameters, expected.parameters(), strict=True):
        assert float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()) <= 1e-12


def test_a_device_skips_a_first_step_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; torch's fused SGD would leave a momentum that was never written."""
    monkeypatch.setattr("slipstream.pipeline.train.loop.optimizer.known_to_host", lambda tensor: False)
    config = TrainingConfig(**SGD, nesterov=True, clip_norm=0.3)
    data = batches(torch.float32)
    spoilt = data[0][0].clone()
    spoilt[0, 0] = float("nan")
    plain, skipping = (state_of(network().float(), config) for _ in range(2))
    assert stepped(skipping, config, spoilt, data[0][1]) == SKIPPED
    momenta = [each["momentum_buffer"] for each in skipping.optimizer.state.values()]
    assert len(momenta) == 6 and not any(each.any() for each in momenta)
    skipping.progress.step = 0
    for state in (plain, skipping):
        for inputs, target in data[:3]:
            stepped(state, config, inputs, target)
    for a, b in zip(plain.parameters, skipping.parameters, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, torch.zeros_like(a))


@pytest.mark.prove
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_kills_and_resumes_are_bit_for_bit(world: int, momentum: float, tmp_path: Path) -> None:
    whole = TrainingJob(
        token_data(tmp_path / "data").artifact.directory,
        tmp_path / "whole",
        world,
        str(tmp_path / "whole/home"),
        training={**SGD, "momentum": momentum, "nesterov": momentum > 0},
        factory="tests.support.nets:Dropping",
        arguments=SIZES,
    )
    killed = replace(whole, place=tmp_path / "killed", home=str(tmp_path / "killed/home"))
    assert run_attempt(whole).finished
    for fault in (InjectedFault("step", at=8), InjectedFault("step", rank=world - 1, at=6)):
        ended = run_attempt(killed, fault)
        assert ended.fired and not ended.finished
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)
    assert (killed.place / "log-0").read_text().count("resumes from step ") == 2


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "two processes": (2, {}),
    "optimizer": (2, {"parallel": {"shard": "optimizer"}}),
    "gradients": (2, {"parallel": {"shard": "gradients"}}),
    "weights": (2, {"parallel": {"shard": "weights"}}),
    "hybrid": (4, {"parallel": {"shard": "weights", "replicas": 2}}),
    "offload": (2, {"parallel": {"shard": "weights", "offload": True}}),
    "tensor": (2, {"parallel": {"tensor": 2}}),
    "pipeline": (2, {"parallel": {"pipeline": 2}, "accumulation": 2}),
    "accumulation": (1, {"accumulation": 3}),
}


@pytest.mark.prove
def test_every_layout_trains_the_same_model(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    model = ModelConfig("transformer", SIZES)
    settings = {**SGD, "nesterov": True, "epochs": 1, "batch_size": 12, "precision": "fp32", "clip_norm": 0.5}

    def weights(name: str, world: int, more: dict[str, Any]) -> dict[str, torch.Tensor]:
        training = TrainingConfig.from_dict({**settings, **more})
        return TrainedModel.open(trained(data, tmp_path / name, world, training, model)).load("last").state_dict()

    expected = weights("one", 1, {})
    for name, (world, more) in LAYOUTS.items():
        found = weights(name, world, more)
        for key, tensor in expected.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=2e-6, msg=f"{name}: {key}")


def test_averages_and_accumulation_follow_the_same_steps(tmp_path: Path) -> None:
    data = token_data(tmp_path / "data").artifact.directory
    model = ModelConfig("transformer", SIZES)
    training = TrainingConfig(**SGD, epochs=1, batch_size=48, precision="fp32", ema=0.9, label_smoothing=0.1)
    one = TrainedModel.open(trained(data, tmp_path / "one", 1, training, model))
    two = TrainedModel.open(trained(data, tmp_path / "two", 1, replace(training, accumulation=2), model))
    assert one.history.steps[-1].loss < one.history.steps[0].loss
    for key, tensor in one.load("last").state_dict().items():
        torch.testing.assert_close(two.load("last").state_dict()[key], tensor, rtol=1e-4, atol=2e-6)


# With loss scaling, adapters, distillation and another optimiser's checkpoint


def test_a_scaled_loss_gives_the_same_steps_and_an_overflow_none() -> None:
    """The scale is a power of two, so that it changes no bit."""
    config, data = TrainingConfig(**SGD, nesterov=True, precision="fp16"), batches(torch.float32)
    plain, scaled = (state_of(network().float(), config) for _ in range(2))
    scaled.scaler = LossScaler(CPU, enabled=True)
    for inputs, target in data[:3]:
        assert stepped(plain, config, inputs, target) == stepped(scaled, config, inputs, target) == 0
    before = [p.detach().clone() for p in (*scaled.parameters, *momenta(scaled))]
    assert stepped(scaled, config, data[3][0] * float("inf"), data[3][1]) == RESCALED
    assert all(map(torch.equal, before, (*scaled.parameters, *momenta(scaled))))
    assert all(map(torch.equal, (*plain.parameters, *momenta(plain)), (*scaled.parameters, *momenta(scaled))))


def momenta(state: TrainingState) -> list[torch.Tensor]:
    return [each["momentum_buffer"] for each in state.optimizer.state.values()]


def test_of_adapters_alone_there_is_a_momentum() -> None:
    model = Predictor(adapters.SIGNATURE, adapters.adapted_network())
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    config = TrainingConfig(**SGD, clip_norm=0, weight_decay=0)
    traits = probe_model(Predictor(adapters.SIGNATURE, adapters.adapted_network()), CPU)
    scaler = LossScaler(CPU, enabled=False)
    state = TrainingState(
        ReplicatedModel(model, traits), make_optimizer(model, config), scaler, copy_weights(model), Progress(), traits
    )
    changed = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    tokens = adapters.tokens()
    batch = Batch((tokens,), tokens.roll(-1, 1), len(tokens), len(tokens), len(tokens), 0.0)
    train_step(state, config, ALONE, "fp32", batch, STEPS)
    assert len(momenta(state)) == len(changed) > 0 and len(frozen) > len(changed) / 2
    now = dict(model.named_parameters())
    assert all(torch.equal(now[name], value) for name, value in frozen.items())
    rate = learning_rate(0, STEPS, config.learning_rate, config.warmup)
    for (name, value), momentum in zip(changed.items(), momenta(state), strict=True):
        torch.testing.assert_close(now[name].detach(), value - rate * momentum)


@pytest.mark.prove
def test_a_teacher_is_followed_and_another_optimiser_is_refused_end_to_end(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 200)
    short = TrainingConfig(epochs=2, batch_size=64, checkpoint_every=2)
    sgd = replace(short, **SGD)
    teacher = trained(data, tmp_path / "adam", 1, replace(short, checkpoint_uri=str(tmp_path / "kept")))
    for name, more in (("alone", {}), ("taught", {"teacher": teacher})):
        trained(data, tmp_path / name, 1, sgd, **more)
    alone, taught = (TrainedModel.open(tmp_path / name / "model") for name in ("alone", "taught"))
    assert taught.history.steps[-1].loss < taught.history.steps[0].loss
    for key, tensor in alone.load("last").state_dict().items():
        assert not torch.equal(tensor, taught.load("last").state_dict()[key]) or not tensor.is_floating_point()
    home = str(tmp_path / "adam/checkpoints")
    trained(data, tmp_path / "other", 1, sgd, home=home)
    assert 'made with training.optimizer "adamw", this run has "sgd"' in refusal(tmp_path / "other", 0)


# Memory


@pytest.mark.parametrize(("momentum", "moments"), [(0.9, 1), (0.0, 0)])
def test_the_plan_counts_four_bytes_of_momentum(momentum: float, moments: int) -> None:
    model = Predictor(SIGNATURE, network().float())
    adam, sgd = ModelState.of(model, TrainingConfig()), ModelState.of(model, TrainingConfig(**SGD, momentum=momentum))
    parallel = TrainingConfig().parallel
    numbers = sum(p.numel() for p in model.parameters())
    assert adam.of_process(parallel, 1, 1, "fp32") == (4 + 4 + 8) * numbers
    assert sgd.of_process(parallel, 1, 1, "fp32") == (4 + 4 + 4 * moments) * numbers


# Refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd"}, r"training\.learning_rate: 0\.002 is not allowed; expected another .* AdamW's"),
        (
            {**SGD, "nesterov": True, "momentum": 0.0},
            r"training\.nesterov: true is not allowed; .* training\.momentum 0",
        ),
        ({"nesterov": True}, r"training\.nesterov: true is not allowed; expected false .* only sgd"),
        ({"momentum": 0.5}, r"training\.momentum: 0\.5 is not allowed; expected 0\.9 .* only sgd"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingConfig.from_dict(settings)


def test_the_default_rates_of_fine_tuning_are_adamws_too() -> None:
    for rank in (16, 0):
        with pytest.raises(UserError, match=r"training\.learning_rate: .* AdamW's"):
            FineTuneConfig.from_dict({"model": {"lora": {"rank": rank}}, "training": {"optimizer": "sgd"}})


def test_a_checkpoint_of_another_optimiser_is_refused_by_both_names() -> None:
    defaults = {"training": to_dict(TrainingConfig())}
    adam, sgd = (
        with_defaults(defaults, {"training": resume_settings(TrainingConfig(batch_size=8, **settings))})
        for settings in ({}, {**SGD, "nesterov": True})
    )
    assert first_difference(adam, sgd) == ("training.optimizer", "adamw", "sgd")
    assert first_difference(sgd, adam) == ("training.optimizer", "sgd", "adamw")
