"""``slipstream.load(…).predict(frame)`` gives the scores of the same rows in a file, without torch."""

import json
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import slipstream
from slipstream.pipeline.export.check import check_package
from slipstream.pipeline.export.package.files import digest_line
from slipstream.pipeline.export.package.triton import write_repository
from slipstream.pipeline.promote.store import Registry
from slipstream.shared.artifacts.results.scoring import DISTRIBUTIONS
from slipstream.shared.errors import UserError
from slipstream.shared.storage import s3
from tests.support import REPOSITORY
from tests.support.faulty_s3 import FaultyS3
from tests.support.raw_tables import mixed_frame
from tests.support.scoring import by_hand, rows, scored
from tests.support.tables import vouch_for
from tests.support.wording import refuses, same_wording

NUMBER = 500
Change = Callable[[pd.DataFrame], pd.DataFrame]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return rows(NUMBER)


@pytest.fixture(scope="module")
def expected(served: Registry, frame: pd.DataFrame, tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """The scored table of the frame, written to Parquet."""
    return scores_of(served, frame, tmp_path_factory.mktemp("expected"))


def scores_of(registry: Registry, frame: pd.DataFrame, place: Path) -> pd.DataFrame:
    frame.to_parquet(place / "rows.parquet", index=False)
    table = scored(registry, place / "rows.parquet", place / "out").to_pandas()
    return table.drop(columns=["id", "model_version"])


def with_when(kind: Any) -> Change:
    return lambda frame: frame.assign(when=frame["when"].astype(kind))


#: Frames with the same values in the types of other versions and readers.
FRAMES: dict[str, Change] = {
    "pandas 3": lambda frame: frame,
    "pandas 2": lambda frame: frame.astype(dict.fromkeys(["city", "plan"], object)),
    "arrow": lambda frame: frame.convert_dtypes(dtype_backend="pyarrow"),
    "categories": lambda frame: frame.astype({"city": "category"}),
    **{unit: with_when(f"datetime64[{unit}, UTC]") for unit in ("s", "ms", "us", "ns")},
    "no zone": lambda frame: frame.assign(when=frame["when"].dt.tz_localize(None)),
    "another zone": lambda frame: frame.assign(when=frame["when"].dt.tz_convert("Asia/Kolkata")),
    "text": lambda frame: frame.assign(when=frame["when"].map(pd.Timestamp.isoformat)),
    "Python": lambda frame: frame.assign(when=pd.Series([*frame["when"].dt.to_pydatetime()], dtype=object)),
    "numbers": lambda frame: frame.astype({"visits": float, "member": int}),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_predictions_are_the_scores(served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, kind: str) -> None:
    changed = FRAMES[kind](frame)
    assert changed.dtypes.equals(frame.dtypes) == (kind in ("pandas 3", "us"))
    found = slipstream.load(served.uri).predict(changed)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)
    assert set(found["label"]) == {"no", "yes"}


@pytest.mark.parametrize("fixture", ["served", "served_before"])
def test_predictions_are_those_of_the_raw_model(
    fixture: str, frame: pd.DataFrame, request: pytest.FixtureRequest
) -> None:
    registry = request.getfixturevalue(fixture)
    found = slipstream.load(registry.uri).predict(frame)
    assert np.abs(found[["probability_no", "probability_yes"]].to_numpy() - by_hand(registry, frame)).max() < 1e-5


def test_earlier_packages_keep_their_inputs(served: Registry, served_before: Registry, tmp_path: Path) -> None:
    """Also for Triton, and their samples are checked as before."""
    dtypes = {}
    for registry, dtype in ((served, "TYPE_STRING"), (served_before, "TYPE_FP64")):
        package = Path(registry.uri).parent / "package"
        check_package(package)
        raw = json.loads((package / "signature.json").read_text())["raw"]["inputs"]
        dtypes[dtype] = {given["name"]: given["dtype"] for given in raw}["when"]
        (_, config) = (path / "config.pbtxt" for path in write_repository(package, tmp_path / dtype))
        assert f'name: "when"\n  data_type: {dtype}' in config.read_text()
    assert dtypes == {"TYPE_STRING": "string", "TYPE_FP64": "float64"}


@pytest.mark.parametrize("fixture", ["regression", "without_marks", "served_before"])
def test_other_models_predict_their_scores(
    fixture: str, frame: pd.DataFrame, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    registry = request.getfixturevalue(fixture)
    found = slipstream.load(registry.uri).predict(frame)
    assert list(found) == (["value"] if fixture == "regression" else ["label", "probability_no", "probability_yes"])
    pd.testing.assert_frame_equal(found, scores_of(registry, frame, tmp_path), check_exact=True)


def as_exported_before(package: Path) -> None:
    """Remove the ranges, which versions before did not write, from a package."""
    content = json.loads((package / DISTRIBUTIONS).read_bytes())
    assert content.pop("ranges")
    vouch_for(package, DISTRIBUTIONS, json.dumps(content).encode())
    (package / "manifest.sha256").write_text(digest_line((package / "manifest.json").read_bytes()))


def test_runs_packages_and_older_packages_are_loaded(
    served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    copied = run / "model"
    subprocess.run(["cp", "-r", Path(served.uri).parent / "package", copied], check=True)
    versions = {slipstream.load(place).version for place in (served.uri, run, copied, f"{run}/")}
    promoted = served.promoted()
    assert promoted and versions == {promoted.version}
    as_exported_before(copied)
    capfd.readouterr()
    older = slipstream.load(run)
    assert older.version not in versions
    pd.testing.assert_frame_equal(older.predict(frame.assign(age=1e6)), older.predict(frame.assign(age=2e6)), rtol=1)
    assert not capfd.readouterr().err, "the range is unknown"
    pd.testing.assert_frame_equal(older.predict(frame), expected, check_exact=True)


@pytest.mark.prove
def test_a_store_is_read(
    served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path, store: FaultyS3
) -> None:
    root = Path(served.uri)
    for path in filter(Path.is_file, root.rglob("*")):
        key = f"{tmp_path.name}/{path.relative_to(root)}"
        s3.client().put_object(Bucket="bucket", Key=key, Body=path.read_bytes())
    found = slipstream.load(f"s3://bucket/{tmp_path.name}").predict(frame)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


WITHOUT_TORCH = """
import importlib.abc, sys

class Refusing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "flytekit"):
            raise ImportError(f"{name} is not installed here")

sys.meta_path.insert(0, Refusing())
import pandas, slipstream
slipstream.load(sys.argv[1]).predict(pandas.read_parquet(sys.argv[2])).to_parquet(sys.argv[3])
"""


def test_torch_is_not_needed(served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path) -> None:
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    places = [served.uri, str(tmp_path / "rows.parquet"), str(tmp_path / "found.parquet")]
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *places], check=True, cwd=REPOSITORY)
    pd.testing.assert_frame_equal(pd.read_parquet(places[-1]), expected, check_exact=True)


def test_the_example_predicts(served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, tmp_path: Path) -> None:
    frame.head(3).to_csv(tmp_path / "rows.csv", index=False)
    command = [sys.executable, "examples/predict.py", served.uri, str(tmp_path / "rows.csv")]
    found = subprocess.run(command, check=True, cwd=REPOSITORY, capture_output=True, text=True)
    assert found.stdout.split()[:3] == list(expected)
    assert [line.split()[1] for line in found.stdout.splitlines()[1:]] == expected["label"].tolist()[:3]


def said_by(call: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> list[str]:
    capfd.readouterr()
    call()
    return capfd.readouterr().err.splitlines()


def test_values_outside_the_training_rows_are_counted(
    served: Registry, frame: pd.DataFrame, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = slipstream.load(served.uri)
    training = mixed_frame(1500, "classification")
    inside = frame.assign(
        **{name: frame[name].clip(*training[name].quantile([0.05, 0.95])) for name in ("age", "income")}
    )
    assert said_by(lambda: model.predict(inside), capfd) == []
    # Seconds taken for microseconds, as by astype("int64") / 1e9 of a column in microseconds.
    wrong = inside.assign(when=pd.to_datetime(inside["when"].astype("int64") / 1e9, unit="s", utc=True))
    wrong.loc[[3, 5], "city"] = "Olso"
    found: list[pd.DataFrame] = []
    (line,) = said_by(lambda: found.append(model.predict(wrong)), capfd)
    assert "'when' in 500 (2021-0" in line and "'city' in 2 (" in line
    same_wording(line)
    pd.testing.assert_frame_equal(found[0], scores_of(served, wrong, tmp_path), check_exact=True)


def test_rows_that_cannot_be_scored_are_missing(
    served: Registry, frame: pd.DataFrame, expected: pd.DataFrame, capfd: pytest.CaptureFixture[str]
) -> None:
    model = slipstream.load(served.uri)
    named = frame.set_index("id").astype({"visits": str, "income": float})
    named.iloc[7, named.columns.get_loc("visits")] = "many"
    named.iloc[2, named.columns.get_loc("income")] = 1e39
    found: list[pd.DataFrame] = []
    lines = said_by(lambda: found.append(model.predict(named)), capfd)
    same_wording(lines[-1])
    assert found[0].index.equals(named.index)
    assert np.flatnonzero(found[0].isna().all(axis=1)).tolist() == [2, 7]
    rest = [row for row in range(NUMBER) if row not in (2, 7)]
    pd.testing.assert_frame_equal(
        found[0].iloc[rest].reset_index(drop=True), expected.iloc[rest].reset_index(drop=True)
    )
    assert model.predict(frame.head(0)).shape == (0, 3)
    assert model.predict(named.assign(income=np.inf)).isna().all(axis=None)


@pytest.mark.parametrize("odd", ["9" * 23, "9" * 50, "Infinity", "many"])
def test_a_csv_read_by_pandas_is_scored_as_the_file(served: Registry, tmp_path: Path, odd: str) -> None:
    table = rows(40).astype({"visits": str, "plan": str})
    table.loc[3, "visits"], table.loc[5, "plan"] = odd, "9" * 23
    path = tmp_path / "in" / "t.csv"
    path.parent.mkdir()
    table.rename(columns=" {} ".format).to_csv(path, index=False)
    expected = scored(served, path, tmp_path / "out", quarantine_limit=1.0).to_pandas().set_index("id")
    found = slipstream.load(served.uri).predict(pd.read_csv(path)).set_axis(table["id"])
    assert found.loc["row 3"].isna().all() == (odd != "9" * 23)
    pd.testing.assert_frame_equal(found.dropna(), expected[list(found)], check_exact=True)


def test_values_of_several_python_types_are_those_of_a_csv(served: Registry, frame: pd.DataFrame) -> None:
    model, few = slipstream.load(served.uri), frame.head(4)
    whole = few.assign(visits=[1.0, 2.0, 3.0, np.nan], city=["7", "8", "x", None])
    expected = model.predict(whole)
    for visits in ([1, "2", Decimal(3), None], [Decimal(1), 2.0, np.int64(3), Decimal("NaN")]):
        changed = whole.assign(
            visits=pd.Series(visits, dtype=object), city=pd.Series([7, "8", "x", None], dtype=object)
        )
        pd.testing.assert_frame_equal(model.predict(changed), expected, check_exact=True)
    changed = whole.assign(visits=[Decimal(1), Decimal("Infinity"), Decimal(3), None])
    pd.testing.assert_frame_equal(model.predict(changed).drop(index=1), expected.drop(index=1), check_exact=True)


def test_what_cannot_be_predicted_is_one_line(
    served: Registry, of_images: Registry, frame: pd.DataFrame, tmp_path: Path
) -> None:
    model = slipstream.load(served.uri)
    wrong: list[Any] = [
        frame.drop(columns="age"),
        frame.to_dict(),
        pd.concat([frame, frame[["age"]]], axis=1),
        frame.assign(visits=pd.Timedelta("1s")),
        frame.assign(age=[b"x", *[1.0] * (NUMBER - 1)]),
        frame.assign(age=frame["when"]),
        frame.assign(age=1j),
        frame.set_axis(pd.MultiIndex.from_product([frame.columns, [""]]), axis=1),
    ]
    for each in wrong:
        with refuses(UserError):
            model.predict(each)
    for place in (of_images.uri, tmp_path / "nowhere", tmp_path):
        with refuses(UserError):
            slipstream.load(place)
