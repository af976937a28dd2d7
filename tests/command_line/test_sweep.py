"""``pyflyte run workflows/sweep.py sweep``: settings are searched, the best are trained, and it all goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from slipstream.sweep.command import main as sweep_command
from slipstream.sweep.store import SweepStore
from tests.support.command_line import run_in
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.tables import table_text

WORKFLOW: dict[str, Any] = {"workflow": "sweep", "file": "sweep"}
SWEEP = {"trials": 3, "store": "swept", "space": {"training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}}}


def config(**sweep: Any) -> str:
    training = {"epochs": 4, "batch_size": 64, "learning_rate": 1e-5}
    return json.dumps({"training": training, "export": EXPORT, "collectives": NETWORK, "sweep": {**SWEEP, **sweep}})


def test_it_searches_trains_the_best_and_goes_on(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(table_text(600))
    arguments = ("--data", "table.csv", "--target", "y", "--config")
    ended = run_in(tmp_path, *arguments, config(), **WORKFLOW)
    assert ended.returncode == 0, ended.stdout
    (report,) = (tmp_path / "runs").glob("*/report.html")
    figures = json.loads((report.parent / "summary.json").read_text())
    found, best = figures["sweep"], figures["sweep"]["best"]
    losses = {trial["number"]: trial["loss"] for trial in found["trials"] if trial["state"] == "complete"}
    assert len(found["trials"]) == 3 and best > 0 and losses[best] == min(losses.values()) < losses[0]
    assert found["against"]["low"] <= found["against"]["gain"] <= found["against"]["high"]
    page, said = " ".join(report.read_text().split()), " ".join(ended.stdout.split())
    assert f"Trial {best} is the best" in page and f"trial {best} is the best: learning_rate" in said
    # The model that is exported was trained with the settings that were found, and by the ordinary stage.
    (trained,) = (tmp_path / ".slipstream/train").glob("*/manifest.json")
    rate = json.loads(trained.read_text())["made_by"]["training"]["learning_rate"]
    store = SweepStore(str(tmp_path / "swept"))
    assert store.trials()[best].values == {"training.learning_rate": rate}

    again = run_in(tmp_path, *arguments, config(trials=4), **WORKFLOW)
    assert again.returncode == 0, again.stdout
    assert (
        "sweep 4/4 trial 3" in " ".join(again.stdout.split()) and "trial 2 " not in again.stdout.partition("train ")[0]
    )
    listed = CliRunner().invoke(sweep_command, [str(tmp_path / "swept")])
    assert listed.exit_code == 0 and "4 trials" in listed.output and "the best" in listed.output

    other = {"training.weight_decay": {"choices": [0.1, 0.2]}}
    refused = run_in(tmp_path, *arguments, config(space=other), **WORKFLOW)
    assert refused.returncode == 1
    assert "sweep.store: swept holds a sweep of another space" in " ".join(refused.stdout.replace("│", " ").split())


def test_a_store_that_holds_no_sweep(tmp_path: Path) -> None:
    ended = CliRunner().invoke(sweep_command, [str(tmp_path)])
    assert ended.exit_code == 1 and "holds no sweep; expected the store of one" in ended.output
