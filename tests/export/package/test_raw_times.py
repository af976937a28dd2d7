"""Times as text in a raw model, against the preparation's parser and against pandas."""

import random
from collections.abc import Iterator
from datetime import timedelta, timezone

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pytest

from slipstream.pipeline.export.package.raw_model import encoding_model
from slipstream.pipeline.export.package.samples import TIME_RANGE, iso_texts
from slipstream.shared.source.columns.times import parse_iso
from slipstream.shared.source.columns.transform import NumericColumn, Transform
from slipstream.shared.source.columns.value_types import as_numbers
from tests.support.raw_tables import columns_of, encoded

#: Two columns, whose one input is each time's fraction of the largest, and whose indicator is 1 where it is missing.
NAMES = "a", "b"
YEARS = (0, 1, 1600, 1900, 1969, 2000, 2023, 2024, 2100, 9999)


@pytest.fixture(scope="module")
def session() -> onnxruntime.InferenceSession:
    numbers = tuple(NumericColumn(name, 0.0, 1.0, part="hour", indicator=True) for name in NAMES)
    columns = columns_of(Transform("y", "regression", dict.fromkeys(NAMES, "time"), [], numeric=numbers))
    model = encoding_model(columns, 20)
    # The parsed seconds themselves are tested: single precision holds no time.
    seconds = next(node.output[0] for node in model.graph.node if node.op_type == "Slice")
    model.graph.output.append(onnx_value(seconds))
    return onnxruntime.InferenceSession(model.SerializeToString())


def onnx_value(name: str) -> object:
    import onnx

    return onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, ["batch", 2])


def parsed(session: onnxruntime.InferenceSession, texts: list[str]) -> np.ndarray:
    """Seconds since 1970 of every text, NaN where it is missing; in both columns the same."""
    column = np.array(texts, object).reshape(-1, 1)
    encoded, seconds = session.run(None, dict.fromkeys(NAMES, column))
    np.testing.assert_array_equal(seconds[:, 0], seconds[:, 1])
    np.testing.assert_array_equal(encoded[:, 2], np.isnan(seconds[:, 0]))
    return seconds[:, 0]


def drawn_texts(number: int) -> Iterator[str]:
    """Texts with and without errors in every part; about a third are times."""
    draw = random.Random(0)
    for _ in range(number):
        year = f"{draw.choice([*YEARS, draw.randint(0, 9999)]):04d}"
        month, day = draw.randint(0, 13), draw.randint(0, 32)
        usual = f"{year}-{month:02d}-{day:02d}"
        others = [f"{year}-{month}-{day}", f"{year}/{month}/{day}", f"{year}.{month:02d}.{day}", year]
        others += [f"{year}{month:02d}{day:02d}", f"{year}-{month:02d}", f"-{usual}", f"{day}/{month}/{year}"]
        date = draw.choice([usual] * len(others) + others)
        hour, minute, second = draw.randint(0, 25), draw.randint(0, 61), draw.randint(0, 61)
        clocks = [f"{hour:02d}", f"{hour:02d}:{minute:02d}", f"{hour}:{minute:02d}", f"{hour:02d}{minute:02d}"]
        clocks += [f"{hour:02d}{minute:02d}{second:02d}", *[f"{hour:02d}:{minute:02d}:{second:02d}"] * 3]
        fraction = draw.choice(["", "", f".{draw.randint(0, 10**6):06d}", ",5", f".{draw.randint(0, 10**9)}", "."])
        zone = draw.choice(["", "Z", "+02:00", "-03:30", "+0530", "-11", "UTC", " UTC", " +01:00", "+24:00", "z"])
        mark = draw.choice(["T", "T", " ", "t"])
        yield date if draw.random() < 0.3 else date + mark + draw.choice(clocks) + fraction + zone


def test_texts_have_the_times_of_the_preparation(session: onnxruntime.InferenceSession) -> None:
    texts = list(drawn_texts(2000))
    expected = np.concatenate([as_numbers(parse_iso(pa.array([text]))) for text in texts])
    assert 400 < np.isfinite(expected).sum() < 1600
    wrong = [text for text, ours, its in zip(texts, parsed(session, texts), expected, strict=True) if ours != its]
    assert [text for text in wrong if not np.isnan(parsed(session, [text])[0])] == []
    np.testing.assert_array_equal(parsed(session, texts), expected)


@pytest.mark.parametrize("form", ["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M:%S.%f", "%Y-%m-%dT%H:%M:%S.%fZ"])
@pytest.mark.parametrize("zone", [None, timezone(timedelta(hours=5, minutes=30)), timezone(-timedelta(hours=3))])
def test_texts_have_the_times_of_pandas(
    session: onnxruntime.InferenceSession, form: str, zone: timezone | None
) -> None:
    if zone:
        form = f"{form.removesuffix('Z')}%z" if "%H" in form else form
    seconds = np.random.default_rng(0).integers(-(10**10), 2 * 10**11, 200) * 1_000_000 + 123_457
    times = pd.Series(pd.to_datetime(seconds, unit="us", utc=True))
    texts = (times.dt.tz_convert(zone) if zone else times).dt.strftime(form)
    read = pd.to_datetime(texts.astype(object), utc=True, format="ISO8601").dt.as_unit("us").astype("int64") / 1e6
    np.testing.assert_array_equal(parsed(session, texts.tolist()), read)


def test_a_text_that_is_no_date_counts_as_missing(session: onnxruntime.InferenceSession) -> None:
    none = ["", "NA", "now", "2023-02-29", "1900-02-29", "-2024-01-01", "2024-01-01T24:00", "31.12.2024", "2024-13-01"]
    assert np.isnan(parsed(session, none)).all()
    assert parsed(session, [*none, "2024-02-29"])[-1] == pd.Timestamp("2024-02-29").timestamp()
    assert len(parsed(session, [])) == 0


@pytest.mark.parametrize("kind", ["time", "day-first date"])
def test_marks_of_missing_are_those_of_the_preparation(kind: str) -> None:
    marks = ("", "NA", "9999-12-31", "1900-01-01 00:00", "0000-01-01", "9999", "20991231", "5/3/2024")
    numbers = tuple(NumericColumn(name, 0.0, 1.0, indicator=True) for name in NAMES)
    transform = Transform("y", "regression", {"a": kind, "b": "number"}, list(marks), numeric=numbers)
    model = onnxruntime.InferenceSession(encoding_model(columns_of(transform), 20).SerializeToString())
    dates = ["9999-12-31", "9999-12-31T00:00:00Z", "0000-01-01", "9999-12-31T02:00+02:00", "9999-12-30", "1900-01-01"]
    dates += ["9999", "9998", "20991231", "2099-12-31", "NA", "", "2024-03-05", "2024-05-03", "2023-03-01T10:00"]
    typed = [9999.0, 20991231.0, -999.0, 0.0, np.nan]
    for text, number in zip(dates, typed * 3, strict=True):
        rows = pa.RecordBatch.from_pydict({"a": [text], "b": pa.array([number], pa.float64())})
        found = model.run(None, {"a": np.array([[text]], object), "b": np.array([[number]])})[0]
        np.testing.assert_array_equal(found, encoded(transform, rows)["numeric"], err_msg=text)


def test_samples_write_every_time_that_iso_8601_can(session: onnxruntime.InferenceSession) -> None:
    seconds = np.array([*TIME_RANGE, 0.0, -0.000001, 1.7e9 + 0.123457, np.nan])
    np.testing.assert_array_equal(parsed(session, iso_texts(seconds).tolist()), seconds)
    later = iso_texts(np.array([1e300, -1e300])).tolist()
    np.testing.assert_array_equal(parsed(session, later), TIME_RANGE[::-1])
