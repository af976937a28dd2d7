"""The main job, started twice at once in one directory."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.stages import STAGES
from tests.support.command_line import start_in
from tests.support.quick_config import EXPORT, NETWORK

CONFIG = {"training": {"epochs": 2}, "export": EXPORT, "collectives": NETWORK, "promotion": {"max_loss": 50}}


@pytest.mark.prove
def test_each_stage_is_made_once_and_each_run_ends_well(tmp_path: Path) -> None:
    def run(_: int) -> tuple[int, str]:
        ended = start_in(
            tmp_path, "--registry", "registry", "--config", json.dumps(CONFIG), workflow="train_and_promote"
        )
        return ended.returncode, ended.stdout

    with ThreadPoolExecutor(3) as three:
        ended = list(three.map(run, range(3)))
    assert [code for code, _ in ended] == [0, 0, 0], ended
    made: dict[str, list[str]] = {}
    for manifest in tmp_path.glob(".slipstream/*/*/manifest.json"):
        stage = manifest.parent.parent.name
        if stage not in STAGES:  # charts, which show each run's own measurement of the interconnect
            continue
        made.setdefault(stage, []).append(Artifact.open(manifest.parent, stage).check().fingerprint)
    assert {stage: len(artifacts) for stage, artifacts in made.items()} == dict.fromkeys(made, 1)
    assert {"prepare", "train", "evaluate", "export"} <= made.keys()
    (pointer,) = Registry(str(tmp_path / "registry")).history()
    check_package(Registry(str(tmp_path / "registry")).fetch(pointer, tmp_path / "served"))
    runs = [path.parent for path in tmp_path.glob("runs/*/summary.json")]
    assert len(runs) == 3
    for directory in runs:
        check_package(directory / "model")
        assert (directory / "report.html").read_text().rstrip().endswith("</html>")
    assert not [*tmp_path.glob(".slipstream/*/.*.work"), *tmp_path.glob("runs/.*")]
