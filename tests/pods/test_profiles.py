"""Profiles reach the tasks' metadata; a pod of another shape refuses to start."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from slipstream.flyte.before_start import refuse_other_shape
from slipstream.flyte.elastic import DistributedTask, distributed
from slipstream.shared.errors import UserError
from slipstream.shared.machine.gpus import visible_gpus
from slipstream.shared.profiles.command import main
from slipstream.shared.profiles.placement import Placement
from slipstream.shared.profiles.profile import (
    CHOICE,
    RESOLVED,
    Profile,
    current_profile,
    load_profile,
    parse_profile,
    profile_names,
)
from slipstream.shared.stages import STAGES
from tests.support.fake_nvml import see_four_gpus

SHIPPED = ["a100-mig", "a100-spot", "cpu-cluster", "h100-efa-spot", "l4-spot", "local", "mi300x", "t4-shared"]


def test_the_profiles_that_are_shipped() -> None:
    assert profile_names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_a_resolved_profile_comes_out_of_the_environment_as_it_went_in(name: str) -> None:
    profile = load_profile(name)
    data = json.loads(profile.to_json())
    assert parse_profile(data["name"], data) == profile


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "local"])
def test_profiles_of_a_cluster_leave_no_number_of_processes_open(name: str) -> None:
    """A pod of another shape could not tell that it was registered on another machine."""
    profile = load_profile(name)
    assert all(profile.asked(stage).processes for stage in STAGES)


def test_stages_inherit_the_default_and_override_it() -> None:
    spot = load_profile("a100-spot")
    assert spot.placement("train").world_size == 16 and spot.placement("train").gpu == "8"
    assert spot.placement("report") == spot.default and spot.default.interruptible
    # A preempted PyTorchJob spends the user's retries, one a preemption.
    assert spot.placement("train").retries > spot.default.retries


def test_compression_and_promotion_have_resources_of_their_own() -> None:
    profile = parse_profile("mine", {"stages": {"compress": {"gpu": "1"}, "promote": {"memory": "3Gi"}}})
    assert profile.asked("compress").gpu == "1" and profile.asked("promote").memory == "3Gi"
    assert profile.asked("evaluate") == profile.asked("report") == profile.default


def test_local_takes_what_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch, "0,1,3")
    assert visible_gpus() == 3 and load_profile("local").placement("train").processes == 3
    travelled = load_profile("local").to_json()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == 0 and load_profile("local").placement("train").processes == 2
    # What was registered on a machine with GPUs runs on one without, as if it had been registered there.
    assert travelled == load_profile("local").to_json()


def test_processes_left_open_are_one_per_gpu_of_the_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch, "0")
    profile = parse_profile("mine", {"distributed": {"gpu": "4", "processes": 0}})
    assert profile.asked("train").processes == 0 and profile.placement("train").processes == 4


def test_the_threads_of_a_process_follow_from_the_placement() -> None:
    assert Placement(cpu="90", gpu="8", processes=8).threads == 11
    assert Placement(cpu="500m").threads == 1 and Placement(processes=0).threads == 0


def written(place: Path, **profiles: str) -> str:
    """The path of the last of the profiles, each written to a file of its name."""
    for name, toml in profiles.items():
        (place / f"{name}.toml").write_text(toml)
    return str(place / f"{name}.toml")


def test_a_sites_own_profile_is_five_lines(tmp_path: Path) -> None:
    own = 'extends = "a100-spot"\n[distributed]\nnodes = 4\nlabels.team = "vision"\n[stages.collectives]\nretries = 3\n'
    mine, base = load_profile(written(tmp_path, mine=own)), load_profile("a100-spot")
    assert mine.name == "mine"
    train, network = mine.asked("train"), mine.asked("collectives")
    assert (train.nodes, network.nodes, network.retries) == (4, 4, 3)
    assert train.labels == network.labels == {"team": "vision"}
    # The rest is the other's: also how many retries training needs, now with twice the pods.
    assert train.environment == base.asked("train").environment and train.tolerations == base.asked("train").tolerations
    assert train.timeout_minutes == 1440 and train.retries > base.asked("train").retries
    assert mine.asked("prepare") == base.asked("prepare") and mine.default == base.default


def test_mappings_are_joined_and_lists_replaced(tmp_path: Path) -> None:
    base = "[default]\nenvironment = {A = '1', B = '1'}\n[[default.tolerations]]\nkey = 'one'\n"
    above = "extends = 'base.toml'\n[default]\nenvironment = {B = '2'}\n[[default.tolerations]]\nkey = 'two'\n"
    top = "extends = 'above.toml'\n[stages.train]\nenvironment = {C = '3'}\n"
    profile = load_profile(written(tmp_path, base=base, above=above, top=top))
    assert profile.asked("report").environment == {"A": "1", "B": "2"}
    assert profile.asked("train").environment == {"A": "1", "B": "2", "C": "3"}
    assert [toleration.key for toleration in profile.asked("train").tolerations] == ["two"]


def test_retries_follow_from_the_preemptions() -> None:
    spot = {"preemptions_per_day": 2.0, "timeout_minutes": 720}
    profile = parse_profile("mine", {"default": spot, "distributed": {"nodes": 2}, "stages": {"prepare": {"nodes": 4}}})
    # Four preemptions are expected of the job in twice its timeout. Single pods have another budget.
    assert profile.asked("train").retries == 2 + 9
    assert profile.asked("prepare").retries == profile.asked("report").retries == 2
    assert parse_profile("mine", {"default": {**spot, "retries": 0}}).asked("train").retries == 0


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[default]\nnode = 2", "profile.node: unknown setting; did you mean 'nodes'?"),
        ("[default]\nretries = -1", "profile.retries: -1"),
        ("[stages.train]\ncpu = 2", "profile.cpu: 2 is not allowed; expected a text"),
        ("[stage.train]\ncpu = '2'", "unknown setting; did you mean 'stages'?"),
        ("[stages.trian]\ncpu = '2'", "stages.trian: unknown setting; did you mean 'train'?"),
        ("[stages]\ntrain = 2", "stages.train: 2 is not allowed; expected a mapping"),
        ("[default", "cannot be read"),
        ("extends = 3", "extends: 3 is not allowed; expected a text"),
        ("extends = 'h200'", "extends h200: no such profile; choose one of a100-mig"),
        ("extends = 'mine.toml'", "extends itself in a circle"),
        ("[default]\nmemory = '16 GB'", 'profile.memory: "16 GB" is not allowed; expected a Kubernetes quantity'),
        (
            "[default]\ndisk = '10Gi'",
            'profile.disk: "10Gi" is not allowed; expected room for profile.data_cache_gib, 100',
        ),
        ("[default]\nshared_memory = '4Gi'", "less than profile.memory, 2Gi"),
        ("[default]\ncpu = '1500m'\nnuma = true", "whole CPUs with profile.numa"),
        ("[default]\ngpu = 'two'", 'profile.gpu: "two" is not allowed; expected a whole number'),
        ("[default]\naccelerator = 'nvidia-l4'", "expected none without GPUs; set profile.gpu"),
        ("[default]\ngpu = '2'\nprocesses = 4", "profile.processes: 4 is not allowed; expected at most one for each"),
        (
            "[default]\ngpu = '8'\nmig = '1g.5gb'",
            "expected profile.gpu 1, nodes 1 and processes 1 with it, not 8, 1 and 1",
        ),
        ("[default]\ngpu = '1'\nnodes = 2\nshared_gpu = 'mps'", "processes 1 with it, not 1, 2 and 1"),
        (
            "[default]\ngpu = '1'\nmig = '1g.5gb'\naccelerator = 'a'",
            "none with nvidia.com/mig-1g.5gb, for which Flyte ignores",
        ),
        ("[default]\ngpu = '1'\nmig = '1g.5gb'\ngpu_resource = 'amd.com/gpu'", "profile.gpu_resource"),
        ("[default]\nefa = 4", 'profile.hugepages: "" is not allowed; expected an amount with profile.efa'),
        (
            "[default]\nefa = 4\nhugepages = '5120Mi'\nnode_selector = {'cloud.google.com/gke-spot' = 'true'}",
            "efa (aws) and node_selector cloud.google.com/gke-spot (gcp) are of different clouds",
        ),
        (
            "[default]\nnotices = 'aws'\n[[default.tolerations]]\nkey = 'kubernetes.azure.com/scalesetpriority'",
            "notices aws (aws) and tolerations kubernetes.azure.com/scalesetpriority (azure) are of different clouds",
        ),
        ("[default.affinity]\nnodes = 1", "profile.affinity.nodes: unknown setting; allowed here: nodeAffinity"),
        ("[distributed]\nnodes = 2\nprocesses = 0", "profile.processes: 0 is not allowed; expected a number"),
        (
            "[stages.train]\nnodes = 2\ntimeout_minutes = 30",
            "profile.timeout_minutes: 30 is not allowed; expected more",
        ),
    ],
)
def test_a_wrong_profile_is_one_line(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(UserError, match="mine") as refusal:
        load_profile(written(tmp_path, mine=toml))
    assert message in refusal.value.message


def test_an_unknown_profile_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^h100: .* a100-mig, a100-spot"):
        load_profile("h100")
    monkeypatch.delenv(RESOLVED, raising=False)
    monkeypatch.setenv(CHOICE, "h100")
    current_profile.cache_clear()
    with pytest.raises(UserError, match=r"^SLIPSTREAM_PROFILE=h100: "):
        current_profile()


def test_the_command_prints_what_every_stage_asks_for() -> None:
    printed = CliRunner().invoke(main, ["a100-spot"])
    assert printed.exit_code == 0
    lines = {line.split()[0]: line for line in printed.output.splitlines()}
    assert set(lines) == {"stage", *STAGES} - {"evaluate"}  # which runs in the pod of the export
    for expected in ("88", "1000Gi", "520Gi", "8 nvidia-a100-80gb", "1440 min", "120 s"):
        assert expected in lines["train"]
    assert "nvidia" not in lines["report"]
    refused = CliRunner().invoke(main, ["h100"])
    assert refused.exit_code == 1 and refused.output.count("\n") == 1
    assert refused.output.startswith("Error: h100: no such profile")


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


def test_the_agent_refuses_more_processes_than_gpus_before_it_starts_any(monkeypatch: pytest.MonkeyPatch) -> None:
    see_four_gpus(monkeypatch, "0")
    config = distributed("train")
    config.profile = Profile("p", Placement(processes=2), {})
    with pytest.raises(UserError, match="2 processes for 1 GPU"):
        DistributedTask._attempt(SimpleNamespace(task_config=config))  # type: ignore[arg-type]


def test_a_stage_in_the_pod_of_another_has_what_that_has() -> None:
    profile = parse_profile("p", {"stages": {"export": {"cpu": "7"}}})
    assert profile.asked("evaluate") is profile.asked("export")
    with pytest.raises(UserError, match=r"p\.stages\.evaluate: .* stages\.export "):
        parse_profile("p", {"stages": {"evaluate": {"cpu": "7"}}})


def test_profiles_are_values() -> None:
    assert Profile("p", TWO, {}).placement("report") is TWO


@pytest.mark.parametrize("name", [name for name in SHIPPED if name != "local"])
def test_a_trial_has_the_time_and_the_warning_of_a_training(name: str) -> None:
    """On one node: a sweep on spot capacity would otherwise end early and watch no notices."""
    profile = load_profile(name)
    sweep, train = profile.asked("sweep"), profile.asked("train")
    for field in ("timeout_minutes", "grace_seconds", "notices", "data_cache_gib", "disk"):
        assert getattr(sweep, field) == getattr(train, field), field
    assert sweep.nodes == 1


def test_a_group_on_one_node_asks_for_no_fabric() -> None:
    profile = load_profile("h100-efa-spot")
    asked = {"vpc.amazonaws.com/efa", "hugepages-2Mi"}
    assert asked <= profile.asked("train").resources.keys()
    assert not asked & profile.asked("sweep").resources.keys()
