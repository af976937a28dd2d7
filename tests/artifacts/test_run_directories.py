"""A run's directory is accepted wherever a model, prepared data or telemetry is asked for."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from slipstream.config import RunConfig
from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.train.command import local_prepared_data
from slipstream.shared.artifacts.format import Artifact, DamagedArtifact
from slipstream.shared.artifacts.results.training import read_history
from slipstream.shared.settings import to_dict
from slipstream.shared.telemetry.view.command import main
from tasks.inputs import open_given
from tests.support.report_runs import STAGES, results


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    made = results(place / "in", ["no", "yes"])
    return Path(build_report(place / "runs", made, STAGES, to_dict(RunConfig())).directory)


def test_artifacts_are_found_in_a_run(run: Path) -> None:
    for kind, name in (("prepare", "prepared"), ("train", "trained"), ("export", "model")):
        found = Artifact.open(run, kind)
        assert found.directory == run / name and found == Artifact.open(run / name, kind)
    assert read_history(run) == read_history(run / "trained")
    with pytest.raises(DamagedArtifact):
        Artifact.open(run, "evaluate")
    with local_prepared_data(str(run)) as directory:
        assert directory == run / "prepared"


def test_options_of_workflows_take_a_run(run: Path) -> None:
    assert open_given("--model", str(run), "train", "").path == str(run / "trained")
    assert open_given("--data", str(run), "prepare", "").path == str(run / "prepared")


def test_telemetry_of_a_run_is_its_diagnosis(run: Path) -> None:
    shown = CliRunner().invoke(main, [str(run)])
    assert shown.exit_code == 0 and shown.output.startswith(f"{run}: ") and "report.html" in shown.output
