"""Trusted factories: only the user's configuration chooses the code of a model, never a trained model's file."""

import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.compress.config import CompressionConfig
from slipstream.pipeline.compress.engine import CompressionRun, propose_model
from slipstream.pipeline.export.hugging_face import main
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.request import Lineage, TrainingRequest
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.records import to_tree
from slipstream.shared.artifacts.results.training import KIND
from slipstream.shared.errors import UserError
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory import build_model
from slipstream.shared.models.tables_and_images import MLP
from slipstream.shared.models.trained import Architecture, TrainedModel, UntrustedFactory, write_trained
from tests.support.wording import refuses

#: Says so when it is imported, and when its factory is called.
NETS = """
from pathlib import Path
Path("imported").touch()
from slipstream.shared.models.tables_and_images import MLP
def build(signature, **arguments):
    Path("called").touch()
    return MLP(signature, **arguments)
"""
ELSEWHERE = """
from torch import nn
def build(signature): return nn.Identity()
unnamed = lambda signature: nn.Identity()
class Network(nn.Module): pass
"""
NAMING = """
import functools
from elsewhere_nets import build, unnamed, Network
from torch import zeros
from torch.nn import Linear
partial = functools.partial(build, None)
cached = functools.cache(lambda signature: None)
class NoNetwork: pass
class Callable:
    def __call__(self, signature): raise AssertionError
called = Callable()
def __getattr__(name): raise AttributeError(name)
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with modules of the user's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in {"own_nets": NETS, "elsewhere_nets": ELSEWHERE, "naming_nets": NAMING}.items():
        monkeypatch.delitem(sys.modules, name, raising=False)
        (tmp_path / f"{name}.py").write_text(source)


@pytest.fixture
def data(tmp_path: Path) -> PreparedData:
    return write_table(tmp_path / "data", "classification")


def write_model(directory: Path, signature: Signature, config: ModelConfig) -> Path:
    """A trained model of an MLP, whose file names what it likes."""
    weights = build_model(ModelConfig("mlp", {"hidden": [8]}), signature, seed=0).state_dict()
    write_trained(directory, Architecture(config, signature), weights, weights, {})
    return directory


@pytest.fixture
def model(tmp_path: Path, data: PreparedData) -> Path:
    return write_model(tmp_path / "model", data.signature, ModelConfig("own_nets:build", {"hidden": [8]}))


def nothing_ran() -> bool:
    return not Path("imported").exists() and not Path("called").exists() and "own_nets" not in sys.modules


@pytest.mark.parametrize("factory", ["", "own_nets:other", "other_nets:build", "own_nets:build2", "nets:build", "own"])
def test_what_only_the_file_names_is_not_even_imported(model: Path, factory: str) -> None:
    with refuses(UntrustedFactory, match=r"model\.json:"):
        TrainedModel.open(model, factory)
    assert nothing_ran()


def test_what_the_configuration_names_too_is_called(model: Path) -> None:
    trained = TrainedModel.open(model, ModelConfig("own_nets:build").factory)
    assert nothing_ran(), "opening needs no network"
    assert isinstance(trained.load().network, MLP) and Path("called").exists()


@pytest.mark.parametrize("edit", ["[16]", "[8, 8]"])
def test_a_factory_that_makes_another_model_by_now_is_one_line(model: Path, edit: str) -> None:
    Path("own_nets.py").write_text(NETS.replace("**arguments)\n", f"hidden={edit})\n"))
    with refuses(UserError, match="own_nets:build") as refusal:
        TrainedModel.open(model, "own_nets:build").load()
    assert len(refusal.value.message) < 500


def test_a_command_in_the_file_does_not_run(tmp_path: Path, data: PreparedData) -> None:
    """The attack as it was found: any function that takes a first argument."""
    command = {"file": "touch", "args": ["touch", str(tmp_path / "ran")]}
    spawns = write_model(tmp_path / "evil", data.signature, ModelConfig("os:spawnvp", command))
    with refuses(UserError):
        TrainedModel.open(spawns)
    # Nor if the user is talked into naming it.
    with refuses(UserError):
        TrainedModel.open(spawns, "os:spawnvp").load()
    assert not (tmp_path / "ran").exists()


def test_built_in_networks_need_no_trust(tmp_path: Path, data: PreparedData) -> None:
    plain = write_model(tmp_path / "plain", data.signature, ModelConfig("mlp", {"hidden": [8]}))
    assert isinstance(TrainedModel.open(plain).load().network, MLP)
    assert isinstance(TrainedModel.open(plain, "own_nets:build").load().network, MLP)
    assert nothing_ran()


@pytest.mark.parametrize("role", ["start", "teacher"])
def test_training_goes_on_from_and_learns_from_trusted_factories_only(
    model: Path, data: PreparedData, role: str
) -> None:
    def request(**more: str) -> TrainingRequest:
        given: dict[str, Any] = {role: model, **more}
        return TrainingRequest(data.artifact.directory, ModelConfig(), TrainingConfig(), Path("out"), "", {}, **given)

    with pytest.raises(UntrustedFactory):
        Lineage.open(request(), data)
    assert nothing_ran()
    assert getattr(Lineage.open(request(factory="own_nets:build"), data), role)


def test_what_is_made_of_a_trusted_network_has_to_be_trusted_again(
    model: Path, data: PreparedData, tmp_path: Path
) -> None:
    trained = TrainedModel.open(model, "own_nets:build")
    run = CompressionRun(trained, data, CompressionConfig(method="prune", share=0.5))
    propose_model(tmp_path / "smaller", run, [], {})
    with pytest.raises(UntrustedFactory):
        TrainedModel.open(tmp_path / "smaller")
    assert TrainedModel.open(tmp_path / "smaller", "own_nets:build").architecture.retained


def test_the_command_for_transformers_calls_no_factory(model: Path, tmp_path: Path) -> None:
    with refuses(UserError):
        main([str(model), str(tmp_path / "written")], standalone_mode=False)
    assert nothing_ran() and not (tmp_path / "written").exists()


def test_a_name_that_no_configuration_can_hold_is_refused(tmp_path: Path, data: PreparedData) -> None:
    """A file that was written by hand."""
    for number, name in enumerate(("own_nets", ":build", "own_nets:", "own_nets:build()")):
        writer = ArtifactWriter(tmp_path / f"evil-{number}")
        writer.write_json("model.json", {"config": {"name": name}, "signature": to_tree(data.signature)})
        writer.finish(KIND, {})
        with refuses(UserError, match=r"model\.name:"):
            TrainedModel.open(tmp_path / f"evil-{number}", name)
    assert nothing_ran()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("naming_nets:build", "is defined in elsewhere_nets; name it there: elsewhere_nets:build"),
        ("naming_nets:unnamed", "is defined in elsewhere_nets; name it there: elsewhere_nets:"),
        ("naming_nets:Network", "is defined in elsewhere_nets; name it there: elsewhere_nets:Network"),
        ("naming_nets:Linear", r"is defined in torch\.nn\.modules\.linear; name it there: torch\.nn\.modules\.linear"),
        ("naming_nets:partial", "is a partial; expected a function that returns a .*, defined in naming_nets"),
        ("naming_nets:cached", "is a _lru_cache_wrapper; expected a function"),
        ("naming_nets:called", "is a Callable; expected a function"),
        ("naming_nets:NoNetwork", "is the class NoNetwork; expected a function"),
        ("naming_nets:zeros", "is a builtin_function_or_method; expected a function"),
        ("naming_nets:functools", "is a module; expected a function"),
        ("naming_nets:absent", "has no factory 'absent'"),
        ("subprocess:run", "belongs to Python's standard library"),
        ("os.path:join", "belongs to Python's standard library"),
        ("builtins:exec", "belongs to Python's standard library"),
        ("this:build", "belongs to Python's standard library"),
    ],
)
def test_only_what_the_module_itself_defines_is_called(name: str, message: str, data: PreparedData) -> None:
    with pytest.raises(UserError, match=f"^model.name: .*{message}"):
        build_model(ModelConfig(name), data.signature, seed=0)
    assert "this" not in sys.modules


def test_functions_and_classes_of_the_module_are_called(data: PreparedData) -> None:
    assert isinstance(build_model(ModelConfig("own_nets:build"), data.signature, seed=0).network, MLP)
    Path("class_nets.py").write_text(
        "from slipstream.shared.models.tables_and_images import MLP\n"
        "class Network(MLP): pass\n"
        "build = lambda signature: Network(signature)\n"
    )
    for name in ("class_nets:Network", "class_nets:build"):
        assert type(build_model(ModelConfig(name), data.signature, seed=0).network).__name__ == "Network"
