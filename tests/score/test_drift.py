"""Drift: rows like the training's raise no alarm, and a shift of one standard deviation in one column does."""

import json
import shutil
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.files import digest_line
from slipstream.pipeline.export.package.raw_columns import raw_columns
from slipstream.pipeline.export.package.samples import decode_rows
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.report.summary import ScoringSummary
from slipstream.pipeline.score.command import in_words
from slipstream.pipeline.score.model import ServedModel
from slipstream.pipeline.score.predict import PREDICTIONS, BinCounter, measure_drift, table_predictor
from slipstream.pipeline.score.publish import score_data
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import DISTRIBUTIONS, DriftFigures
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.config import DataConfig
from tests.support.proving import first_few
from tests.support.scoring import KEEP, manifest_of, rows
from tests.support.wording import line_with, same_wording

DRAWS = 200
THRESHOLD = 0.2


@dataclass(frozen=True)
class Training:
    """The model of a registry and its training rows, as they are stored."""

    model: ServedModel
    rows: pa.RecordBatch

    def drift(self, chosen: np.ndarray, threshold: float, shifted: str = "") -> DriftFigures:
        """Of a draw of the rows, in which the numbers of one column may be shifted by their standard deviation."""
        rows = self.rows.take(pa.array(chosen))
        if shifted:
            numbers = self.rows.column(shifted).to_numpy(zero_copy_only=False)
            moved = rows.column(shifted).to_numpy(zero_copy_only=False) + np.nanstd(numbers)
            rows = rows.set_column(rows.schema.get_field_index(shifted), shifted, pa.array(moved))
        distributions = self.model.distributions
        assert distributions
        counting = BinCounter(distributions, self.model.signature.classes, self.model.transform.missing)
        counting.add(rows, table_predictor(self.model)(rows))
        return measure_drift(distributions, counting.counts, threshold)


@pytest.fixture(scope="module")
def training(served: Registry) -> Training:
    place = Path(served.uri).parent
    model = ServedModel(place / "package")
    columns = raw_columns(model.statistics)
    decoded = decode_rows(columns, PreparedData.open(place / "prepared").split("train"))
    arrays = {
        name: pa.array(decoded[name].tolist() if kind == value_types.TEXT else decoded[name])
        for name, kind in columns.types.items()
    }
    return Training(model, pa.RecordBatch.from_pydict(arrays))


def false_alarms(training: Training, of_each: int, threshold: float) -> float:
    draw = np.random.default_rng(0)
    drawn = [draw.integers(0, training.rows.num_rows, of_each) for _ in range(DRAWS)]
    return float(np.mean([bool(training.drift(chosen, threshold).alarms) for chosen in drawn]))


@pytest.mark.prove
@pytest.mark.parametrize(
    "of_each", [60, pytest.param(300, marks=pytest.mark.prove), pytest.param(1000, marks=pytest.mark.prove)]
)
def test_one_of_twenty_draws_of_the_training_rows_raises_an_alarm_at_most(training: Training, of_each: int) -> None:
    assert false_alarms(training, of_each, THRESHOLD) <= 0.05


@pytest.mark.prove
def test_the_number_of_rows_is_weighed_and_not_the_threshold_alone(training: Training) -> None:
    """With a threshold that few rows are above by chance, most draws would raise an alarm."""
    low = 0.05
    assert false_alarms(training, 60, low) <= 0.05
    draw = np.random.default_rng(1)
    above = [
        any((each.index or 0) > low for each in figures.measured)
        for figures in (training.drift(draw.integers(0, training.rows.num_rows, 60), low) for _ in range(50))
    ]
    assert np.mean(above) > 0.5


@pytest.mark.prove
@pytest.mark.parametrize(("column", "of_each"), first_few(product(["age", "income", "visits", "when"], [200, 1000])))
def test_a_shift_of_one_deviation_in_one_column_is_always_found(training: Training, column: str, of_each: int) -> None:
    draw = np.random.default_rng(2)
    for _ in range(50):
        figures = training.drift(draw.integers(0, training.rows.num_rows, of_each), THRESHOLD, shifted=column)
        assert column in {each.name for each in figures.alarms}


def test_fewer_than_fifty_rows_say_nothing(training: Training) -> None:
    figures = training.drift(np.arange(49), THRESHOLD)
    assert {each.index for each in figures.measured} == {None} and not figures.alarms
    assert figures.why_unknown == "too few rows" and in_words(figures) == "drift unknown"


def test_what_is_published_says_how_the_rows_drifted(served: Registry, tmp_path: Path) -> None:
    frame = rows(2000)
    frame["age"] += 10
    frame.to_csv(tmp_path / "rows.csv", index=False)
    publication, new = score_data(served.uri, str(tmp_path / "rows.csv"), str(tmp_path / "out"), DataConfig(), KEEP)
    table = manifest_of(tmp_path / "out", publication)
    alarms = {each.name for each in table.drift.alarms}
    assert "age" in alarms and not alarms & {"city", "visits", "plan", "when"}
    assert table.drift.measured[0].name == PREDICTIONS
    block = str(ScoringSummary("out", "out/tables/k", publication, new, table))
    assert "Drift       found in" in block and "age " in block and "threshold is" in block
    quiet = replace(table, drift=replace(table.drift, measured=[replace(e, alarm=False) for e in table.drift.measured]))
    assert "none found" in str(ScoringSummary("out", "out/tables/k", publication, new, quiet))


def test_of_an_older_package_drift_is_not_known(served: Registry, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(Path(served.uri).parent / "package", model)
    (model / DISTRIBUTIONS).unlink()
    manifest = json.loads((model / "manifest.json").read_text())
    del manifest["files"][DISTRIBUTIONS]
    (model / "manifest.json").write_text(json.dumps(manifest))
    (model / "manifest.sha256").write_text(digest_line((model / "manifest.json").read_bytes()))
    rows(200).to_csv(tmp_path / "rows.csv", index=False)
    publication, new = score_data(
        "", str(tmp_path / "rows.csv"), str(tmp_path / "out"), DataConfig(), KEEP, package=str(model)
    )
    table = manifest_of(tmp_path / "out", publication)
    assert table.drift.unknown and not table.drift.measured
    same_wording(line_with("Drift", str(ScoringSummary("out", "t", publication, new, table))))
