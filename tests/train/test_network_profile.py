"""``training.network_profile``: training applies the tuner's result, and a resumed run keeps its first one."""

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from slipstream.config import RunConfig
from slipstream.flyte.stage import section_digest
from slipstream.operations.proofs.gpu.attempts import InjectedFault, TrainingJob, result_digests, run_attempt
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.collectives.config import CollectivesConfig
from slipstream.pipeline.collectives.tune.tuner import tuning_candidates
from slipstream.pipeline.train.applied_tuning import AppliedTuning, agree_on_tuning, allowed_part
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.parallel.config import GradientsConfig, ParallelConfig
from slipstream.shared.artifacts.versions import code_version
from slipstream.shared.errors import UserError
from slipstream.shared.interconnect.history import TuningHistory, tuning_at
from slipstream.shared.interconnect.profile import Fingerprint
from slipstream.shared.interconnect.tuning import VARIABLES as VARIABLES_OF_THE_TUNER
from slipstream.shared.interconnect.tuning import DdpSettings, Tuning, TuningTrial, read_tuning, write_tuning
from tests.support.layout_runs import on_ranks
from tests.support.network_profiles import network_profile
from tests.support.wording import refuses

HERE = network_profile().fingerprint
VARIABLES = {"NCCL_ALGO": "Ring", "NCCL_BUFFSIZE": "8388608"}
FOUND = Tuning(HERE, "a model", DdpSettings(50, hook="fp16"), VARIABLES)


def look() -> Fingerprint:
    from slipstream.shared.interconnect.fingerprint import interconnect_fingerprint
    from slipstream.shared.interconnect.topology import group_topology

    device = torch.device("cpu")
    return interconnect_fingerprint(group_topology(device), device)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("prepared") / "table"
    write_table(directory, "classification")
    return directory


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fingerprint]:
    """A history in which the tuner's result for two processes here is the fp16 hook."""
    place = tmp_path_factory.mktemp("history")
    here = on_ranks(2, look, place / "ranks")[0]
    TuningHistory(str(place), here).publish(Tuning(here, "a model", DdpSettings(hook="fp16")), {})
    return place, here


def job(prepared: Path, place: Path, **training: Any) -> TrainingJob:
    return TrainingJob(prepared, place, 2, str(place / "home"), dropout=0, training=training)


@pytest.mark.prove
def test_training_applies_what_was_found_and_resumes_with_what_it_began_with(
    prepared: Path, history: tuple[Path, Fingerprint], tmp_path: Path
) -> None:
    place, here = history
    asked = functools.partial(job, prepared, gradients=GradientsConfig(hook="fp16"))
    applies = {"network_profile": str(place), "network_numbers": "may_change"}
    whole, killed = asked(tmp_path / "whole"), job(prepared, tmp_path / "killed", **applies)
    assert run_attempt(whole).finished
    assert not run_attempt(killed, InjectedFault("step", at=11)).finished
    assert "applies the tuner's result: hook=fp16" in (killed.place / "log-0").read_text()
    # Something else is found meanwhile, and then the setting is removed: this run stays as it was.
    TuningHistory(str(place), here).publish(Tuning(here, "a model", DdpSettings(), {"GLOO_SOCKET_IFNAME": "none"}), {})
    assert not run_attempt(killed, InjectedFault("step", at=5)).finished
    assert run_attempt(job(prepared, tmp_path / "killed")).finished
    assert weights(killed) == weights(whole)


def weights(run: TrainingJob) -> dict[str, str]:
    """The digests of what training made; a checkpoint also says what was applied."""
    return {name: digest for name, digest in result_digests(run).items() if not name.startswith("step-")}


@pytest.mark.prove
def test_without_permission_numbers_stay_as_they_are(
    prepared: Path, history: tuple[Path, Fingerprint], tmp_path: Path
) -> None:
    place, here = history
    TuningHistory(str(place), here).publish(Tuning(here, "a model", DdpSettings(hook="fp16")), {})
    plain, careful = job(prepared, tmp_path / "plain"), job(prepared, tmp_path / "x", network_profile=str(place))
    assert run_attempt(plain).finished and run_attempt(careful).finished
    assert "because collectives.numbers is not may_change: hook=fp16" in ((careful.place / "log-0").read_text())
    assert result_digests(careful) == result_digests(plain)


@pytest.mark.parametrize(
    ("training", "world", "gradients", "environment"),
    [
        ({}, 2, {"bucket_cap_mb": 50}, VARIABLES),
        ({}, 3, {}, {"NCCL_BUFFSIZE": "8388608"}),
        ({"network_numbers": "may_change"}, 3, {"bucket_cap_mb": 50, "hook": "fp16"}, VARIABLES),
        ({"network_numbers": "may_change", "parallel": ParallelConfig(shard="weights")}, 3, {}, VARIABLES),
    ],
)
def test_what_is_applied(
    training: Mapping[str, Any], world: int, gradients: Mapping[str, Any], environment: Mapping[str, str]
) -> None:
    found = allowed_part(FOUND, TrainingConfig(**training), replace(HERE, world=world))
    assert (found.gradients, found.environment) == (gradients, environment)


def test_what_the_user_sets_goes_before_what_was_found() -> None:
    found = AppliedTuning({"bucket_cap_mb": 50, "hook": "fp16"})
    assert found.exchange(GradientsConfig()) == GradientsConfig(hook="fp16", bucket_cap_mb=50)
    asked = GradientsConfig(hook="powersgd", rank=4)
    assert found.exchange(asked) == replace(asked, bucket_cap_mb=50)
    assert not AppliedTuning() and AppliedTuning().exchange(asked) == asked


def test_a_result_of_other_hardware_is_ignored_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_tuning(tmp_path / "one", FOUND, {})
    assert tuning_at(str(tmp_path / "one"), HERE) == FOUND
    with caplog.at_level(logging.WARNING):
        assert tuning_at(str(tmp_path / "one"), replace(HERE, driver="another")) is None
        assert "ignored, as it was measured on other hardware: its driver is" in caplog.text
        assert tuning_at(str(tmp_path / "nothing"), HERE) is None
        assert "holds no result of the tuner for this hardware" in caplog.text
    TuningHistory(str(tmp_path), HERE).publish(FOUND, {})
    assert tuning_at(str(tmp_path), HERE) == FOUND and tuning_at(str(tmp_path), replace(HERE, world=9)) is None


@pytest.mark.parametrize(
    ("trials", "view"),
    [
        ((TuningTrial("gradient_as_bucket_view", "no change"),), True),
        ((TuningTrial("gradient_as_bucket_view=False", "no change"),), True),
        ((TuningTrial("gradient_as_bucket_view=False", "taken"),), False),
    ],
)
def test_a_result_from_before_that_found_nothing_changes_nothing(
    trials: tuple[TuningTrial, ...], view: bool, tmp_path: Path
) -> None:
    """Where gradients lie was said in every result, and it was another default."""
    write_tuning(tmp_path, replace(FOUND, ddp=DdpSettings(gradient_as_bucket_view=False), trials=trials), {})
    found = read_tuning(tmp_path)
    assert found.ddp == DdpSettings(gradient_as_bucket_view=view)


def test_a_damaged_result_is_one_line(tmp_path: Path) -> None:
    write_tuning(tmp_path, FOUND, {})
    (tmp_path / "tuning.json").write_text("{}")
    with pytest.raises(UserError, match=r"tuning\.json"):
        tuning_at(str(tmp_path), HERE)


def test_a_new_result_makes_nothing_run_again(tmp_path: Path) -> None:
    config = RunConfig(
        training=TrainingConfig(network_profile="latest"),
        collectives=CollectivesConfig(history=str(tmp_path), numbers="may_change"),
    )
    section = config.for_training()
    assert (section.network_profile, section.network_numbers) == (str(tmp_path), "may_change")
    before = section_digest(section), code_version("train")
    TuningHistory(str(tmp_path), HERE).publish(FOUND, {})
    assert (section_digest(config.for_training()), code_version("train")) == before
    # Without a network profile, settings of the collectives do not affect training.
    assert RunConfig(collectives=config.collectives).for_training() == TrainingConfig()


@pytest.mark.parametrize("variable", ["NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "LD_PRELOAD", "PYTHONPATH", "PATH"])
def test_a_file_sets_no_variable_but_the_tuners(
    variable: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some of them name code that is loaded; who can write to the history, or a checkpoint, shall not choose it."""
    evil = replace(FOUND, environment={variable: "/tmp/evil.so"})
    write_tuning(tmp_path / "evil", evil, {})
    with refuses(UserError):
        tuning_at(str(tmp_path / "evil"), HERE)
    # Of a history it is passed over, as what cannot be read.
    TuningHistory(str(tmp_path / "history"), HERE).publish(evil, {})
    with caplog.at_level(logging.WARNING):
        assert tuning_at(str(tmp_path / "history"), HERE) is None
    assert "skipped: /" in caplog.text and variable in caplog.text

    environment = {"RANK": "0"}
    begun = {"environment": {variable: "/tmp/evil.so"}, "fingerprint": HERE.digest}
    with refuses(UserError):
        agree_on_tuning(TrainingConfig(), lambda: begun, dist.HashStore(), environment)
    assert environment == {"RANK": "0"}


@pytest.mark.parametrize(
    "begun",
    [
        {"gradients": {"hook": "powersgd"}},
        {"gradients": {"rank": 64}},
        {"gradients": {"bucket_cap_mb": -1}},
        {"gradients": {"bucket_cap_mb": True}},
        {"environment": {"NCCL_ALGO": "Ring\0"}},
        {"environment": {"NCCL_ALGO": "Ring" * 99}},
        {"environment": {"NCCL_ALGO": 3}},
        {"learning_rate": 1e9},
        ["NCCL_ALGO"],
    ],
)
def test_a_checkpoint_sets_nothing_that_the_tuner_would_not(begun: object) -> None:
    environment = {"RANK": "0"}
    with refuses(UserError):
        agree_on_tuning(TrainingConfig(), lambda: begun, dist.HashStore(), environment)
    assert environment == {"RANK": "0"}


def test_all_that_the_tuner_tries_may_be_set() -> None:
    tried = tuning_candidates("nccl", [4], [], []) + tuning_candidates("gloo", [4], ["eth1"], [])
    assert {name for one in tried for name in one.environment} == set(VARIABLES_OF_THE_TUNER)
