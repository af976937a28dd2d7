"""The Triton repository against Triton's own protobuf and the rules outside of it."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from slipstream.pipeline.export.package import triton
from slipstream.pipeline.export.package.triton import (
    TYPES,
    config_errors,
    config_fields,
    parse_model_config,
    render_config,
    write_repository,
)
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.export import DeployedSignature, ExportReport
from slipstream.shared.errors import UserError
from tests.support.packages import package
from tests.support.raw_tables import mixed_table
from tests.support.report_runs import export
from tests.support.wording import refuses, same_wording

ONNX_TYPES = {
    onnx.TensorProto.FLOAT: "TYPE_FP32",
    onnx.TensorProto.DOUBLE: "TYPE_FP64",
    onnx.TensorProto.INT32: "TYPE_INT32",
    onnx.TensorProto.STRING: "TYPE_STRING",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("triton")
    data = PreparedData.open(mixed_table(directory / "data", "classification"))
    return package(directory / "model", data, steps=5)


def read(path: Path) -> Any:
    return text_format.Parse((path / "config.pbtxt").read_text(), ModelConfig())


def test_triton_reads_what_the_model_is(model: Path, tmp_path: Path) -> None:
    """Names, types and dims of both models equal those of the ONNX files next to their configuration."""
    made = write_repository(model, tmp_path / "repository")
    assert [path.name for path in made] == ["y", "y_raw"]
    for path in made:
        config, graph = read(path), onnx.load(path / "1" / "model.onnx").graph
        assert (config.name, config.backend, config.max_batch_size) == (path.name, "onnxruntime", 256)
        for said, true in ((config.input, graph.input), (config.output, graph.output)):
            assert [entry.name for entry in said] == [value.name for value in true]
            for entry, value in zip(said, true, strict=True):
                kind = value.type.tensor_type
                assert (
                    ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_number[entry.data_type].name
                    == ONNX_TYPES[kind.elem_type]
                )
                assert list(entry.dims) == [dim.dim_value for dim in kind.shape.dim[1:]]
        warm = config.model_warmup[0]
        assert warm.batch_size == 1 and set(warm.inputs) == {value.name for value in graph.input}
        assert all(value.zero_data for value in warm.inputs.values())
        assert config.parameters["intra_op_thread_count"].string_value == "1"


def report(speeds: dict[str, float]) -> ExportReport:
    found = export("accuracy")
    variants = [replace(each, rows_per_second=speeds) for each in found.variants if each.chosen]
    return replace(found, variants=variants, machine=replace(found.machine, threads=2))


def signature_of(model: Path) -> DeployedSignature:
    return from_json((model / "signature.json").read_bytes(), DeployedSignature, model)


@pytest.mark.parametrize(
    ("speeds", "preferred", "largest"),
    [
        ({"1": 100.0, "32": 800.0, "256": 2000.0}, [32, 256], 256),
        ({"1": 100.0, "32": 800.0, "256": 810.0}, [32], 256),
        ({"1": 100.0, "32": 90.0, "256": 150.0}, [256], 256),
        ({"1": 100.0, "256": 99.0}, [], 256),
    ],
)
def test_batches_are_preferred_by_what_was_measured(
    speeds: dict[str, float], preferred: list[int], largest: int, model: Path
) -> None:
    signature = signature_of(model)
    config = config_fields("y", signature.inputs, signature.outputs, report(speeds))
    message = parse_model_config(render_config(config))
    assert message.max_batch_size == largest
    assert list(message.dynamic_batching.preferred_batch_size) == preferred
    assert message.HasField("dynamic_batching") == bool(preferred)
    assert [warm.batch_size for warm in message.model_warmup] == [1, *preferred]
    if preferred:
        assert message.dynamic_batching.max_queue_delay_microseconds == 10_000


@pytest.mark.parametrize(
    ("place", "value", "flaw"),
    [
        (("name",), "z", "name: 'z' is not the directory's"),
        (("max_batch_size",), 0, "max_batch_size: 0"),
        (("dynamic_batching", "preferred_batch_size"), [512], "preferred_batch_size: 512; expected more than 1 and at"),
        (("dynamic_batching", "preferred_batch_size"), [256, 32], "ascending"),
        (("input", 0, "dims"), [-1, 3], "input 'numeric': expected TYPE_FP32 with dims"),
        (("input", 0, "data_type"), "TYPE_FP64", "input 'numeric': expected TYPE_FP32"),
        (("output", 0, "name"), "logit", "output 'logit': the model has no such output"),
        (("model_warmup", 0, "batch_size"), 1000, "batch_size 1000; expected 1 to 256"),
        (("model_warmup", 0, "inputs"), [], "its inputs differ from the model's"),
    ],
)
def test_what_the_protobuf_accepts_and_triton_does_not(place: Any, value: Any, flaw: str, model: Path) -> None:
    signature = signature_of(model)
    inputs, outputs = signature.inputs, signature.outputs
    right = config_fields("y", inputs, outputs, report({"1": 1.0, "32": 9.0, "256": 99.0}))
    assert not list(config_errors(right, "y", inputs, outputs))
    wrong = copy.deepcopy(right)
    node = wrong
    for step in place[:-1]:
        node = node[step]
    node[place[-1]] = triton.EnumValue(value) if str(value).startswith("TYPE") else value
    assert parse_model_config(render_config(wrong)) is not None
    assert any(flaw in found for found in config_errors(wrong, "y", inputs, outputs))


def test_nonsense_is_refused_by_the_protobuf() -> None:
    with refuses(UserError):
        parse_model_config("nam: 'x'")


def test_every_type_is_one_of_tritons() -> None:
    known = ModelConfig.DESCRIPTOR.file.enum_types_by_name["DataType"].values_by_name
    assert set(TYPES.values()) <= set(known)


def test_what_is_there_stays(model: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    (repository / "y_raw").mkdir(parents=True)
    with refuses(UserError, match="y_raw:"):
        write_repository(model, repository)
    assert [path.name for path in repository.iterdir()] == ["y_raw"]
    ran = CliRunner().invoke(triton.main, [str(model), str(repository), "--name", "churn"])
    assert ran.output.splitlines() == [str(repository / "churn"), str(repository / "churn_raw")]
    assert [path.name for path in tmp_path.iterdir()] == ["repository"]


@pytest.mark.parametrize("name", ["../x", "a b", ".x"])
def test_a_name_that_is_none(name: str, model: Path, tmp_path: Path) -> None:
    ran = CliRunner().invoke(triton.main, [str(model), str(tmp_path / "r"), "--name", name])
    assert ran.exit_code == 1 and "--name" in ran.output
    assert not (tmp_path / "r").exists()


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    ran = CliRunner().invoke(triton.main, [str(tmp_path), str(tmp_path / "r")])
    assert ran.exit_code == 1
    same_wording(ran.output)
