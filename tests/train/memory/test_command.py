"""``slipstream memory``: its output, without allocating any memory."""

import json
import os
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.memory.choices import TraceJob, numbers_to_try
from slipstream.pipeline.train.memory.command import rows_of_text, rows_of_tokens
from slipstream.pipeline.train.memory.processes import TraceFailure, trace_footprints
from slipstream.pipeline.train.memory.trace import Footprint, TracedStep
from slipstream.shared.models.base.directory import ModelOrigin
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.source.config import DataConfig
from slipstream.subcommands import slipstream
from tests.support.training import table_of_numbers

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
#: Llama-3-8B's shape.
LARGE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def ask(place: Path, *options: str, model: dict[str, Any] | None = None, **training: Any) -> Result:
    config = place / "run.yaml"
    sizes = {"name": "transformer", "arguments": SMALL}
    config.write_text(yaml.safe_dump({"model": model or sizes, "training": {"batch_size": 8, **training}}))
    return CliRunner().invoke(slipstream, ["memory", str(config), *options])


@pytest.mark.prove
def test_a_table_and_what_fits(tmp_path: Path) -> None:
    found = ask(tmp_path, "--length", "16", "--devices", "1", "--memory", "100MiB")
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[0] == "1 device; batches of 8 rows, 8 per process; computed in bf16"
    assert [line.split()[:4] for line in lines[3:9]] == [
        ["none", recompute, number, rows]
        for recompute in ("none", "full")
        for number, rows in (("1", "8"), ("4", "2"), ("8", "1"))
    ]
    assert lines[3].endswith("fits <- this configuration") and "It fits into 100 MiB; " in found.output


@pytest.mark.prove
def test_what_does_not_fit_has_remedies_that_do(tmp_path: Path) -> None:
    options = ("--length", "64", "--devices", "2", "--json")
    found = ask(tmp_path, *options, "--memory", "3MiB", batch_size=4)
    answer = json.loads(found.stdout)
    (asked,) = [row for row in answer["rows"] if row["as_it_is"]]
    assert asked["shard"] == "none" and asked["micro_batches"] == 1 and not asked["fits"]
    assert sum(asked["at_peak"].values()) <= asked["peak"]
    assert found.exit_code == 1 and not answer["fits"] and len(answer["remedies"]) == 3
    assert not any("recompute" in remedy for remedy in answer["remedies"]), "another forward pass costs the most"
    for row in answer["rows"]:
        assert row["fits"] is (row["peak"] <= 0.9 * 3 * 2**20)


@pytest.mark.prove
def test_if_no_setting_helps_there_are_other_remedies(tmp_path: Path) -> None:
    sizes = {**SMALL, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4}
    lean: dict[str, Any] = {"model": {"name": "transformer", "arguments": sizes}, "parallel": {"shard": "weights"}}
    options = ("--length", "256", "--devices", "2", "--json")
    least = min(row["peak"] for row in json.loads(ask(tmp_path, *options, **lean).stdout)["rows"])
    found = ask(tmp_path, *options, "--memory", f"{least / 1e6:.3f}MB", **lean)
    remedies = json.loads(found.stdout)["remedies"]
    assert found.exit_code == 1 and remedies[-1].startswith("devices of at least ")
    assert any("4 devices with " in one or "8 devices with " in one for one in remedies), remedies
    assert any(one.startswith("rows of 128 tokens") for one in remedies), remedies


@pytest.mark.prove
def test_prepared_data_says_what_a_model_takes(tmp_path: Path) -> None:
    data = table_of_numbers(tmp_path / "data", 40)
    found = ask(tmp_path, "--data", str(data), "--devices", "2", "--json", model={"name": "mlp"}, ema=0.9)
    answer = json.loads(found.stdout)
    assert {row["shard"] for row in answer["rows"]} == {"none"}, "averages of divided weights are not supported"
    assert len(answer["not_traced"]) == 3 and "training.ema" in answer["not_traced"][0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--length", "16", "--memory", "24"), "--memory 24: expected a device's memory, such as 24GiB"),
        (("--length", "16", "--devices", "0"), "--devices 0: expected a whole number"),
        (("--length", "16", "--devices", "3", "--nodes", "2"), "--nodes 2: does not divide the 3 devices"),
        ((), "--data: expected a directory with the prepared data"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    found = ask(tmp_path, *options)
    assert found.exit_code and found.output.startswith(f"Error: {said}") and found.output.count("\n") == 1


@pytest.mark.prove
def test_a_configuration_of_text_says_it_before_the_text_is_prepared(tmp_path: Path) -> None:
    tell = {"task": "language", "vocabulary": 300, "length": 16}
    model = {"name": "transformer", "arguments": {name: SMALL[name] for name in SMALL if name != "vocab_size"}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"data": tell, "model": model, "training": {"batch_size": 8}}))
    found = CliRunner().invoke(slipstream, ["memory", str(tmp_path / "run.yaml"), "--devices", "1", "--json"])
    assert found.exit_code == 0, found.output
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    parameters = json.loads(found.stdout)["rows"][0]["lasting"]["parameters"]
    assert parameters == pytest.approx(4 * (2 * 300 * 32 + 2 * layer + 32), rel=0.01), "embedding and output layer"
    config = DataConfig.from_dict(tell)
    assert rows_of_text(config, ModelOrigin(ModelConfig())).document_end == 0
    assert rows_of_text(replace(config, across_documents=True), ModelOrigin(ModelConfig())).document_end == -1


@pytest.mark.parametrize("options", [("--length", "16"), ()])
def test_of_a_base_its_config_says_it_all(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no weights, which would be read for a training alone."""
    asked_for: list[TracedStep] = []

    def noted(steps: list[TracedStep]) -> list[TraceFailure]:
        asked_for.extend(steps)
        return [TraceFailure("not tried")] * len(steps)

    monkeypatch.setattr("slipstream.pipeline.train.memory.choices.largest_footprints", noted)
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", "max_position_embeddings": 64}))
    said = {
        "data": {"task": "language", "tokenizer": str(base), "length": 16},
        "model": {"base": str(base)},
        "training": {"batch_size": 8},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(said))
    command = ["memory", str(tmp_path / "run.yaml"), "--devices", "1", *options]
    found = CliRunner().invoke(slipstream, command)
    assert found.exit_code == 0, found.output
    step = asked_for[0]
    assert step.model.arguments.items() >= SMALL.items() and step.signature.outputs == 64
    model = build_model(step.model, step.signature, 0, shapes_alone=True)
    layer = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * layer + 32 + 2 * 64 * 32
    (base / "config.json").write_text(json.dumps({**SMALL, "model_type": "llama", "max_position_embeddings": 8}))
    found = CliRunner().invoke(slipstream, command)
    line = f"Error: model.base: {base}/config.json: has positions for 8 tokens, and a row has 16; expected"
    assert found.exit_code == 1 and found.output.startswith(line) and found.output.count("\n") == 1


def test_numbers_are_whole_rounds_of_a_pipeline() -> None:
    config = {"batch_size": 26, "accumulation": 4, "parallel": {"pipeline": 4}}
    job = TraceJob(
        ModelConfig(),
        rows_of_tokens(ModelOrigin(ModelConfig("transformer", SMALL)), 16),
        TrainingConfig.from_dict(config),
        4,
    )
    assert numbers_to_try(job) == [4, 16, 24]


@pytest.mark.parametrize(("layers", "parameters"), [(4, 1.923e9), pytest.param(32, 8.03e9, marks=pytest.mark.prove)])
def test_a_model_of_billions_of_parameters_takes_no_memory(layers: int, parameters: float) -> None:
    """Its weights alone are 7 or 30 GiB."""
    model = ModelConfig("transformer", {**LARGE, "num_hidden_layers": layers})
    training = TrainingConfig.from_dict({"precision": "bf16", "parallel": {"shard": "weights"}, "batch_size": 8})
    job = TraceJob(model, rows_of_tokens(ModelOrigin(model), 4096), training, 8)
    (found,) = trace_footprints([job.step])
    assert isinstance(found, Footprint), found
    assert found.at_peak["parameters"] == pytest.approx(parameters * 4 / 8, rel=0.01)
    assert found.at_peak["optimizer"] == pytest.approx(parameters * 8 / 8, rel=0.01)
    assert found.at_peak["activations"] > layers * 2**28
    largest = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    assert largest * 1024 < 4 * 2**30, os.getpid()
