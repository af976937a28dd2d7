"""A stage's key follows the code that computes its result: the import closure of its engine, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.artifacts import versions
from slipstream.stages import STAGES

CACHES = (versions.code_version, versions.imported_names, versions.source_of)
CACHED = [name for name, stage in STAGES.items() if stage.engines]
SOURCES = {
    "slipstream/__init__.py": "",
    "slipstream/errors.py": "ERROR = 1",
    "slipstream/train/__init__.py": "",
    "slipstream/train/run.py": "from slipstream.train import loop\ndef run():\n    from slipstream.errors import ERROR",
    "slipstream/train/loop.py": "import slipstream.train.data.order",
    "slipstream/train/data/__init__.py": "",
    "slipstream/train/data/order.py": "import math",
    "tasks/train.py": "import slipstream.train.run",
    "slipstream/prepare/__init__.py": "",
    "slipstream/prepare/page.py": "COLOUR = 'red'",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small project in place of this one."""
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_counts_if_and_only_if_the_engine_imports_it(project: Path, name: str) -> None:
    before = versions.code_version("train")
    (project / name).write_text(SOURCES[name] + "\n# changed")
    forget()
    changed = versions.code_version("train") != before
    assert changed is (name not in ("tasks/train.py", "slipstream/prepare/__init__.py", "slipstream/prepare/page.py"))


def test_an_import_inside_a_function_is_followed(project: Path) -> None:
    assert "slipstream.errors" in versions.import_closure(("slipstream.train.run",))


def parsed(source: str) -> set[str]:
    """The names that a source imports, by Python's own parser."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_the_pattern_finds_the_imports_that_the_parser_finds() -> None:
    folders = ("slipstream", "tasks", "workflows")
    sources = [path for folder in folders for path in (versions.ROOT / folder).rglob("*.py")]
    assert len(sources) > 250
    for path in sources:
        assert set(versions.imported_names(path)) == parsed(path.read_text()), path


IMPORTS = """
import os, tasks.a as a, tasks.b  # tasks.no
from tasks.c import (  # tasks.no
    one as first,  # two
    three,
)
from tasks.d import four, five as six
def later(important=""):
    if important:
        from tasks.e import seven
        import tasks.f
    imports = "import"
    fromage = "from tasks.no import cheese"
"""


def test_imports_of_every_shape_are_found(tmp_path: Path) -> None:
    (tmp_path / "source.py").write_text(IMPORTS)
    assert set(versions.imported_names(tmp_path / "source.py")) == parsed(IMPORTS)


def test_an_engine_that_does_not_exist_is_an_error(project: Path) -> None:
    with pytest.raises(ValueError, match=r"slipstream\.train\.gone: no such module"):
        versions.import_closure(("slipstream.train.gone",))


@pytest.mark.parametrize("stage", CACHED)
def test_the_closure_holds_every_module_that_importing_the_engine_loads(stage: str) -> None:
    """What Python itself loads is part of what was found in the sources; more is found, as imports in functions are."""
    engines = STAGES[stage].engines
    code = f"import {', '.join(engines)}, sys; print(*(m for m in sys.modules if m.split('.')[0] == 'slipstream'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(run.stdout.split()) <= set(versions.import_closure(engines))


#: By what name the libraries are imported.
IMPORTED = {
    "pillow": "PIL",
    "scikit-learn": "sklearn",
    "torch-pruning": "torch_pruning",
    "onnxruntime-gpu": "onnxruntime",
}
#: They move bytes, read settings, look at the machine or show progress, and compute nothing of a result.
COMPUTE_NOTHING = {
    *("adlfs", "aiohttp", "azure", "boto3", "botocore", "fsspec", "gcsfs", "google", "requests", "s3transfer"),
    *("click", "filelock", "pydantic", "pydantic_core", "yaml"),
    *("psutil", "pynvml", "threadpoolctl", "tqdm"),
    *("cryptography", "google_crc32c", "safetensors", "xxhash"),
}


def imported_libraries(stage: str) -> set[str]:
    return {
        name.split(".")[0]
        for path in versions.import_closure(STAGES[stage].engines).values()
        for name in versions.imported_names(path)
    } - {*sys.stdlib_module_names, "slipstream"}


def listed_libraries(stage: str) -> set[str]:
    return {IMPORTED.get(library, library) for library in STAGES[stage].libraries}


@pytest.mark.parametrize("stage", CACHED)
def test_every_library_of_a_stage_is_imported_by_its_code(stage: str) -> None:
    used_by_onnx_exporter = {"onnxscript"}
    assert listed_libraries(stage) - used_by_onnx_exporter <= imported_libraries(stage)


@pytest.mark.parametrize("stage", CACHED)
def test_every_library_that_computes_is_part_of_the_key(stage: str) -> None:
    assert imported_libraries(stage) - COMPUTE_NOTHING <= listed_libraries(stage)
