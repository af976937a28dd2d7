"""``pyflyte run workflows/sweep.py sweep``: search, training of the best settings, and resumption."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from slipstream.pipeline.sweep.command import main as sweep_command
from slipstream.pipeline.sweep.records import TrialEnded, TrialProposed, encode_record
from slipstream.pipeline.sweep.space import untyped_parameters
from slipstream.pipeline.sweep.store import SweepStore
from tests.support.command_line import run_in
from tests.support.quick_config import EXPORT, NETWORK
from tests.support.tables import table_text

WORKFLOW: dict[str, Any] = {"workflow": "sweep", "file": "sweep"}
SWEEP: dict[str, Any] = {
    "trials": 3,
    "store": "swept",
    "space": {"training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True}},
}
PARAMETERS = untyped_parameters(SWEEP["space"])


def config(**sweep: Any) -> str:
    training = {"epochs": 4, "batch_size": 64, "learning_rate": 1e-5}
    model = {"arguments": {"hidden": [8]}}
    return json.dumps(
        {"training": training, "model": model, "export": EXPORT, "collectives": NETWORK, "sweep": {**SWEEP, **sweep}}
    )


@pytest.mark.prove
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
    store = SweepStore(str(tmp_path / "swept"), PARAMETERS)
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


#: What a record of somebody else's would set, and in which module it would run code.
FORGED = {
    "model.name": "evil:make",
    "training.checkpoint_uri": "elsewhere",
    "export.max_loss": 100.0,
    "promotion.max_loss": 100.0,
    "promotion.when_in_doubt": "promote",
}
EVIL = "open('ran', 'w').close()\ndef make(signature): raise SystemExit\n"


@pytest.mark.prove
def test_records_that_somebody_else_wrote_set_nothing(tmp_path: Path) -> None:
    """The record of the settings as given is cut, and a trial that sets everything claims to be the best."""
    (tmp_path / "table.csv").write_text(table_text(600))
    (tmp_path / "evil.py").write_text(EVIL)
    records = tmp_path / "swept/records"
    for number, content in ((0, encode_record(TrialProposed({}))[:-9]), (1, encode_record(TrialProposed(FORGED)))):
        (records / f"{number:04d}").mkdir(parents=True)
        (records / f"{number:04d}/0001.json").write_bytes(content)
    (records / "0001/0002.json").write_bytes(encode_record(TrialEnded("complete", -1e9, weights="ab" * 32)))
    ended = run_in(tmp_path, "--data", "table.csv", "--target", "y", "--config", config(trials=2), **WORKFLOW)
    assert ended.returncode == 0, ended.stdout
    assert not (tmp_path / "ran").exists() and not (tmp_path / "elsewhere").exists()
    (report,) = (tmp_path / "runs").glob("*/summary.json")
    figures = json.loads(report.read_text())
    assert [(trial["number"], trial["settings"] == "as given") for trial in figures["sweep"]["trials"]] == [
        (2, True),
        (3, False),
    ]
    assert (figures["sweep"]["against"] is None) == (figures["sweep"]["best"] == 2)
    assert (tmp_path / "swept/trials/0002/model/manifest.json").exists()
    why = "swept/records/0001/: sets export.max_loss, model.name, promotion.max_loss, promotion.when_in_doubt, training"
    assert ended.stdout.count(why) == 1, ended.stdout
    listed = CliRunner().invoke(sweep_command, [str(tmp_path / "swept")])
    assert listed.output.splitlines()[-1] == "2 trials: 2 complete", listed.output


def test_a_store_that_holds_no_sweep(tmp_path: Path) -> None:
    ended = CliRunner().invoke(sweep_command, [str(tmp_path)])
    assert ended.exit_code == 1 and "holds no sweep; expected a sweep store" in ended.output
