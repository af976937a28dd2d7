"""A pod that requested GPUs and sees none is refused in one line with the likely cause."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from slipstream.flyte import before_start, elastic
from slipstream.shared.errors import UserError
from slipstream.shared.machine import gpus
from slipstream.shared.machine.gpus import check_asked_gpus
from slipstream.shared.profiles.placement import Placement
from tasks.train import train
from tests.support.wording import refuses


@pytest.mark.parametrize(
    ("build", "environment", "mounted"),
    [
        (None, {}, True),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, True),
        ("7.0", {"HIP_VISIBLE_DEVICES": "-1"}, False),
        ("13.0", {"LD_LIBRARY_PATH": "/opt"}, True),
        ("13.0", {}, False),
    ],
)
def test_what_most_likely_hides_them(
    build: str | None, environment: dict[str, str], mounted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "lib64"
    monkeypatch.setattr(gpus, "GKE_DRIVER", driver)
    if mounted:
        driver.mkdir()
    with refuses(UserError, match=r"^profile\.gpu:"):
        check_asked_gpus(8, 0, build, environment)
    # Where the linker looks there already, the mount is not to blame.
    with refuses(UserError) as refused:
        check_asked_gpus(1, 0, build, {"LD_LIBRARY_PATH": f"/opt:{driver}"})
    assert "the driver is mounted at" not in refused.value.message
    check_asked_gpus(0, 0, build, environment)
    check_asked_gpus(8, 8, "13.0", environment)


@pytest.mark.parametrize("build", [None, "13.0"])
def test_a_training_pod_does_not_train_on_its_cpu_instead(build: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = Mock(placement=lambda stage: Placement(gpu="2", processes=2))
    monkeypatch.setattr(train.task_config, "profile", placed)
    monkeypatch.setattr(before_start, "visible_gpus", lambda: 0)
    monkeypatch.setattr(elastic, "runs_locally", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    monkeypatch.setattr(elastic, "run_stage", Mock(side_effect=AssertionError("started")))
    with refuses(UserError, match=r"profile\.gpu:"):
        train.execute()
    # A user's own machine need not have the GPUs of the cluster's profile.
    monkeypatch.setattr(elastic, "runs_locally", lambda: True)
    monkeypatch.setattr(train.task_config, "unfinished", None)
    with pytest.raises(AssertionError, match="started"):
        train.execute()
