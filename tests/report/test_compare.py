"""``slipstream compare`` shows what differs between runs, with the interval of paired rows."""

import re
import shutil
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from slipstream.config import RunConfig
from slipstream.pipeline.report.compare import ComparedRun, main, paired_difference
from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.report.run_directory import RunOrigin
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.errors import UserError
from slipstream.shared.models.predict import held_out_rows
from slipstream.shared.settings import as_written, differences
from tests.support.once import shared_place
from tests.support.packages import package
from tests.support.promotions import Models
from tests.support.raw_tables import mixed_table
from tests.support.report_runs import STAGES, results
from tests.support.wording import refuses


def run_of(place: Path, config: RunConfig, model: Path, data: Path) -> Path:
    """A run's directory with a real model and its data in place of the others."""
    settings = as_written(config)
    origin = RunOrigin("run it", "abc", {"data": "d.csv"}, differences(settings, as_written(RunConfig())), settings)
    made = results(place / "made", ["no", "yes"])
    directory = Path(build_report(place.parent / "runs", made, STAGES, settings, origin=origin).directory)
    for name, source in (("model", model), ("prepared", data)):
        shutil.rmtree(directory / name)
        shutil.copytree(source, directory / name)
    return directory


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two runs on the same rows, with other settings and weights."""
    models, place = Models(shared_place(tmp_path_factory) / "models"), tmp_path_factory.mktemp("compared")
    changed = {"training": {"epochs": 3, "clip_norm": None}}
    return [
        run_of(place / name, RunConfig.from_dict(given), models.trained(steps), models.directory / "data")
        for name, given, steps in (("a", {}, 150), ("b", changed, 5))
    ]


def compared(*runs: Path) -> str:
    with redirect_stdout(StringIO()) as told:
        main.main([str(run) for run in runs], standalone_mode=False)
    return told.getvalue()


def right(model: Path, data: PreparedData) -> np.ndarray:
    """Where a model is right on the test rows, by ONNX Runtime alone."""
    records = held_out_rows(data)
    session = onnxruntime.InferenceSession(str(model / "model.onnx"))
    named = {name: np.ascontiguousarray(records[name]) for name in records.dtype.names or ()}
    outputs = session.run(None, {each.name: named[each.name] for each in session.get_inputs()})[0]
    return outputs.argmax(axis=1) == records["target"]


def score_interval(b: int, c: int, n: int, z: float = 1.959964) -> tuple[float, float]:
    """Tango's score interval of (b - c) / n, by trying every difference; the constrained share by its likelihood."""
    found = []
    for difference in np.linspace(-0.999, 0.999, 3997):
        share = np.linspace(max(0.0, -difference) + 1e-9, (1 - difference) / 2 - 1e-9, 4001)
        with np.errstate(divide="ignore"):
            rest = np.maximum(1 - difference - 2 * share, 1e-300)
            likelihood = b * np.log(share + difference) + c * np.log(share) + (n - b - c) * np.log(rest)
        best = share[likelihood.argmax()]
        deviation = np.sqrt(n * (2 * best + difference - difference**2))
        if abs(b - c - n * difference) <= z * deviation:
            found.append(difference)
    return min(found), max(found)


def test_the_interval_is_that_of_paired_rows(runs: list[Path]) -> None:
    first, other = map(ComparedRun.open, runs)
    found = paired_difference(first, other)
    assert not isinstance(found, str) and other.data
    loss, _ = found
    then, now = right(first.model, other.data), right(other.model, other.data)
    b, c, n = int(np.sum(then & ~now)), int(np.sum(now & ~then)), len(then)
    assert b > c > 0 and loss.rows == n and loss.loss == pytest.approx(100 * (b - c) / n)
    assert (loss.low, loss.high) == pytest.approx([100 * limit for limit in score_interval(b, c, n)], abs=0.06)


def test_settings_metrics_times_and_curves_are_shown(runs: list[Path]) -> None:
    said = compared(*runs)
    table, difference, report = re.split(r"\n\n", said.strip())
    rows = {line.split("  ")[0]: line.split()[-2:] for line in table.splitlines()[1:]}
    assert rows["training.epochs"] == ["20", "3"] and rows["training.clip_norm"] == ["1.0", "null"]
    assert rows["train"] == ["31.2", "s"] and "training.seed" not in rows
    assert re.search(r"points of accuracy worse than \S+, -?\d+\.\d\d to \d+\.\d\d with 95 % confidence", difference)
    page = Path(report.split()[-1]).read_text(encoding="utf-8")
    assert page.count("<figure>") == 3 and all(run.name in page for run in runs) and "clip_norm" in page
    assert difference.split(": ", 1)[1] in page


def test_equal_runs_do_not_differ(runs: list[Path]) -> None:
    said = compared(runs[0], runs[0])
    assert "not significant: 0.00" in said and "training." not in said


def test_runs_on_other_rows_are_not_compared_row_by_row(runs: list[Path], tmp_path: Path) -> None:
    mixed_table(tmp_path / "data", "regression")
    model = package(tmp_path / "model", PreparedData.open(tmp_path / "data"), 5)
    other = run_of(tmp_path / "c", RunConfig(), model, tmp_path / "data")
    (line,) = [line for line in compared(runs[0], other).splitlines() if line.startswith(f"{other.name}: ")]
    assert "row by row" in line and runs[0].name in line


@pytest.mark.parametrize("given", [["one"], ["missing", "one"]])
def test_what_is_no_run_is_one_line(given: list[str], runs: list[Path]) -> None:
    with refuses(UserError):
        compared(*(runs[0] if name == "one" else Path(name) for name in given))
