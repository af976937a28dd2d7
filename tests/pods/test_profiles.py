"""A profile is data; what it says reaches the task's metadata, and a pod of another shape refuses to start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.errors import UserError
from tasks.flyte.elastic import refuse_other_shape
from tasks.hardware.profile import Placement, Profile, load, parse, visible_gpus


def test_a_resolved_profile_comes_out_of_the_environment_as_it_went_in() -> None:
    for name in ("local", "a100-spot"):
        profile = load(name)
        data = json.loads(profile.to_json())
        assert parse(data["name"], data) == profile


def test_stages_inherit_the_default_and_override_it() -> None:
    spot = load("a100-spot")
    assert spot.placement("train").world_size == 16 and spot.placement("train").gpu == "8"
    assert spot.placement("report") == spot.default and spot.default.interruptible
    # A preempted PyTorchJob spends the user's retries, one a preemption.
    assert spot.placement("train").retries > spot.default.retries


def test_local_takes_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    assert visible_gpus() == 3 and load("local").placement("train").processes == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0 and load("local").placement("train").processes == 2


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[default]\nnode = 2", "profile.node: unknown setting; did you mean 'nodes'?"),
        ("[default]\nretries = -1", "profile.retries: -1"),
        ("[stages.train]\ncpu = 2", "profile.cpu: 2 is not allowed; expected a text"),
        ("[stage.train]\ncpu = '2'", "unknown setting; did you mean 'stages'?"),
        ("[default", "cannot be read"),
    ],
)
def test_a_wrong_profile_is_one_line(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(toml)
    with pytest.raises(UserError, match="mine") as refusal:
        load(str(path))
    assert message in refusal.value.message


def test_an_unknown_profile_lists_the_known() -> None:
    with pytest.raises(UserError, match="choose one of a100-spot, local"):
        load("h100")


TWO = Placement(nodes=2, processes=8)


@pytest.mark.parametrize("nodes", ["2", "2:2"])
def test_a_pod_of_the_profiles_shape_may_start(nodes: str) -> None:
    refuse_other_shape("p", TWO, {"PET_NNODES": nodes, "PET_NPROC_PER_NODE": "8"}, local=False)
    refuse_other_shape("p", Placement(), {}, local=True)


@pytest.mark.parametrize(
    ("place", "environment", "local", "message"),
    [
        (TWO, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "8"}, False, "PET_NNODES=1, but profile 'p' says 2"),
        (TWO, {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "4"}, False, "PET_NPROC_PER_NODE=4, but profile 'p' says 8"),
        (Placement(), {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1"}, False, "PET_NNODES=2, but profile 'p' says 1"),
        (TWO, {}, False, "outside a PyTorchJob"),
        (TWO, {}, True, "on one machine"),
    ],
)
def test_a_pod_of_another_shape_refuses(
    place: Placement, environment: dict[str, str], local: bool, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        refuse_other_shape("p", place, environment, local=local)


def test_profiles_are_values() -> None:
    assert Profile("p", TWO, {}).placement("anything") is TWO
