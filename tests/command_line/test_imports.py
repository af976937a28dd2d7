"""Cost of imports: a workflow's module loads flytekit and the needs of the Elastic plugin, but no engine."""

import subprocess
import sys

import pytest

HEAVY = ("torch._dynamo", "onnx", "onnxruntime", "onnxscript", "sklearn", "matplotlib", "jinja2", "polars", "moto")
#: Tasks that need no process group, and with it no torch.
PLAIN = ("inputs", "prepare", "compress", "export", "report")


def loaded_by(*modules: str) -> list[set[str]]:
    """The modules that a fresh interpreter has after each import."""
    code = "import sys\n" + "".join(f"import {module}; print('loaded', *sys.modules)\n" for module in modules)
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return [set(line.split()) for line in said.splitlines() if line.startswith("loaded ")]


COUNT = """
import collections, sys, mashumaro.jsonschema as schema
counts, build = collections.Counter(), schema.build_json_schema
schema.build_json_schema = lambda of: counts.update([of.__name__]) or build(of)
from slipstream.flyte import settings_type
describe = settings_type.settings_schema
settings_type.settings_schema = lambda of: counts.update([of.__name__]) or describe(of)
import workflows.training
print(counts["StageRun"], counts["TrainingConfig"], max(counts.values()))
print(*sys.modules)
"""


def test_the_workflow_loads_no_engine_and_describes_a_dataclass_once() -> None:
    """Flyte's type of it, for all signatures that mention it."""
    said = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True).stdout
    described, loaded = (set(line.split()) if "flytekit" in line else line.split() for line in said.splitlines()[-2:])
    assert described == ["1", "1", "1"]
    assert "flytekit" in loaded and not set(loaded) & set(HEAVY)


EQUAL = """
from mashumaro.jsonschema import build_json_schema
from slipstream.config import RunConfig
from slipstream.flyte.compat import fast_descriptions
from slipstream.pipeline.report.summary import RunSummary
described = lambda: [build_json_schema(RunConfig).to_json(), build_json_schema(RunSummary).to_json()]
before = described()
with fast_descriptions():
    after = described()
print(before == after, "default" in after[0], len(after[1]) > 5000)
"""


@pytest.mark.prove
def test_the_description_of_a_dataclass_is_flytekits_own() -> None:
    said = subprocess.run([sys.executable, "-c", EQUAL], capture_output=True, text=True, check=True).stdout
    assert said.split() == ["True", "True", "True"]


def test_annotations_that_cannot_be_remembered_are_described_all_the_same() -> None:
    from typing import Annotated

    from flytekit.core.type_engine import TypeEngine

    from slipstream.flyte.metadata import stage_metadata
    from slipstream.shared.artifacts.results.compression import ModelSize

    assert stage_metadata("report")
    described = TypeEngine.to_literal_type(Annotated[ModelSize, {"unit": "parameters"}])
    assert described == TypeEngine.to_literal_type(ModelSize)


#: Imports modules as a pod does, inside of flytekit's execution of a task, and says after each what is loaded.
AS_A_POD = """
import importlib, sys
from flytekit.bin.entrypoint import setup_execution
before = set(sys.modules)
with setup_execution(raw_output_data_prefix="raw"):
    for name in {!r}:
        importlib.import_module(name)
        print("loaded", *(set(sys.modules) - before))
        assert "torch" not in before and "scipy" not in before
"""


def as_a_pod(*modules: str, then: str = "") -> list[str]:
    code = AS_A_POD.format(modules) + then
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()


def test_a_pod_loads_no_library_before_its_work_and_describes_no_dataclass() -> None:
    """Import tasks without a process group, one after the other."""
    rooms = [f"tasks.{room}" for room in PLAIN]
    said = [set(line.split()) for line in as_a_pod(*rooms) if line.startswith("loaded ")]
    for room, loaded in zip(rooms, said, strict=True):
        assert room in loaded
        unwanted = {"mashumaro.jsonschema", "numpy", "pandas", "pyarrow", "boto3", "torch", "scipy", *HEAVY}
        assert not loaded & unwanted, room


@pytest.mark.prove
def test_torch_beside_flytekit_loads_no_pandas_before_it_is_used() -> None:
    then = (
        "print(not {'pandas._libs', 'pyarrow.lib'} & set(sys.modules))\n"
        "import pandas; print(pandas.DataFrame({'a': [1]}).shape)\n"
    )
    assert as_a_pod("tasks.train", "slipstream.pipeline.train.run", then=then)[-2:] == ["True", "(1, 1)"]


@pytest.mark.parametrize("engine", ["engine"])
def test_a_report_loads_nothing_that_draws_before_it_draws(engine: str) -> None:
    (loaded,) = loaded_by(f"slipstream.pipeline.report.{engine}")
    assert "jinja2" in loaded and not loaded & {"torch", "matplotlib", "scipy"}


@pytest.mark.parametrize("room", ["prepare", "train", "evaluate", "compress", "export", "collectives", "report"])
def test_engines_know_nothing_of_flyte(room: str) -> None:
    from pathlib import Path

    engines = list(Path("slipstream/pipeline", room).rglob("*.py"))
    assert engines and not [path for path in engines if "flytekit" in path.read_text(encoding="utf-8")]
