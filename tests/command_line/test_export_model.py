"""``export_model``: a trained model is exported, then reused; other inputs are refused in one line."""

import json
from pathlib import Path

import onnxruntime
import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import Architecture, write_trained
from tests.support.command_line import Run, one_message
from tests.support.proving import first_few
from tests.support.report_pages import assert_is_inert
from tests.support.tokens import VOCABULARY, small_transformer, token_data, word_tokenizer

SHORT = json.dumps({"export": {"seconds": 1}})


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, str]:
    """The directories of a trained model (of the weights that it starts with) and of its data."""
    data = write_table(tmp_path / "data", "regression")
    config = ModelConfig(arguments={"hidden": [16]})
    weights = build_model(config, data.signature, seed=0).state_dict()
    write_trained(tmp_path / "trained", Architecture(config, data.signature), weights, weights, {})
    return str(tmp_path / "trained"), str(tmp_path / "data")


@pytest.mark.prove
def test_a_trained_model_is_exported_alone(model: tuple[str, str], pyflyte_run: Run, tmp_path: Path) -> None:
    arguments = ("--model", model[0], "--data", model[1], "--config", SHORT)
    first = pyflyte_run(*arguments, workflow="export_model")
    assert first.returncode == 0, first.stdout
    assert "Slipstream  export → answer" in first.stdout and "▸" in first.stdout
    (run,) = (path for path in (tmp_path / "runs").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert_is_inert((run / "report.html").read_text(encoding="utf-8"))
    session = onnxruntime.InferenceSession(run / summary["model_file"])
    assert {value.name for value in session.get_inputs()} == {"numeric", "categorical"}


@pytest.mark.prove
def test_a_transformer_comes_with_a_directory_for_hugging_face(pyflyte_run: Run, tmp_path: Path) -> None:
    word_tokenizer(VOCABULARY).save_pretrained(tmp_path / "words")
    data = token_data(tmp_path / "data", tmp_path / "words")
    small_transformer(tmp_path / "trained", data)
    arguments = ("--model", str(tmp_path / "trained"), "--data", str(tmp_path / "data"), "--config", SHORT)
    ended = pyflyte_run(*arguments, workflow="export_model")
    assert ended.returncode == 0 and "▸" in ended.stdout, ended.stdout
    (run,) = (tmp_path / "runs").iterdir()
    made = {path.name for path in (run / "model" / "hugging-face").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= made


def test_a_provider_that_is_not_there_is_one_line(model: tuple[str, str], pyflyte_run: Run) -> None:
    arguments = ("--model", model[0], "--data", model[1], "--config", '{"export": {"provider": "cuda"}}')
    ended = pyflyte_run(*arguments, workflow="export_model")
    assert ended.returncode == 1 and 'export.provider: "cuda" is not available: this ONNX' in one_message(ended.stdout)


@pytest.mark.parametrize(
    ("swapped", "settings", "message"),
    first_few(
        [
            ((1, 1), {}, "--model: "),
            ((0, 0), {}, "--data: "),
            ((0, 1), {"budget_ms": 1e-6}, "export.budget_ms: no variant that may be deployed"),
            ((0, 1), {"budget_mb": 1e-6}, "comes closest"),
        ],
        2,
    ),
)
def test_a_mistake_is_one_line(
    swapped: tuple[int, int], settings: dict[str, float], message: str, model: tuple[str, str], pyflyte_run: Run
) -> None:
    config = json.dumps({"export": {"seconds": 0.05, **settings}})
    arguments = ("--model", model[swapped[0]], "--data", model[swapped[1]], "--config", config)
    ended = pyflyte_run(*arguments, workflow="export_model")
    assert ended.returncode != 0 and message in one_message(ended.stdout), ended.stdout
    assert not list(Path(model[0]).parent.glob("runs/*"))


NETS = """
open("ran", "w").close()
from slipstream.shared.models.tables_and_images import MLP
def build(signature, hidden): return MLP(signature, hidden=hidden)
"""


def of_a_factory(name: str, arguments: dict[str, object], tmp_path: Path) -> tuple[str, ...]:
    """The arguments for a trained model whose file names a factory; ``nets.py`` in the working directory has one."""
    data = write_table(tmp_path / "data", "regression")
    weights = build_model(ModelConfig("mlp", {"hidden": [16]}), data.signature, seed=0).state_dict()
    named = Architecture(ModelConfig(name, arguments), data.signature)
    write_trained(tmp_path / "trained", named, weights, weights, {})
    (tmp_path / "nets.py").write_text(NETS)
    return ("--model", str(tmp_path / "trained"), "--data", str(tmp_path / "data"))


@pytest.mark.prove
def test_a_factory_is_called_if_the_configuration_names_it(pyflyte_run: Run, tmp_path: Path) -> None:
    given = of_a_factory("nets:build", {"hidden": [16]}, tmp_path)
    for config in (SHORT, json.dumps({"model": {"name": "nets:other"}})):
        refused = pyflyte_run(*given, "--config", config, workflow="export_model")
        assert refused.returncode == 1, refused.stdout
        message = one_message(refused.stdout)
        assert "model.json: names the factory nets:build" in message and "model.name: nets:build" in message
        assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()
    config = json.dumps({"model": {"name": "nets:build"}, **json.loads(SHORT)})
    ended = pyflyte_run(*given, "--config", config, workflow="export_model")
    assert ended.returncode == 0 and "▸" in ended.stdout, ended.stdout
    again = pyflyte_run(*given, "--config", SHORT, workflow="export_model")
    assert again.returncode == 1, "what was made with the configuration is not handed on without it"


@pytest.mark.parametrize("workflow", ["export_model", "prune", "distil"])
def test_a_models_file_runs_no_command(workflow: str, pyflyte_run: Run, tmp_path: Path) -> None:
    command: dict[str, object] = {"file": "touch", "args": ["touch", str(tmp_path / "ran")]}
    refused = pyflyte_run(*of_a_factory("os:spawnvp", command, tmp_path), workflow=workflow)
    assert refused.returncode == 1 and "names the factory os:spawnvp" in one_message(refused.stdout), refused.stdout
    assert not (tmp_path / "ran").exists() and not (tmp_path / "runs").exists()
