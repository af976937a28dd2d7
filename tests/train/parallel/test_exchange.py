"""``training.gradients`` and ``training.backend``: exchange of gradients between replicas, also with kills."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.operations.proofs.gpu.layouts import LENGTH, LayoutCase, model_of, token_rows
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.train.config import NO_LONGER_LASTING, TrainingConfig, first_difference, resume_settings
from slipstream.pipeline.train.loop.probe import ModelTraits
from slipstream.pipeline.train.parallel import replicas
from slipstream.pipeline.train.parallel.config import GradientsConfig
from slipstream.pipeline.train.parallel.replicas import PowerSGD, check_exchange, replicate_model
from slipstream.shared.distributed.process_group import RankContext
from slipstream.shared.distributed.user_errors import check_gpus, resolve_backend
from slipstream.shared.errors import UserError
from slipstream.shared.settings import to_dict, with_defaults
from tests.support.groups import on_cpu
from tests.support.layout_runs import on_ranks
from tests.support.wording import refuses

CPU = torch.device("cpu")
STEPS, SKIPPED = 6, 3
EXCHANGES: dict[str, dict[str, Any]] = {
    "fp16": {"hook": "fp16"},
    "powersgd": {"hook": "powersgd", "rank": 1},
    "buckets": {"bucket_cap_mb": 1, "gradient_as_bucket_view": False, "static_graph": True},
}


def compressed_sums() -> tuple[Tensor, Tensor, list[Tensor], int]:
    """Over some steps the sums of the exact mean gradients and of PowerSGD's, what each rank left out, and the number
    of buckets. One step is skipped, so that it counts in neither."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 3)).double()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.01)
    hook = PowerSGD(2, 0, on_cpu(rank, world))
    for _ in range(2):
        (ddp(torch.zeros(2, 20, dtype=torch.float64)).sum() * 0).backward()
    ddp.register_comm_hook(hook, lambda hook, bucket: hook(bucket))
    (ddp(torch.zeros(2, 20, dtype=torch.float64)).sum() * 0).backward()
    torch.manual_seed(rank)
    exact = sent = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    for step in range(STEPS):
        x = torch.randn(8, 20, dtype=torch.float64)
        plain = torch.cat([g.reshape(-1) for g in torch.autograd.grad(model(x).square().mean(), [*model.parameters()])])
        dist.all_reduce(plain)
        model.zero_grad()
        ddp(x).square().mean().backward()
        if step != SKIPPED:
            exact = exact + plain / world
            sent = sent + torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])
        hook.after_step(torch.tensor(step == SKIPPED))
    return exact, sent, [memory.error for memory in hook._buckets.values()], len(hook._buckets)


@pytest.mark.prove
def test_powersgd_loses_nothing_of_the_gradients_but_what_it_remembers(tmp_path: Path) -> None:
    found = on_ranks(3, compressed_sums, tmp_path)
    exact, sent, _, buckets = found[0]
    assert buckets > 1 and all(torch.equal(sent, each[1]) for each in found), "all ranks take the same step"
    left = sum(torch.cat(errors) for _, _, errors, _ in found) / 3
    assert isinstance(left, Tensor)
    # The compressed matrices, in other order; what was not compressed is exact.
    missing = exact - sent
    assert (missing.abs() > 1e-9).sum() == (left.abs() > 1e-9).sum() > 1000
    assert missing.sum().item() == pytest.approx(left.sum().item(), abs=1e-9)
    assert missing.square().sum().item() == pytest.approx(left.square().sum().item(), rel=1e-9)
    assert missing.norm() < 0.8 * exact.norm() * STEPS


class Bucket:
    """One of DDP's, of one gradient."""

    def __init__(self) -> None:
        self.flat = torch.randn(64)

    def index(self) -> int:
        return 0

    def buffer(self) -> Tensor:
        return self.flat

    def gradients(self) -> list[Tensor]:
        return [self.flat.view(8, 8)]


def test_on_a_gpu_powersgd_runs_beside_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams are stand-ins: its own waits for the gradients, and what is on it is done when DDP gets the result."""
    events: list[str] = []

    class Stream:
        def wait_stream(self, other: object) -> None:
            events.append(f"waits for {other}")

    @contextmanager
    def used(stream: object) -> Iterator[None]:
        events.append("begins" if isinstance(stream, Stream) else "no stream")
        yield
        events.append("ends")

    original = replicas.completed_future

    def noted(flat: Tensor) -> Future[Tensor]:
        events.append("result")
        return original(flat)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", used)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the backward pass")
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: events.append("all-reduce"))
    monkeypatch.setattr(replicas, "completed_future", noted)
    own = ["begins", "all-reduce", "all-reduce", "result", "ends"]
    for device, expected in (("cuda", ["waits for the backward pass", *own]), ("cpu", ["no stream", *own[1:]])):
        hook, bucket = PowerSGD(2, 0, RankContext(0, 1, torch.device(device), "gloo")), Bucket()
        hook(bucket)  # type: ignore[arg-type]  # learns the shapes
        events.clear()
        assert hook(bucket).wait() is bucket.flat  # type: ignore[arg-type]
        assert events == expected


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "table"
    write_table(directory, "classification")
    return directory


def job(prepared: Path, place: Path, world: int, gradients: dict[str, Any]) -> TrainingJob:
    return TrainingJob(
        prepared,
        place,
        world,
        str(place / "home"),
        accumulation=2,
        dropout=0,
        training={"gradients": GradientsConfig(**gradients)},
    )


def check_killed_and_resumed(prepared: Path, place: Path, world: int, gradients: dict[str, Any]) -> dict[str, str]:
    whole, killed = (job(prepared, place / name, world, gradients) for name in ("whole", "killed"))
    assert run_attempt(whole).finished
    assert not run_attempt(killed, InjectedFault("step", at=11)).finished
    assert run_attempt(killed).finished
    assert result_digests(killed) == result_digests(whole)
    return result_digests(whole)


@pytest.mark.prove
def test_powersgds_memory_is_in_the_checkpoint(prepared: Path, tmp_path: Path) -> None:
    found = check_killed_and_resumed(prepared, tmp_path, 2, EXCHANGES["powersgd"])
    newest = max((tmp_path / "whole/home").glob("step-*"))
    index = json.loads((newest / "index.json").read_bytes())
    assert {"parts/gradients/error/0/0", "parts/gradients/error/1/0", "parts/gradients/q/0"} <= index.keys()
    plain = job(prepared, tmp_path / "plain", 2, {})
    assert run_attempt(plain).finished and result_digests(plain)["last.safetensors"] != found["last.safetensors"]
    # Three processes go on from it, without what two have left out.
    other = job(prepared, tmp_path / "other", 2, EXCHANGES["powersgd"])
    assert not run_attempt(other, InjectedFault("step", at=11)).finished
    assert run_attempt(job(prepared, tmp_path / "other", 3, EXCHANGES["powersgd"])).finished
    assert "PowerSGD starts without the error of its last step, which belongs to 2 proc" in (
        (tmp_path / "other/log-0").read_text()
    )


@pytest.mark.prove
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", EXCHANGES)
def test_killed_and_resumed_is_bit_for_bit_with(name: str, world: int, prepared: Path, tmp_path: Path) -> None:
    check_killed_and_resumed(prepared, tmp_path, world, EXCHANGES[name])


def settings_of_ddp() -> dict[str, list[object]]:
    from slipstream.pipeline.train.loop.probe import probe_model
    from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
    from slipstream.shared.models.factory import Predictor
    from slipstream.shared.models.tables_and_images import MLP

    signature = Signature((TensorSpec("numeric", "float32", (5,)),), "classification", "y", ("a", "b", "c"))
    group, found = on_cpu(dist.get_rank(), dist.get_world_size()), dict[str, list[object]]()
    for name, exchange in {"default": {}, **EXCHANGES}.items():
        model = Predictor(signature, MLP(signature))
        ddp = replicate_model(model, probe_model(model, CPU), group, GradientsConfig(**exchange)).ddp
        hooks = [(hook.__name__, type(state).__name__) for hook, state in ddp._comm_hooks] if ddp else []
        found[name] = [ddp.bucket_bytes_cap, ddp.gradient_as_bucket_view, ddp.static_graph, hooks] if ddp else []
    return found


@pytest.mark.prove
def test_the_settings_reach_ddp(tmp_path: Path) -> None:
    several = {
        "default": [25 << 20, True, False, []],
        "buckets": [1 << 20, False, True, []],
        "fp16": [25 << 20, True, False, [("fp16_compress_hook", "NoneType")]],
        "powersgd": [25 << 20, True, False, [("<lambda>", "PowerSGD")]],
    }
    assert on_ranks(2, settings_of_ddp, tmp_path / "two")[0] == several
    # A single process has none, except for a hook, which changes its gradients.
    assert on_ranks(1, settings_of_ddp, tmp_path / "one")[0] == {**several, "default": [], "buckets": []}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gradients": {"hook": "int8"}}, r"training\.gradients\.hook:"),
        ({"gradients": {"rank": 4}}, r"training\.gradients\.rank:"),
        ({"gradients": {"hook": "powersgd", "rank": 0}}, r"training\.gradients\.rank:"),
        ({"gradients": {"bucket_cap_mb": -1}}, r"training\.gradients\.bucket_cap_mb:"),
        ({"gradients": {"hook": "bf16"}, "backend": "gloo"}, r"gradients\.hook:"),
        ({"gradients": {"hook": "powersgd"}, "precision": "fp16"}, r"gradients\.hook:"),
        ({"gradients": {"hook": "fp16"}, "parallel": {"shard": "weights"}}, r"gradients\.hook:"),
        ({"gradients": {"static_graph": True}, "parallel": {"tensor": 2}}, r"gradients\.static_graph:"),
        ({"backend": "mpi"}, r"training\.backend:"),
    ],
)
def test_what_cannot_be_is_one_line(settings: dict[str, Any], message: str) -> None:
    with refuses(UserError, match=message):
        TrainingConfig.from_dict(settings)


def test_what_the_machine_cannot_do_is_one_line() -> None:
    with refuses(UserError, match=r"gradients\.hook:"):
        check_exchange(GradientsConfig(hook="bf16"), "gloo", "fp32")
    with refuses(UserError, match=r"gradients\.hook:"):
        check_exchange(GradientsConfig(hook="powersgd"), "nccl", "fp16")
    check_exchange(GradientsConfig(hook="bf16"), "nccl", "fp16")
    with refuses(UserError, match=r"training\.backend:"):
        resolve_backend("nccl", 0)
    found = [resolve_backend(wanted, gpus) for wanted, gpus in (("auto", 0), ("auto", 2), ("gloo", 2), ("nccl", 1))]
    assert found == ["gloo", "nccl", "gloo", "nccl"]


def test_more_processes_than_gpus_is_one_line() -> None:
    with refuses(UserError):
        check_gpus(3, 2)
    check_gpus(2, 2)
    check_gpus(4, 0)


def gradients_of(view: bool) -> dict[str, Tensor]:
    """Of two accumulated micro-batches, over DDP."""
    model = model_of(LayoutCase(1, {}, double=False), empty=False)
    group = on_cpu(dist.get_rank(), dist.get_world_size())
    replicated = replicate_model(model, ModelTraits(), group, GradientsConfig(gradient_as_bucket_view=view))
    rows = token_rows(8)[4 * group.rank : 4 * group.rank + 4, :LENGTH]
    replicated.accumulate((rows,), [slice(0, 2), slice(2, 4)], lambda outputs, _: outputs.square().mean())
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    # As views they share the memory of their bucket.
    buckets = {gradient.untyped_storage().data_ptr() for gradient in gradients.values()}
    assert (len(buckets) < len(gradients)) == view
    return gradients


def both_gradients() -> list[dict[str, Tensor]]:
    return [gradients_of(view) for view in (True, False)]


@pytest.mark.prove
def test_where_gradients_lie_changes_no_bit_and_no_checkpoint(tmp_path: Path) -> None:
    lying, copied = on_ranks(2, both_gradients, tmp_path)[1]
    assert lying.keys() == copied.keys() and all(torch.equal(lying[name], copied[name]) for name in lying)
    config = TrainingConfig()
    assert config.gradients.gradient_as_bucket_view
    older = replace(config, gradients=GradientsConfig(gradient_as_bucket_view=False))
    TrainingConfig.from_dict({"gradients": to_dict(older.gradients), "parallel": {"shard": "weights"}})
    assert (
        resume_settings(older)
        == resume_settings(config)
        == {**resume_settings(config), "gradients": to_dict(older.gradients)}
    )


@pytest.mark.parametrize("said", [None, True, False])
def test_where_gradients_lie_is_nothing_that_a_checkpoint_is_refused_for(said: bool | None) -> None:
    """Neither what it says of it, nor that it knows no such setting."""
    now, older = resume_settings(TrainingConfig()), resume_settings(TrainingConfig())
    gradients = to_dict(GradientsConfig())
    older["gradients"] = {**gradients, "gradient_as_bucket_view": said}
    if said is None:
        del older["gradients"]
    defaults = {"training": to_dict(TrainingConfig())}
    then, ours = (with_defaults(defaults, {"training": each}) for each in (older, now))
    assert first_difference(then, ours, ignored=NO_LONGER_LASTING) is None
    other = with_defaults(
        defaults, {"training": resume_settings(TrainingConfig(gradients=GradientsConfig(hook="fp16")))}
    )
    found = first_difference(then, other, ignored=NO_LONGER_LASTING)
    assert found == ("training.gradients.hook", "none", "fp16")


def test_what_an_older_checkpoint_does_not_know_is_the_default() -> None:
    now = {"training": to_dict(TrainingConfig())}
    older = {"training": {k: v for k, v in now["training"].items() if k not in ("gradients", "backend")}}
    assert first_difference(with_defaults(now, older), with_defaults(now, now)) is None
    other = {"training": to_dict(TrainingConfig(gradients=GradientsConfig(hook="fp16")))}
    assert first_difference(with_defaults(now, older), with_defaults(now, other)) == (
        "training.gradients.hook",
        "none",
        "fp16",
    )
