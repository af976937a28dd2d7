"""The raw model against Transform: on generated columns and values, tensor by tensor, and with a trained model."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.pipeline.export.convert import to_onnx
from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
from slipstream.pipeline.export.package.raw_model import encoding_model, raw_model
from slipstream.pipeline.export.package.raw_times import input_dtype
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.columns import value_types
from slipstream.shared.source.columns.transform import CategoricalColumn, NumericColumn, Transform
from tests.support.raw_tables import ARROW, as_raw, columns_of, encoded, mixed_table
from tests.support.toys import trained_on
from tests.support.wording import same_wording

#: The last opset with times in seconds, also of years that no ISO 8601 writes.
ANY_TIME = 19
MARKS = ["", "?", "NA"]
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6).map(str.strip)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
OFFSETS = st.sampled_from([1e6, 1.7e9, -1e12])
#: 1900-01-01 and 9999-12-31 in microseconds.
SENTINELS = st.sampled_from([-2_208_988_800_000_000, 253_402_214_400_000_000])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "number": st.floats(allow_nan=True)
    | st.sampled_from([0.0, -0.0, 1e-310, -1.7e308, 1.7e308])
    | st.builds(float.__add__, OFFSETS, st.floats(-100, 100)),
    "integer": st.integers(-(2**63), 2**63 - 1) | st.integers(-100, 100),
    "boolean": st.booleans(),
    "time": st.integers(-(2**63), 2**63 - 1) | st.integers(-(10**16), 10**16) | SENTINELS,  # microseconds
    "text": TEXTS | st.sampled_from(["a", "b", "a b", "é", *MARKS]),
}


@st.composite
def number_inputs(draw: st.DrawFn, name: str, kind: str) -> list[NumericColumn]:
    """What fit may make of one numeric column, with any statistics."""
    mean, std = draw(st.floats(-1e6, 1e6) | OFFSETS), draw(st.floats(1e-3, 1e9))
    indicator = draw(st.booleans())
    if kind == "time":
        parts = draw(st.lists(st.sampled_from(["hour", "weekday", "month"]), unique=True))
        return [NumericColumn(name, mean, std, indicator=indicator)] + [
            NumericColumn(name, draw(st.floats(0, 10)), draw(st.floats(0.1, 10)), part=part) for part in parts
        ]
    curve = "linear" if kind == "boolean" else draw(st.sampled_from(["linear", "log"]))
    scale = draw(st.floats(1e-6, 1e6)) if curve == "log" else 1.0
    return [NumericColumn(name, mean, std, curve, scale, indicator=indicator)]


@st.composite
def transforms_and_rows(draw: st.DrawFn) -> tuple[Transform, pa.RecordBatch]:
    kinds = draw(st.lists(st.sampled_from(sorted(VALUES)), min_size=1, max_size=5))
    types = {f"c{place}": kind for place, kind in enumerate(kinds)}
    marks = draw(st.sampled_from([MARKS, ["?"], [], ["", "0", "-7", "true", "1900-01-01"]]))
    numeric = [
        part for name, kind in types.items() if kind != value_types.TEXT for part in draw(number_inputs(name, kind))
    ]
    vocabularies = {
        name: [text for text in draw(st.lists(TEXTS, unique=True, max_size=4)) if text not in marks]
        for name, kind in types.items()
        if kind == value_types.TEXT
    }
    categorical = [CategoricalColumn(name, tuple(texts)) for name, texts in vocabularies.items()]
    transform = Transform(
        "y", "classification", types, marks, numeric=tuple(numeric), categorical=tuple(categorical), classes=("n", "y")
    )
    rows = draw(st.integers(1, 6))
    columns = {}
    for name, kind in types.items():
        values = VALUES[kind]
        if kind == value_types.TEXT and vocabularies[name]:
            values = values | st.sampled_from(vocabularies[name])
        if kind != value_types.TEXT or marks:
            values = st.none() | values
        empty = draw(st.integers(0, rows)) if kind != value_types.TEXT or marks else 0
        filled = draw(st.lists(values, min_size=rows - empty, max_size=rows - empty))
        columns[name] = pa.array([None] * empty + filled, ARROW[kind])
    return transform, pa.RecordBatch.from_pydict(columns)


@settings(max_examples=25, deadline=None)
@given(transforms_and_rows())
def test_any_columns_are_encoded_as_transform_encodes_them(case: tuple[Transform, pa.RecordBatch]) -> None:
    transform, rows = case
    expected, columns = encoded(transform, rows), columns_of(transform)
    session = onnxruntime.InferenceSession(encoding_model(columns, ANY_TIME).SerializeToString())
    names = [value.name for value in session.get_outputs()]
    found = dict(zip(names, session.run(None, as_raw(rows, columns, ANY_TIME)), strict=True))
    assert set(names) == {spec.name for spec in transform.signature.inputs}
    if "categorical" in found:
        np.testing.assert_array_equal(found["categorical"], expected["categorical"])
    if "numeric" in found:
        # What takes no logarithm agrees to the bit.
        linear = [place for place, number in enumerate(transform.numeric) if number.curve == "linear"]
        linear += range(len(transform.numeric), found["numeric"].shape[1])
        np.testing.assert_array_equal(found["numeric"][:, linear], expected["numeric"][:, linear])
        np.testing.assert_allclose(found["numeric"], expected["numeric"], rtol=1e-6, atol=1e-9)


def test_months_over_centuries() -> None:
    """Every day of 1,200 years, and the moments around midnight before 1970, where Transform truncates."""
    transform = Transform("y", "classification", {"t": "time"}, [], numeric=(NumericColumn("t", 0, 1, part="month"),))
    days = np.arange(-600 * 365, 600 * 365) * 86_400.0
    seconds = np.concatenate([days, days - 0.25, days + 86_399.75])
    rows = pa.RecordBatch.from_pydict({"t": pa.array((seconds * 1e6).astype(np.int64), ARROW["time"])})
    session = onnxruntime.InferenceSession(encoding_model(columns_of(transform), ANY_TIME).SerializeToString())
    found = session.run(None, {"t": seconds[:, None]})[0]
    np.testing.assert_array_equal(found, encoded(transform, rows)["numeric"])


# With a trained model


class Deployed:
    """A model trained on a table with every type of column, as tensors and from raw columns."""

    def __init__(self, directory: Path, task: str) -> None:
        self.table = mixed_table(directory / "data", task)
        self.data = PreparedData.open(self.table)
        statistics = self.data.artifact.read_json("statistics.json")
        self.transform = Transform.from_json(statistics)
        columns = read_columns(statistics)
        assert isinstance(columns, RawColumns)
        self.columns = columns
        example = [np.zeros((2, *spec.shape), spec.dtype) for spec in self.data.signature.inputs]
        to_onnx(trained_on(self.data).load(), self.data.signature, example, 20, directory / "model.onnx")
        model = onnx.load(directory / "model.onnx")
        self.tensors = onnxruntime.InferenceSession(directory / "model.onnx")
        self.made = raw_model(model, self.columns, self.data.signature.classes)
        self.raw = onnxruntime.InferenceSession(self.made.SerializeToString())

    def outputs(self, rows: pa.RecordBatch) -> np.ndarray:
        """What Transform and the model on tensors make of raw rows."""
        inputs = encoded(self.transform, rows)
        feed = {spec.name: np.ascontiguousarray(inputs[spec.name]) for spec in self.data.signature.inputs}
        return self.tensors.run(None, feed)[0]


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Deployed:
    return Deployed(tmp_path_factory.mktemp("classifier"), "classification")


@st.composite
def tables(draw: st.DrawFn, types: dict[str, str], vocabularies: dict[str, list[str]]) -> pa.RecordBatch:
    rows = draw(st.integers(1, 8))
    columns = {}
    for name, kind in types.items():
        known = st.sampled_from(vocabularies[name]) if name in vocabularies else st.nothing()
        usual = st.floats(-1e4, 1e4) if kind == "number" else st.nothing()
        # Of the years 0 to 9999.
        any_value = st.integers(-62_167_219_200 * 10**6, 253_402_300_799 * 10**6) if kind == "time" else VALUES[kind]
        values = st.lists(st.none() | any_value | known | usual, min_size=rows, max_size=rows)
        columns[name] = pa.array(draw(values), ARROW[kind])
    return pa.RecordBatch.from_pydict(columns)


def test_raw_rows_get_the_same_label_and_probabilities(classifier: Deployed) -> None:
    vocabularies = {column.name: list(column.vocabulary) for column in classifier.transform.categorical}
    assert set(classifier.columns.types.values()) == {"number", "integer", "boolean", "time", "text"}
    assert {number.curve for number in classifier.columns.numbers} == {"linear", "log"}
    assert {number.part for number in classifier.columns.numbers} >= {"", "hour", "weekday", "month"}
    assert classifier.columns.indicators

    @settings(max_examples=20, deadline=None)
    @given(tables(classifier.columns.types, vocabularies))
    def agree(rows: pa.RecordBatch) -> None:
        logits = classifier.outputs(rows).astype(np.float64)
        label, probabilities = classifier.raw.run(None, as_raw(rows, classifier.columns))
        expected = np.exp(logits - logits.max(axis=1, keepdims=True))
        expected /= expected.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(probabilities, expected, atol=1e-5)
        named = np.array(classifier.data.signature.classes)[logits.argmax(axis=1)]
        margin = np.sort(expected, axis=1)
        clear = margin[:, -1] - margin[:, -2] > 2e-5
        assert label[clear, 0].tolist() == named[clear].tolist()

    agree()


def test_a_regression_gives_its_value(tmp_path: Path) -> None:
    deployed = Deployed(tmp_path, "regression")
    assert [output.name for output in deployed.raw.get_outputs()] == ["value"]
    rows = pa.RecordBatch.from_pydict(
        {
            name: pa.array([None, None] if kind != "number" else [None, 3.5], ARROW[kind])
            for name, kind in deployed.columns.types.items()
        }
    )
    found = deployed.raw.run(None, as_raw(rows, deployed.columns))[0]
    np.testing.assert_allclose(found, deployed.outputs(rows), rtol=1e-6)


def test_inputs_are_named_and_typed_as_the_columns(classifier: Deployed) -> None:
    shapes = {value.name: (value.type, value.shape) for value in classifier.raw.get_inputs()}
    assert list(shapes) == list(classifier.columns.types)
    for name, kind in classifier.columns.types.items():
        assert shapes[name] == ("tensor(string)" if kind in ("text", "time") else "tensor(double)", ["batch", 1])


def test_a_column_may_be_named_like_an_output_or_a_tensor_of_the_model() -> None:
    names = ["label", "model/numeric", "encode/concat", "numeric", "probabilities", " "]
    numbers = tuple(NumericColumn(name, 0.0, 1.0) for name in names)
    transform = Transform("y", "classification", dict.fromkeys(names, "number"), [], numeric=numbers)
    matrix = onnx.numpy_helper.from_array(np.eye(6, 2, dtype=np.float32), "weight")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["numeric", "weight"], ["logits"])],
        "g",
        [value("numeric", onnx.TensorProto.FLOAT, ["batch", 6])],
        [value("logits", onnx.TensorProto.FLOAT, ["batch", 2])],
        [matrix],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    made = raw_model(model, columns_of(transform), ("no", "yes"))
    session = onnxruntime.InferenceSession(made.SerializeToString())
    inputs = [value.name for value in session.get_inputs()]
    assert inputs == ["label_2", "model/numeric_2", "encode/concat", "numeric", "probabilities_2", " "]
    assert [value.name for value in session.get_outputs()] == ["label", "probabilities"]
    values = dict(zip(inputs, np.array([[[1.0]], [[3.0]], *[[[0.0]]] * 4]), strict=True))
    assert session.run(["label"], values)[0].tolist() == [["yes"]]


def test_what_a_graph_cannot_start_from_is_said() -> None:
    words = Transform("y", "classification", {"review": "text"}, [], documents=("review",), text_length=8)
    why = read_columns(words.to_json())
    assert isinstance(why, str) and "review" in why and "NFKC" in why
    same_wording(str(read_columns({"image_mean": [1.0]})))


def test_spaces_are_the_callers_to_trim(classifier: Deployed) -> None:
    """Transform trims, the graph cannot: a text with spaces is unknown to it."""
    name = next(name for name, kind in classifier.columns.types.items() if kind == value_types.TEXT)
    known = next(column.vocabulary[0] for column in classifier.transform.categorical if column.name == name)
    session = onnxruntime.InferenceSession(encoding_model(classifier.columns, 20).SerializeToString())
    place = [column.name for column in classifier.columns.categories].index(name)
    codes = {}
    for text in (known, f" {known}"):
        kinds = {n: input_dtype(kind, 20) for n, kind in classifier.columns.types.items()}
        values = {n: np.array([[np.nan]]) for n, dtype in kinds.items() if dtype == "float64"}
        texts = {n: np.array([[text]], object) for n, dtype in kinds.items() if dtype == "string"}
        codes[text] = session.run(["categorical"], {**values, **texts})[0][0, place]
    assert codes == {known: 2, f" {known}": 1}
    assert value_types.clean_texts(pa.array([f" {known}"]), []).to_pylist() == [known]
