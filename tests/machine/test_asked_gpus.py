"""A pod that requested GPUs and sees none is refused in one line with the likely cause."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from slipstream.errors import UserError
from slipstream.machine import asked_gpus
from slipstream.machine.asked_gpus import check_asked_gpus
from slipstream.profiles.placement import Placement
from tasks.flyte import before_start, elastic
from tasks.train import train


@pytest.mark.parametrize(
    ("build", "environment", "mounted", "said"),
    [
        (
            None,
            {},
            True,
            "but torch in its image was built for CPUs; build the image with images/cuda",
        ),
        ("13.0", {"CUDA_VISIBLE_DEVICES": ""}, True, "sees none; CUDA_VISIBLE_DEVICES= hides them"),
        ("7.0", {"HIP_VISIBLE_DEVICES": "-1"}, False, "sees none; HIP_VISIBLE_DEVICES=-1 hides them"),
        ("13.0", {"LD_LIBRARY_PATH": "/opt"}, True, "sees none; the driver is mounted at "),
        ("13.0", {}, False, "sees none; the driver's libraries are not found: on GKE set LD_LIBRARY_PATH="),
    ],
)
def test_what_most_likely_hides_them(
    build: str | None,
    environment: dict[str, str],
    mounted: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = tmp_path / "lib64"
    monkeypatch.setattr(asked_gpus, "GKE_DRIVER", driver)
    if mounted:
        driver.mkdir()
    with pytest.raises(UserError, match=r"^profile\.gpu: the pod asked for 8 GPUs") as refused:
        check_asked_gpus(8, 0, build, environment)
    assert said in refused.value.message
    # Where the linker looks there already, the mount is not to blame.
    with pytest.raises(UserError, match="built for CPUs" if build is None else "sees none") as refused:
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
    monkeypatch.setattr(elastic, "run_stage", Mock(side_effect=AssertionError("it went on")))
    with pytest.raises(UserError, match=r"profile\.gpu: the pod asked for 2 GPUs"):
        train.execute()
    # A user's own machine need not have the GPUs of the cluster's profile.
    monkeypatch.setattr(elastic, "runs_locally", lambda: True)
    with pytest.raises(AssertionError, match="it went on"):
        train.execute()
