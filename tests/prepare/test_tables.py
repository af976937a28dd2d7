"""Ordinary tables need only their name and a target; stored values can be computed by hand."""

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.prepare.fit.fit import FEW_CLASSES
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.versions import ROOT
from slipstream.shared.source.config import DataConfig
from tests.support.tables import Prepare, everything, table_text

ADULT = Path(__file__).parents[3] / "shared" / "data"
ADULT_COLUMNS = [
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
]


def roles(data: PreparedData) -> dict[str, str]:
    return {column["name"]: column["role"] for column in data.card["columns"]}


def test_numbers_are_standardised_by_the_training_rows_alone(prepared: Prepare) -> None:
    data = prepared(table_text(900))
    train, test = data.split("train")["numeric"][:, 0], data.split("test")["numeric"][:, 0]
    assert abs(train.mean(dtype=np.float64)) < 1e-6 and abs(train.std(dtype=np.float64) - 1) < 1e-5
    # Standardised by the statistics of other rows, the test rows miss 0 and 1 by sampling error.
    assert 1e-3 < abs(test.mean()) < 0.5
    raw = pd.read_csv(data.artifact.directory.parent / "t.csv")["number"]
    card = next(column for column in data.card["columns"] if column["name"] == "number")
    stored = np.sort(everything(data)["numeric"][:, 0] * card["std"] + card["mean"])
    np.testing.assert_allclose(stored, np.sort(raw), atol=1e-5)


def test_every_row_is_there_once_with_its_own_target(prepared: Prepare) -> None:
    data = prepared(table_text(500))
    records = everything(data)
    assert len(records) == 500 == data.card["rows"]["kept"] == data.card["rows"]["read"]
    mean, std = next((c["mean"], c["std"]) for c in data.card["columns"] if c["name"] == "number")
    number = records["numeric"][:, 0].astype(float) * std + mean
    away = np.abs(number - 5) > 1e-4
    np.testing.assert_array_equal(records["target"][away], (number > 5)[away])
    assert data.signature.classes == ("no", "yes")


def test_codes_follow_frequency_and_rare_unseen_and_missing_have_their_own(prepared: Prepare) -> None:
    draw = np.random.default_rng(1)
    cities = np.array(draw.choice(["a", "b", "c"], 600, p=[0.2, 0.5, 0.3]), object)
    cities[:30] = None
    cities[30] = "once"
    data = prepared(pa.table({"city": cities, "x": draw.normal(size=600), "y": draw.integers(0, 2, 600)}))
    assert data.artifact.read_json("statistics.json")["categorical"][0]["vocabulary"] == ["b", "c", "a"]
    codes = everything(data)["categorical"][:, 0]
    wanted = pd.Series(cities).map({"b": 2, "c": 3, "a": 4, "once": 1}).fillna(0).astype(int)
    assert np.bincount(codes).tolist() == np.bincount(wanted).tolist()
    assert data.signature.cardinalities == (5,)


def test_missing_numbers_become_the_mean_and_are_flagged(prepared: Prepare) -> None:
    draw = np.random.default_rng(2)
    lines = [f"{'?' if i % 5 == 0 else draw.normal():},{i % 2}" for i in range(400)]
    data = prepared("x,y\n" + "\n".join(lines))
    records = everything(data)
    flagged = records["numeric"][:, 1] == 1
    assert flagged.sum() == 80 and (records["numeric"][flagged, 0] == 0).all()
    assert (records["numeric"][~flagged, 0] != 0).all()


def test_a_number_can_mean_missing(prepared: Prepare) -> None:
    text = "x,y\n" + "".join(f"{-999 if i % 10 == 0 else i},{i % 2}\n" for i in range(500))
    data = prepared(text, missing=["-999"])
    assert next(c for c in data.card["columns"] if c["name"] == "x")["missing"] == 50
    assert next(c for c in data.card["columns"] if c["name"] == "x")["min"] > 0


def test_identifiers_constants_and_dropped_columns_are_no_inputs(prepared: Prepare) -> None:
    draw = np.random.default_rng(3)
    frame = pd.DataFrame(
        {
            "customer_id": np.arange(1000, 1300),
            "code": [f"c{n:05d}" for n in draw.permutation(300)],
            "country": "NO",
            "secret": draw.normal(size=300),
            "flag": draw.random(300) > 0.5,
            "x": draw.normal(size=300),
            "y": draw.integers(0, 3, 300),
        }
    )
    data = prepared(pa.Table.from_pandas(frame), drop=["secret"])
    assert roles(data) == {
        "customer_id": "identifier",
        "code": "identifier",
        "country": "constant",
        "secret": "dropped",
        "flag": "numeric",
        "x": "numeric",
        "y": "target",
    }
    assert data.signature.inputs[0].shape == (2,) and len(data.signature.inputs) == 1
    assert sum("is not used" in warning for warning in data.card["warnings"]) == 3


def test_dates_become_seconds_and_their_parts(prepared: Prepare) -> None:
    days = pd.date_range("2024-01-01", periods=400, freq="D")
    text = "when,x,y\n" + "".join(f"{d:%Y-%m-%d},{i % 13},{'ab'[i % 2]}\n" for i, d in enumerate(days))
    data = prepared(text)
    parts = [(c["name"], c["part"]) for c in data.artifact.read_json("statistics.json")["numeric"]]
    assert parts == [("when", ""), ("when", "weekday"), ("when", "month"), ("x", "")]
    column = next(c for c in data.artifact.read_json("statistics.json")["numeric"] if c["part"] == "weekday")
    weekdays = everything(data)["numeric"][:, 1] * column["std"] + column["mean"]
    assert np.bincount(np.rint(weekdays).astype(int)).tolist() == days.weekday.value_counts().sort_index().tolist()


def test_heavy_tails_are_bent_and_stay_in_order(prepared: Prepare) -> None:
    draw = np.random.default_rng(4)
    gains = np.where(draw.random(2000) < 0.9, 0, np.exp(draw.normal(8, 2, 2000)))
    data = prepared(pa.table({"gain": gains, "y": draw.integers(0, 2, 2000)}))
    assert data.artifact.read_json("statistics.json")["numeric"][0]["curve"] == "log"
    stored = everything(data)["numeric"][:, 0]
    assert stored.max() < 12 < (gains.max() - gains.mean()) / gains.std()
    assert len(np.unique(stored)) == len(np.unique(gains))


def test_a_regression_target_keeps_its_units(prepared: Prepare) -> None:
    draw = np.random.default_rng(5)
    price = draw.normal(200_000, 50_000, 700)
    data = prepared(pa.table({"x": draw.normal(size=700), "price": price}), target="price")
    assert data.signature.task == "regression" and data.signature.outputs == 1
    np.testing.assert_array_equal(np.sort(everything(data)["target"]), np.sort(price))
    train = data.split("train")["target"].astype(np.float64)
    assert data.signature.target_mean == pytest.approx(train.mean(), rel=1e-6)
    assert data.signature.target_std == pytest.approx(train.std(), rel=1e-6)


@pytest.mark.parametrize(
    ("values", "task"), [(20, "classification"), (21, "regression"), (0.5, "regression"), (True, "classification")]
)
def test_the_task_of_a_target_is_that_of_the_page(tmp_path: Path, values: float, task: str) -> None:
    numbers = np.arange(420)
    target = numbers % values if values >= 2 else numbers % 2 * values if values < 1 else numbers % 2 == 1
    frame = pd.DataFrame({"x": numbers * 0.37 % 1, "y": target})
    prepare(tmp_path / "out", frame, "y", DataConfig(), {})
    assert PreparedData.open(tmp_path / "out").signature.task == task
    page = " ".join((ROOT / "docs/data.md").read_text(encoding="utf-8").split())
    assert f"A numeric target of at most {FEW_CLASSES} different values, all whole, means classes" in page


def test_any_number_of_processes_gives_the_same_bytes(prepared: Prepare, tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    table = pa.table(
        {"x": draw.normal(size=3000), "c": draw.choice(list("abcd"), 3000), "y": draw.integers(0, 2, 3000)}
    )
    pq.write_table(table, tmp_path / "groups.parquet", row_group_size=500)
    one = prepared(tmp_path / "groups.parquet")
    two = prepared(tmp_path / "groups.parquet", workers=2)
    assert one.artifact.fingerprint == two.artifact.fingerprint
    assert pq.ParquetFile(tmp_path / "groups.parquet").num_row_groups == 6


def test_the_digits_are_images(tmp_path: Path) -> None:
    prepare(tmp_path / "p", "", "", DataConfig(), {})
    data = PreparedData.open(tmp_path / "p")
    records = everything(data)
    assert records["image"].shape == (1797, 1, 8, 8) and records["image"].max() == 16
    assert data.card["rows"]["kept"] == 1797 and data.signature.classes == tuple("0123456789")
    from sklearn.datasets import load_digits

    digits = load_digits()
    pairs = {(image.astype(np.uint8).tobytes(), int(y)) for image, y in zip(digits.images, digits.target, strict=True)}
    assert {(record["image"].tobytes(), int(record["target"])) for record in records} == pairs
    train = data.split("train")["image"].astype(float)
    assert data.signature.image_mean == (pytest.approx(train.mean()),)


@pytest.mark.skipif(not ADULT.exists(), reason="the census data is missing next to the repository")
def test_the_census_table_as_published() -> None:
    import tempfile

    settings = DataConfig(header=False, columns=ADULT_COLUMNS)
    for file, rows in (("adult-train.csv", 32_561), ("adult-test.csv", 16_281)):
        with tempfile.TemporaryDirectory() as directory:
            prepare(Path(directory) / "p", str(ADULT / file), "income", settings, {})
            data = PreparedData.open(Path(directory) / "p")
            assert data.card["rows"]["read"] == data.card["rows"]["kept"] == rows
            assert [spec.shape for spec in data.signature.inputs] == [(6,), (8,)]
            missing = {c["name"]: c["missing"] for c in data.card["columns"] if c["missing"]}
            assert set(missing) == {"workclass", "occupation", "native_country"}
            assert len(data.signature.classes) == 2
