"""``prune`` and ``distil``: a trained model is compressed, then reused; impossible requests end in one line."""

import json
import re
from pathlib import Path

import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.trained import Architecture, TrainedModel, write_trained
from tests.support.command_line import Run, one_message
from tests.support.quick_config import EXPORT, NETWORK

SHORT = {"training": {"epochs": 2, "batch_size": 64}}


@pytest.fixture
def model(tmp_path: Path) -> tuple[str, str]:
    """The directories of a trained model (of the weights that it starts with) and of its data."""
    data = write_table(tmp_path / "data", "classification")
    config = ModelConfig("mlp", {"hidden": [16, 8]})
    weights = build_model(config, data.signature, seed=0).state_dict()
    write_trained(tmp_path / "trained", Architecture(config, data.signature), weights, weights, {})
    return str(tmp_path / "trained"), str(tmp_path / "data")


def arguments(model: tuple[str, str], **compression: object) -> tuple[str, ...]:
    config = json.dumps({**SHORT, "compression": compression})
    return ("--model", model[0], "--data", model[1], "--config", config)


def result_of(stdout: str, tmp_path: Path) -> Path:
    found = re.search(r"^Model +(\S+)$", stdout, re.MULTILINE)
    assert found, stdout
    return tmp_path / found[1]


@pytest.mark.prove
def test_units_are_removed_and_then_reused(model: tuple[str, str], pyflyte_run: Run, tmp_path: Path) -> None:
    given = arguments(model, share=0.5)
    first = pyflyte_run(*given, workflow="prune")
    assert first.returncode == 0, first.stdout
    assert "Slipstream  prune → 50 % fewer units" in first.stdout
    kept = TrainedModel.open(result_of(first.stdout, tmp_path)).architecture.retained["layers.0"]
    assert list(kept) == ["out"] and len(kept["out"]) == 8
    second = pyflyte_run(*given, workflow="prune")
    assert second.returncode == 0 and "train        reused" in second.stdout, second.stdout


@pytest.mark.prove
def test_a_network_of_the_users_own_is_pruned_if_the_configuration_names_it(
    model: tuple[str, str], pyflyte_run: Run, tmp_path: Path
) -> None:
    (tmp_path / "nets.py").write_text(
        "from slipstream.shared.models.tables_and_images import MLP\n"
        "def build(signature, hidden): return MLP(signature, hidden=hidden)\n"
    )
    named, own = TrainedModel.open(Path(model[0])), ModelConfig("nets:build", {"hidden": [16, 8]})
    weights = named.load().state_dict()
    write_trained(tmp_path / "own", Architecture(own, named.signature), weights, weights, {})
    given = ("--model", str(tmp_path / "own"), "--data", model[1], "--config")
    config = {**SHORT, "compression": {"share": 0.5}}
    refused = pyflyte_run(*given, json.dumps(config), workflow="prune")
    assert refused.returncode == 1 and "model.name: nets:build" in one_message(refused.stdout), refused.stdout
    ended = pyflyte_run(*given, json.dumps({**config, "model": {"name": "nets:build"}}), workflow="prune")
    assert ended.returncode == 0, ended.stdout
    smaller = TrainedModel.open(result_of(ended.stdout, tmp_path), "nets:build")
    assert smaller.architecture.retained and smaller.config == own


@pytest.mark.prove
def test_the_smallest_student_that_loses_little_enough_is_searched(
    model: tuple[str, str], pyflyte_run: Run, tmp_path: Path
) -> None:
    # Nothing is lost against a network that never learnt anything.
    students = [{"hidden": [8, 4]}, {"hidden": [4]}]
    ended = pyflyte_run(*arguments(model, students=students, max_loss=30.0), workflow="distil")
    assert ended.returncode == 0, ended.stdout
    assert "Slipstream  distil → hidden 4" in ended.stdout and "hidden 8-4" in ended.stdout, ended.stdout
    assert TrainedModel.open(result_of(ended.stdout, tmp_path)).config.arguments["hidden"] == [4]


@pytest.mark.prove
def test_the_main_job_goes_on_with_the_smaller_network(pyflyte_run: Run, tmp_path: Path) -> None:
    config = {"training": {"epochs": 3}, "export": EXPORT, "collectives": NETWORK}
    whole = pyflyte_run("--config", json.dumps(config))
    assert whole.returncode == 0, whole.stdout
    config["compression"] = {"method": "prune", "share": 0.5}
    smaller = pyflyte_run("--config", json.dumps(config))
    assert smaller.returncode == 0, smaller.stdout
    assert "train        reused" in smaller.stdout, "the trained model is that of the run before"
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("runs/*/model/model.onnx"))
    assert sizes[0] < 0.5 * sizes[1], sizes
    page = max(tmp_path.glob("runs/*/report.html")).read_text()
    assert "Smaller model" in page and "Tried       model" in smaller.stdout and "compress" in smaller.stdout


@pytest.mark.parametrize(
    ("swapped", "settings", "workflow", "message"),
    [
        ((1, 1), {}, "prune", "--model: "),
        ((0, 0), {}, "distil", "--data: "),
        ((0, 1), {"share": 1.5}, "prune", "compression.share: 1.5 is not allowed; expected at least 0 and less than 1"),
        ((0, 1), {"students": [{"hidden": [99]}]}, "distil", "compression.students: hidden 99 has"),
        ((0, 1), {"students": [{"hiden": [4]}]}, "distil", "compression.students: model.arguments.hiden"),
    ],
)
def test_a_mistake_is_one_line(
    *,
    swapped: tuple[int, int],
    settings: dict[str, object],
    workflow: str,
    message: str,
    model: tuple[str, str],
    pyflyte_run: Run,
) -> None:
    ended = pyflyte_run(*arguments((model[swapped[0]], model[swapped[1]]), **settings), workflow=workflow)
    assert ended.returncode != 0 and message in one_message(ended.stdout), ended.stdout
