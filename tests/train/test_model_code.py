"""Edited model code is new work: every module of a factory counts, and none is run to find it."""

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from slipstream.flyte.stage import describe_input
from slipstream.shared.artifacts.syntax import analyse_source
from slipstream.shared.artifacts.workspaces import content_key
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory_code import fingerprint_model, model_code

LIBRARIES = ".venv/lib/python3.11/site-packages"
#: Every module of a project, and two that were put among the installed packages without being one; each would
#: fail if it were run. "models" and "models.deep" have no ``__init__``.
FILES = {
    "nets.py": "import torch\nfrom layers import blocks as b\ndef build(signature):\n    import late\n",
    "late.py": "import json, sklearn.tree, installed",
    "layers/__init__.py": "from .sizes import WIDTH",
    "layers/sizes.py": "from . import activations",
    "layers/activations.py": "from .. import too_far",
    "layers/blocks.py": "from models.deep.conv import (  # where convolutions are\n    Conv,\n)",
    "layers/unused.py": "",
    "models/deep/conv.py": "import nets; from .relative import *",
    "models/deep/relative.py": "from slipstream.shared.models.tables_and_images import MLP",
    "models/deep/unused.py": "",
    "broken.py": "def (",
    f"{LIBRARIES}/installed.py": "import nowhere",
    f"{LIBRARIES}/unused.py": "",
}
MODULES = {
    *("nets", "late", "layers", "layers.sizes", "layers.activations", "layers.blocks"),
    *("models.deep.conv", "models.deep.relative", "installed"),
}
BUILD = ModelConfig("nets:build")


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / LIBRARIES))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, source in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source + "\nraise AssertionError('was run')\n")
    return tmp_path


def digest_of(source: bytes) -> str:
    return analyse_source(source).digest[:32]


def test_the_code_of_a_factory_is_all_that_its_module_imports_and_nothing_is_run() -> None:
    code = model_code(BUILD)
    assert set(code) == MODULES | {"torch", "sklearn"}
    assert code["torch"] == version("torch") and code["sklearn"] == f"scikit-learn {version('scikit-learn')}"
    assert code["late"] == digest_of(Path("late.py").read_bytes())
    assert not {*MODULES, "models", "models.deep"} & set(sys.modules)


@pytest.mark.parametrize("name", FILES)
def test_an_edit_counts_if_and_only_if_the_factory_imports_the_file(name: str, project: Path) -> None:
    before = fingerprint_model(BUILD)
    source = (project / name).read_text()
    (project / name).write_text(source + "# a comment")
    assert fingerprint_model(BUILD) == before
    (project / name).write_text(source + "EDITED = 1")
    module = name.removeprefix(f"{LIBRARIES}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    assert (fingerprint_model(BUILD) != before) is (module in MODULES)


def test_a_package_that_hands_on_the_factory_of_another_module_follows_that_one(project: Path) -> None:
    (project / "zoo").mkdir()
    (project / "zoo/__init__.py").write_text("from .inner import build")
    (project / "zoo/inner.py").write_text("def build(signature): ...")
    before = model_code(ModelConfig("zoo:build"))
    assert set(before) == {"zoo", "zoo.inner"}
    (project / "zoo/inner.py").write_text("def build(signature): pass")
    assert {name for name, digest in model_code(ModelConfig("zoo:build")).items() if digest != before[name]} == {
        "zoo.inner"
    }


def test_a_module_that_appears_before_an_installed_one_counts(project: Path) -> None:
    before = model_code(BUILD)
    (project / "installed.py").write_text("HERE = 1")
    assert {name for name, digest in model_code(BUILD).items() if digest != before[name]} == {"installed"}
    (project / "torch.py").write_text("")
    assert model_code(BUILD)["torch"] == digest_of(b"")


def test_no_code_of_the_users_has_no_fingerprint() -> None:
    assert fingerprint_model(ModelConfig("mlp")) == fingerprint_model(ModelConfig("nowhere_to_be_found:build")) == ""
    assert fingerprint_model(ModelConfig("broken:build"))  # building it says what is wrong


def test_the_stages_key_follows_it(project: Path) -> None:
    keys = set()
    for source in FILES["late.py"], "import json":
        (project / "late.py").write_text(source)
        keys.add(
            content_key(
                "train", "v", {"model": describe_input(BUILD), "code": describe_input(fingerprint_model(BUILD))}
            )
        )
    assert len(keys) == 2
