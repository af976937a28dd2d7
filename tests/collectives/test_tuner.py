"""The tuner: its candidates, and its decisions where the truth is known."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.launch.worker import WorkerContext
from slipstream.pipeline.collectives.launch.worker_group import WorkerGroup
from slipstream.pipeline.collectives.tune import tuner
from slipstream.pipeline.collectives.tune.decision import FEWEST_TURNS, SpeedTest, compare_settings, plugin_csv
from slipstream.pipeline.collectives.tune.steps import (
    Model,
    SyntheticModel,
    measure_compute,
    time_alternately,
    time_in_one_launch,
)
from slipstream.pipeline.collectives.tune.tuner import TuningCandidate, tuning_candidates
from slipstream.shared.artifacts.records import from_json, from_tree, to_json, to_tree
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.tuning import DdpSettings, Tuning, TuningTrial
from slipstream.shared.models.arithmetic import Arithmetic
from tests.support.link_profiles import worker_context
from tests.support.links import linked
from tests.support.worker_groups import in_group

#: It compares times.
pytestmark = pytest.mark.alone

MB = 1 << 20
HALF = DdpSettings(hook="fp16")


def named(backend: str = "gloo", gradients: Any = (40 * MB, 40 * MB), used: Any = ("eth0",)) -> Any:
    return {c.name: c for c in tuning_candidates(backend, gradients, ["eth0", "ib0"], used)}


def test_buckets_that_are_the_same_are_one_candidate() -> None:
    buckets = [name for name in named() if name.startswith("bucket_cap_mb")]
    # 50 MB and 100 MB make one bucket of both gradients, all smaller ones one for each, as torch's default does.
    assert buckets == ["bucket_cap_mb=50"]
    assert not [name for name in named(gradients=(1000,)) if name.startswith("bucket_cap_mb")]


def test_what_can_gain_most_is_tried_first() -> None:
    # In a short time the last candidates are not tried.
    assert next(iter(named())) == next(iter(named("nccl"))) == "fp16 compression hook"


def test_what_can_change_numbers_depends_on_the_ranks() -> None:
    two, three = ([name for name, each in named().items() if each.may_change_numbers(world)] for world in (2, 3))
    assert two == ["fp16 compression hook"]
    assert three == ["fp16 compression hook", "bucket_cap_mb=50", "static_graph"]
    assert named("nccl")["NCCL_ALGO=allreduce:tree"].may_change_numbers(3)
    assert not named("nccl")["NCCL_BUFFSIZE=8388608"].may_change_numbers(3)


def test_other_interfaces_need_fresh_processes_and_nccl_is_never_forced_to_ll128() -> None:
    assert named()["GLOO_SOCKET_IFNAME=ib0"].environment == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert "GLOO_SOCKET_IFNAME=eth0" not in named()
    nccl = named("nccl")
    assert nccl["NCCL_MIN_CTAS=8, NCCL_MAX_CTAS=8"].environment == {"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"}
    assert not any("LL128" in name or "GLOO" in name for name in nccl)


#: What NCCL has for each operation (nccl, tuning.cc).
ALGORITHMS = {
    "broadcast": {"ring"},
    "reduce": {"ring"},
    "allgather": {"ring", "nvls", "collnetdirect", "pat"},
    "reducescatter": {"ring", "nvls", "collnetdirect", "pat"},
    "allreduce": {"ring", "tree", "nvls", "nvlstree", "collnetdirect", "collnetchain"},
}


def left_by(value: str) -> dict[str, set[str]]:
    """The algorithms that NCCL_ALGO leaves each operation from NCCL 2.24 on: a list without the name of an operation is
    for all of them."""
    left = dict(ALGORITHMS)
    for part in value.lower().split(";"):
        operation, _, listed = part.rpartition(":")
        for each in [operation] if operation else ALGORITHMS:
            left[each] = ALGORITHMS[each] & set(listed.split(","))
    return left


def test_an_algorithm_is_forced_on_all_reduce_only() -> None:
    """The other operations lack tree and NVLS, and a process group starts with one of these operations."""
    assert not left_by("Tree")["broadcast"]
    forced = {c.environment["NCCL_ALGO"] for c in named("nccl").values() if "NCCL_ALGO" in c.environment}
    assert [left_by(value)["allreduce"] for value in sorted(forced)] == [{"nvls"}, {"ring"}, {"tree"}]
    for value in forced:
        assert {**left_by(value), "allreduce": set()} == {**ALGORITHMS, "allreduce": set()}, value


def turns_of_this_rank(other: DdpSettings, megabytes: int, seconds: float) -> tuple[list[float], list[float]]:
    with worker_context() as worker:
        return time_alternately(worker, SyntheticModel(megabytes), DdpSettings(), other, seconds)


def decision(links: Any, other: DdpSettings, megabytes: int, seconds: float) -> SpeedTest:
    default_turns, other_turns = links.in_world(turns_of_this_rank, other, megabytes, seconds)[0]
    return compare_settings(default_turns, other_turns, tried=8)


@pytest.mark.prove
def test_over_a_slow_link_half_the_bytes_are_faster() -> None:
    with linked(2, 100) as links:
        found = decision(links, HALF, megabytes=2, seconds=3)
    assert found.change
    assert found.gain > 1.3


@pytest.mark.prove
def test_at_200_mbit_the_hook_is_worth_1_7_and_buckets_are_worth_nothing() -> None:
    with linked(2, 200) as links:
        half = decision(links, HALF, megabytes=48, seconds=60)
        # A small difference takes more turns: some steps wait for a segment that is sent again, which costs 5 %.
        buckets = decision(links, DdpSettings(bucket_cap_mb=10), megabytes=48, seconds=120)
    assert half.change
    assert half.gain >= 1.7
    assert not buckets.change
    assert buckets.unseen < 0.1


@pytest.mark.prove
@pytest.mark.parametrize("numbers", ["keep", "may_change"])
def test_the_command_finds_the_hook_at_200_mbit_and_takes_it_if_numbers_may_change(
    tmp_path: Path, numbers: str
) -> None:
    settings = {"numbers": numbers, "tune_seconds": 180, "history": "history"}
    (tmp_path / "run.json").write_text(json.dumps({"collectives": settings}))
    start = [sys.executable, "-m", "slipstream", "collectives", "tune", "--config", "run.json", "--json", "tuning.json"]
    with linked(2, 200) as links:
        (code, said), (other_code, other_said) = links.command(start, tmp_path)
    assert (code, other_code) == (0, 0), said + other_said
    tuning = from_json((tmp_path / "tuning.json").read_bytes(), Tuning, "tuning.json")
    hook, *others = tuning.trials
    assert hook.setting == "fp16 compression hook" and hook.gain >= 1.7
    assert {trial.verdict for trial in others} == {"no change"}, said
    if numbers == "may_change":
        assert (hook.verdict, tuning.ddp, tuning.environment) == ("taken", HALF, {})
    else:
        assert (hook.verdict, tuning.changes) == ("may change numbers", False)
        why = "no change: no setting that keeps the numbers is faster by 3 % or more; fp16 compression hook, which may"
        assert f"{why} change them, is {hook.gain:.2f} times as fast" in said


def same_turns_of_this_rank(decisions: int, seconds: float) -> list[tuple[list[float], list[float]]]:
    with worker_context() as worker:
        return [
            time_alternately(worker, SyntheticModel(1), DdpSettings(), DdpSettings(), seconds) for _ in range(decisions)
        ]


@pytest.mark.prove
def test_identical_settings_are_no_change_in_95_of_100_real_decisions() -> None:
    with linked(2) as links:
        found = [turns for _ in range(20) for turns in links.in_world(same_turns_of_this_rank, 5, 1.0)[0]]
    changed = [
        str(each) for each in (compare_settings(in_use, other, tried=1) for in_use, other in found) if each.change
    ]
    assert len(changed) <= 5, changed


@pytest.mark.prove
def test_on_loopback_nothing_is_claimed_for_compression_and_what_cannot_work_is_dropped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried = (
        TuningCandidate("fp16 compression hook", {"hook": "fp16"}),
        TuningCandidate("GLOO_SOCKET_IFNAME=none0", {}, {"GLOO_SOCKET_IFNAME": "none0"}),
    )
    monkeypatch.setattr(tuner, "list_candidates", lambda *_: tried)
    monkeypatch.setattr(tuner, "share_of_time", lambda *_: 4.0)
    config = CollectivesConfig(numbers="may_change", history=str(tmp_path))
    tuning = tuner.tune_settings(WorkerGroup.local(2, timeout=60), config, SyntheticModel(1))
    assert tuning is not None
    hook, impossible = tuning.trials
    assert (impossible.verdict, hook.verdict, tuning.changes) == ("failed", "no change", False)
    assert "none0" in impossible.why
    assert from_json(to_json(tuning), Tuning, "here") == tuning


@pytest.mark.prove
def test_the_whole_tuner_on_loopback_claims_nothing_for_compression(tmp_path: Path) -> None:
    config = CollectivesConfig(tune_seconds=60, numbers="may_change", history=str(tmp_path))
    tuning = tuner.tune_settings(WorkerGroup.local(2, timeout=60), config, SyntheticModel(4))
    assert tuning is not None
    verdicts = {trial.setting: trial.verdict for trial in tuning.trials}
    assert verdicts["fp16 compression hook"] == "no change"


class Noted(nn.Module):
    """Notes in which type its product is computed, and whether in TF32."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.seen: set[tuple[str, str]] = set()

    def __deepcopy__(self, memo: object) -> Noted:
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.seen.add((str(y.dtype), torch.get_float32_matmul_precision()))
        return y


def arithmetic_of_steps(worker: WorkerContext, arithmetic: Arithmetic) -> list[set[tuple[str, str]]]:
    found = []
    works: list[Callable[[Model], object]] = [
        lambda model: measure_compute(worker, model),
        lambda model: time_alternately(worker, model, DdpSettings(), DdpSettings(), 0.0),
        lambda model: time_in_one_launch(worker, model, DdpSettings(), 0.0),
    ]
    for work in works:
        module, model = Noted(), SyntheticModel(arithmetic=arithmetic)
        object.__setattr__(model, "build", lambda module=module: (module, [torch.zeros(8, 4)]))
        work(model)
        found.append(module.seen)
    return found


@pytest.mark.prove
@pytest.mark.parametrize(
    ("arithmetic", "seen"),
    [
        pytest.param(Arithmetic(), ("torch.float32", "highest"), marks=pytest.mark.prove),
        pytest.param(Arithmetic("bf16"), ("torch.bfloat16", "highest"), marks=pytest.mark.prove),
        (Arithmetic("fp32", tf32=True), ("torch.float32", "high")),
    ],
)
def test_the_steps_that_are_timed_compute_as_training_does(arithmetic: Arithmetic, seen: tuple[str, str]) -> None:
    assert in_group(1, arithmetic_of_steps, arithmetic) == [{seen}] * 3


class SlowToMake(SyntheticModel):
    def build(self) -> Any:
        time.sleep(1.0)
        return super().build()


@pytest.mark.prove
def test_the_time_of_a_candidate_has_its_preparation_in_it() -> None:
    # A second of turns would be ten of them.
    in_use, _ = in_group(2, time_alternately, SlowToMake(1), DdpSettings(), DdpSettings(), 1.0)
    assert len(in_use) == FEWEST_TURNS


def test_a_gain_that_is_not_allowed_is_named_beside_no_change() -> None:
    trials = [
        TuningTrial("a hook", "may change numbers", 1.9, 1.8, 2.0, 20),
        TuningTrial("x", "no change", 1.01, 0.9, 1.1, 20),
    ]
    tuning = replace(tuning_of(DdpSettings(), {}), trials=tuple(trials))
    assert str(tuning).splitlines()[1:3] == [
        "no change: no setting that keeps the numbers is faster by 3 % or more; a hook, which may change them, is 1.90 "
        "times as fast",
        "  a hook: 1.90 times as fast (1.80 to 2.00, 20 turns), but it may change numbers: set collectives.numbers to "
        "may_change",
    ]


def test_what_is_recommended_can_be_pasted() -> None:
    fingerprint = tuning_of(DdpSettings(), {}).fingerprint
    tuning = Tuning(
        fingerprint, "a model", HALF, {"NCCL_ALGO": "allreduce:tree"}, (TuningTrial("x", "taken", 1.9, 1.8, 2.0, 20),)
    )
    assert str(tuning).splitlines()[1:] == [
        "DistributedDataParallel: hook=fp16",
        "export NCCL_ALGO=allreduce:tree",
        "  x: taken: 1.90 times as fast (1.80 to 2.00, 20 turns)",
    ]
    assert "no change: no setting was tried" in str(tuning_of(DdpSettings(), {}))


def test_without_a_winner_the_smallest_gain_that_could_be_seen_is_said() -> None:
    trials = (
        TuningTrial("x", "no change", 1.01, 0.99, 1.03, 20, 0.04),
        TuningTrial("y", "no change", 1.0, 0.9, 1.1, 5, 0.16),
        TuningTrial("z", "not tried", why="the time was over; give collectives.tune_seconds more"),
    )
    lines = str(replace(tuning_of(DdpSettings(), {}), trials=trials)).splitlines()
    assert lines[1] == "no change of more than 16% was found" and lines[4].startswith(
        "  z: not tried: the time was over"
    )


class Clock:
    """Seconds that pass by what is launched."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("budget", "launch_s", "tried"), [(300.0, 5.0, 12), (50.0, 5.0, 6), (35.0, 8.0, 2), (4.0, 8.0, 0)]
)
def test_the_time_is_kept_with_the_starts_of_processes(
    monkeypatch: pytest.MonkeyPatch, budget: float, launch_s: float, tried: int
) -> None:
    """Of twelve candidates, each after the start of its processes."""
    clock = Clock()
    monkeypatch.setattr(tuner, "time", clock)
    measured = []
    for left in range(12, 0, -1):
        seconds = tuner.share_of_time(budget, left, launch_s)
        measured.append(seconds > 0)
        clock.now += launch_s + seconds if seconds else 0.0
    assert sum(measured) == tried and measured == sorted(measured, reverse=True) and clock.now <= budget


class SlowSteps(SyntheticModel):
    """Its steps take a quarter of a second."""

    def build(self) -> tuple[nn.Module, list[torch.Tensor]]:
        module, inputs = super().build()
        module.register_forward_pre_hook(lambda *_: time.sleep(0.25))
        return module, inputs


@pytest.mark.prove
def test_a_candidate_in_progress_ends_with_its_time() -> None:
    began = time.monotonic()
    in_use, other = in_group(1, time_alternately, SlowSteps(1), DdpSettings(), DdpSettings(), 0.5, 1.0)
    assert len(in_use) == len(other) < FEWEST_TURNS and time.monotonic() - began < 60


def test_the_plugins_table_covers_every_size_of_every_operation_with_its_channels() -> None:
    nccl = replace(tuning_of(DdpSettings(), {}).fingerprint, backend="nccl", world=16, nodes=2)
    chosen = {"NCCL_ALGO": "allreduce:tree", "NCCL_PROTO": "LL", "NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"}
    header, *rows = plugin_csv(Tuning(nccl, "a model", DdpSettings(), chosen)).splitlines()
    table = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert {row["collective_type"] for row in table} == {
        *("allreduce", "broadcast", "reduce", "allgather", "reducescatter")
    }
    for row in table:
        assert row["min_bytes"] == "0" and int(row["max_bytes"]) > 1 << 40 and row["channels"] == "8"
        assert (row["nNodes"], row["nRanks"]) == ("2", "16")
        reduces = row["collective_type"] == "allreduce"
        assert (row["algorithm"], row["protocol"]) == (("tree", "ll") if reduces else ("ring", "simple"))
    with pytest.raises(UserError, match=r"^--nccl-csv: .* NCCL's "):
        plugin_csv(Tuning(nccl, "a model", DdpSettings(), {"NCCL_PROTO": "LL"}))
    with pytest.raises(UserError, match=r"^--nccl-csv: .* gloo"):
        plugin_csv(tuning_of(DdpSettings(), chosen))


def tuning_of(ddp: DdpSettings, environment: dict[str, str]) -> Tuning:
    from slipstream.shared.interconnect.profile import Fingerprint

    return Tuning(Fingerprint(2, 1, "gloo", ("cpu",), (), "", {}), "a model", ddp, environment)


def test_a_damaged_tuning_is_one_line() -> None:
    broken = {**to_tree(tuning_of(DdpSettings(), {})), "ddp": {"bucket_cap_mb": "many"}}
    with pytest.raises(UserError, match=r"^tuning\.json: .* \(ddp\.bucket_cap_mb: "):
        from_tree(broken, Tuning, "tuning.json")
