"""``slipstream runs`` lists runs."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.report import compare
from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.report.run_directory import RunOrigin, name_of
from slipstream.pipeline.report.runs import main
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.errors import UserError
from slipstream.shared.settings import differences, to_dict
from tests.support.report_runs import STAGES, results
from tests.support.wording import refuses


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("place")
    for number, config in enumerate((RunConfig(), RunConfig(training=TrainingConfig(epochs=3, learning_rate=0.004)))):
        settings = to_dict(config)
        changed = differences(settings, to_dict(RunConfig()))
        origin = RunOrigin("pyflyte run it", "abc", {"data": "d.csv"}, changed, settings)
        build_report(place / "runs", results(place / str(number), ["no", "yes"]), STAGES, settings, origin=origin)
    (place / "runs/2020-01-01T00-00-00").mkdir()  # such as a data card
    return place / "runs"


def listed(directory: Path) -> list[str]:
    with redirect_stdout(StringIO()) as told:
        main.main([str(directory)], standalone_mode=False)
    return told.getvalue().splitlines()


def test_each_run_has_its_metric_and_the_settings_that_were_changed(runs: Path) -> None:
    head, *rows = listed(runs)
    assert head.split() == ["run", "metric", "time", "cost", "made", "promoted", "settings"]
    assert len(rows) == 2 and all("accuracy" in row and "train, evaluate" in row for row in rows)
    assert sorted("training.epochs=3, training.learning_rate=0.004" in row for row in rows) == [False, True]


def test_a_summary_tells_what_made_its_run(runs: Path) -> None:
    made = [json.loads(path.read_text())["run"] for path in sorted(runs.glob("*/summary.json"))]
    assert [sorted(each) for each in made] == [["changed", "command", "commit", "data", "inputs", "settings"]] * 2
    assert {each["settings"]["training"]["epochs"] for each in made} == {3, 20}
    assert all(len(each["data"]) > 30 for each in made), "the data's fingerprint"


def test_a_summary_of_before_is_listed(runs: Path, tmp_path: Path) -> None:
    content = json.loads(next(runs.glob("*/summary.json")).read_text())
    del content["run"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old/summary.json").write_text(json.dumps(content))
    assert listed(tmp_path)[1].split()[-1] == "-"


@pytest.mark.parametrize("content", ["{", '{"evaluation": {}}', '{"evaluation": 3, "stages": []}', None])
def test_a_summary_that_cannot_be_read_hides_no_other_run(runs: Path, tmp_path: Path, content: str | None) -> None:
    good = next(runs.glob("*/summary.json"))
    for name in ("first", "third"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "summary.json").write_bytes(good.read_bytes())
    if content is None:  # a later release's
        content = json.dumps(json.loads(good.read_text()) | {"stages": {"train": 1.0}})
    (tmp_path / "second").mkdir()
    (tmp_path / "second/summary.json").write_text(content)
    _, first, second, third, _, note = listed(tmp_path)
    assert second.split() == ["second", *["—"] * 6]
    assert first.split()[0] == "first" and "accuracy" in first and third.split()[0] == "third"
    assert "second/summary.json: " in note
    with refuses(UserError):
        compare.main([str(tmp_path / "first"), str(tmp_path / "second")], standalone_mode=False)


def test_a_directory_without_runs_is_one_line(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing"):
        with refuses(UserError):
            listed(path)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("", []),
        ("s3://bucket/Churn Data.parquet", ["churn", "data"]),
        ("/data/part-*.csv", ["part"]),
        ("x" * 99, ["x" * 24]),
        ("handwritten digits (scikit-learn)", ["handwritten", "digits"]),
        ("dir/../", []),
    ],
)
def test_a_directory_is_named_by_its_data(source: str, words: list[str]) -> None:
    assert name_of(source) == words
