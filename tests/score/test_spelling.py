"""A category has one code however a file spells it: in training, in scoring and in the packaged model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.raw_columns import CategoryInput, RawColumns, raw_columns
from slipstream.pipeline.export.package.raw_model import encoding_model
from slipstream.pipeline.export.package.samples import as_spelled_by, undecided_rows
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.table_rows import RequestedColumns, typed_rows
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.columns.number_formats import NumberFormat
from slipstream.shared.source.columns.spelling import respell_counts, rule_of
from slipstream.shared.source.columns.transform import CategoricalColumn
from slipstream.shared.source.config import DataConfig
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.scoring import scored

ROWS = 400
CATEGORIES = ("grade", "size", "member")
KEEP = ScoringConfig(keep=["row"])


#: Article numbers, which Arrow writes with an exponent if they are floats, and shoe sizes.
CODES, SIZES = np.array([4006381333931, 5449000000996, 7622210449283, 8711000000012]), np.array([41, 41.5, 42, 42.5])


def frame() -> pd.DataFrame:
    draw = np.random.default_rng(4)
    grade, member = draw.integers(0, 4, ROWS), draw.random(ROWS) < 0.5
    target = np.where((grade + member + draw.normal(0, 0.4, ROWS)) > 2, "yes", "no")
    columns = {"grade": CODES[grade], "size": SIZES[draw.permutation(grade)], "member": member}
    return pd.DataFrame({**columns, "a": draw.normal(size=ROWS).round(4), "y": target})


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Registry:
    """A model of a Parquet file of numbers and booleans, declared as categories."""
    directory = tmp_path_factory.mktemp("spelled")
    frame().to_parquet(directory / "t.parquet", index=False)
    config = DataConfig.from_dict({"types": dict.fromkeys(CATEGORIES, "category")})
    prepare(directory / "prepared", str(directory / "t.parquet"), "y", config, {}, workers=1)
    data = PreparedData.open(directory / "prepared")
    registry = Registry(str(directory / "registry"))
    put(package(directory / "package", data), registry, data)
    return registry


SPELLED = {
    "integers.csv": lambda whole: whole,
    "floats.csv": lambda whole: whole.assign(grade=whole["grade"].map("{:.1f}".format)),
    "decimals.csv": lambda whole: whole.assign(
        **{name: whole[name].map("{:.2f}".format) for name in ("grade", "size")}
    ),
    "upper.csv": lambda whole: whole.assign(member=whole["member"].map({True: "TRUE", False: "FALSE"})),
    "floats.parquet": lambda whole: whole.assign(grade=whole["grade"].astype(float)),
    "texts.parquet": lambda whole: whole.astype(dict.fromkeys(CATEGORIES, str)),
    "values.jsonl": lambda whole: whole,
}


@pytest.mark.parametrize("file", SPELLED)
def test_every_spelling_of_a_category_gets_the_same_scores(registry: Registry, tmp_path: Path, file: str) -> None:
    """One missing value, which turns integers into floats, changes its own row alone."""
    whole = frame().drop(columns="y").assign(row=[f"row {number}" for number in range(ROWS)])
    path = tmp_path / "in" / file
    path.parent.mkdir()
    shown = SPELLED[file](whole)
    if path.suffix == ".csv":
        shown.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        shown.to_parquet(path, index=False)
    else:
        shown.to_json(path, orient="records", lines=True, double_precision=15)
    found = scored(registry, path, tmp_path / "out", KEEP)["probability_yes"].to_numpy()
    session = onnxruntime.InferenceSession(Path(registry.uri).parent / "package" / "model.raw.onnx")
    sizes = whole["size"].map("{:g}".format)
    texts = {
        "grade": whole["grade"].astype(str),
        "size": sizes,
        "member": whole["member"].map({True: "true", False: "false"}),
    }
    feed = {
        given.name: texts.get(given.name, whole[given.name]).to_numpy(object if given.name in texts else float)[:, None]
        for given in session.get_inputs()
    }
    expected = session.run(None, feed)[1][:, 1]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert np.ptp(expected) > 0.2
    # The packaged model accepts the spellings of pandas and Python, too.
    feed |= {"grade": np.char.add(feed["grade"].astype(str), ".0").astype(object)}
    feed |= {"size": whole[["size"]].astype(str).to_numpy(object)}
    feed |= {"member": np.char.title(feed["member"].astype(str)).astype(object)}
    np.testing.assert_allclose(session.run(None, feed)[1][:, 1], expected, atol=1e-7)


def test_vocabularies_of_earlier_versions_keep_every_spelling_apart() -> None:
    earlier = CategoricalColumn("grade", ("1.0", "1", "cafe\u0301"))
    texts = pa.array(["1.0", "1", "1.00", "cafe\u0301", "caf\u00e9", None])
    assert earlier.encode(texts, []).tolist() == [2, 3, 1, 4, 1, 0]
    now = CategoricalColumn("grade", ("1", "2"), "whole")
    assert now.encode(texts, []).tolist() == [2, 2, 2, 1, 1, 0]


@pytest.mark.parametrize(
    ("vocabulary", "rule"),
    [
        (("4006381333931", "12"), "whole"),
        (("41.5", "4006381333931", "42", "0.0000001"), "decimal"),
        (("A12", "4006381333931"), "text"),
        (("4.006381333931e+12", "A12"), "text"),  # of releases that wrote large floats with an exponent
        (("4.006381333931e+12", "4006381333931"), "text"),
        (("4006381333931", "1.0"), ""),
    ],
)
def test_the_packaged_model_encodes_numbers_as_training_does(vocabulary: tuple[str, ...], rule: str) -> None:
    values = [41.5, 42.0, 4006381333931.0, 12.0, 1e-7, 1e22]
    texts = [*vocabulary, *map(str, values), *pa.array(values).cast(pa.string()).to_pylist(), "42.00", "other", ""]
    category = CategoricalColumn("c", vocabulary, rule)
    assert category.encode(pa.array(vocabulary), [""]).tolist() == [2 + place for place in range(len(vocabulary))]
    raw = RawColumns({"c": "text"}, ("",), (), (CategoryInput("c", vocabulary, rule),))
    session = onnxruntime.InferenceSession(encoding_model(raw, 20).SerializeToString())
    (codes,) = session.run(None, {"c": np.array(texts, object)[:, None]})
    assert codes[:, 0].tolist() == category.encode(pa.array(texts), [""]).tolist()


def test_a_model_of_an_earlier_release_scores_the_floats_that_it_knows() -> None:
    vocabulary = ("4.006381333931e+12", "5.449000000996e+12", "caf\u00e9")
    category = CategoricalColumn("c", vocabulary, "text")
    wanted = RequestedColumns({"c": "text"}, {}, NumberFormat(missing=("",)), {"c": category.rule})
    stored = pa.RecordBatch.from_pydict({"c": pa.array([5449000000996.0, None, 4006381333931.0])})
    rows = typed_rows(stored, np.arange(3), "t.parquet", wanted).columns
    assert rows.column("c").to_pylist() == [vocabulary[1], None, vocabulary[0]]
    assert category.encode(rows.column("c"), [""]).tolist() == [3, 0, 2]
    assert category.encode(pa.array(["cafe\u0301"]), [""]).tolist() == [4]


@pytest.mark.parametrize("classes", [("41.50", "42.00"), ("1.0", "2.0"), ("4e+12", "41.5"), ("41.5", "42"), ("a", "1")])
def test_classes_of_an_earlier_release_are_spelled_as_before(classes: tuple[str, ...]) -> None:
    rule = rule_of(classes)
    assert rule and respell_counts(dict.fromkeys(classes, 1), rule) == dict.fromkeys(classes, 1)
    assert CategoricalColumn("y", classes, rule).encode(pa.array(classes), []).tolist() == [2, 3]


def test_a_promotion_shows_the_earlier_model_its_own_spelling() -> None:
    kinds = {"documents": [], "missing": [""], "numeric": [], "types": {"grade": "text"}}
    new = raw_columns({**kinds, "categorical": [{"name": "grade", "vocabulary": ["1", "2"], "spelling": "whole"}]})
    old = raw_columns({**kinds, "categorical": [{"name": "grade", "vocabulary": ["2.0", "1.0"]}]})
    values = {"grade": np.array(["1", "2", "", "2"], object)}
    assert as_spelled_by(old, new, values)["grade"].tolist() == ["1.0", "2.0", "", "2.0"]
    records = np.zeros(2, [("categorical", np.int32, (1,))])
    records["categorical"] = 1  # outside the new vocabulary
    assert not undecided_rows(new, old, records).any()
    wider = raw_columns({**kinds, "categorical": [{"name": "grade", "vocabulary": ["2.0", "1.0", "3.0"]}]})
    assert undecided_rows(new, wider, records).all()
