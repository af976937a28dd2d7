"""A stage's key depends on the import closure of its engine, and on nothing else."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.flyte.homes import checkpoint_address
from slipstream.flyte.stage import describe_input
from slipstream.shared.artifacts import syntax, versions
from slipstream.shared.artifacts.workspaces import content_key
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.factory_code import fingerprint_model
from slipstream.shared.profiles.profile import current_profile
from slipstream.shared.stages import STAGES
from tests.support.wording import refuses

CACHES = (
    versions.code_version,
    versions.closure_digest,
    versions.cached_syntax,
    versions.module_digest,
    versions.module_source_path,
    syntax.kept_syntaxes,
)
CACHED = [name for name, stage in STAGES.items() if stage.engines]
SOURCES = {
    "slipstream/__init__.py": "",
    "slipstream/pipeline/__init__.py": "",
    "slipstream/shared/__init__.py": "",
    "slipstream/shared/errors.py": "ERROR = 1",
    "slipstream/shared/logs.py": "from slipstream import text",
    "slipstream/text.py": "TEXT = 1",
    "slipstream/pipeline/train/__init__.py": "",
    "slipstream/pipeline/train/run.py": "from slipstream.pipeline.train import loop\n"
    "def run():\n    from slipstream.shared.errors import ERROR",
    "slipstream/pipeline/train/loop.py": "import slipstream.pipeline.train.data.order, slipstream.shared.logs\n"
    "import slipstream.shared.telemetry.ring",
    "slipstream/pipeline/train/limits.toml": "most = 1",
    "slipstream/shared/telemetry/__init__.py": "",
    "slipstream/shared/telemetry/ring.py": "SECONDS = 1",
    "slipstream/pipeline/train/data/__init__.py": "",
    "slipstream/pipeline/train/data/order.py": "from pathlib import Path\n"
    "Path(__file__).parent.with_name('limits.toml')",
    "slipstream/pipeline/train/data/limits.toml": "most = 1",
    "tasks/train.py": "import slipstream.pipeline.train.run",
    "slipstream/pipeline/prepare/__init__.py": "",
    "slipstream/pipeline/prepare/page.py": "COLOUR = 'red'",
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A small project in place of this one."""
    for name, source in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(source)
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    for cached in CACHES:
        cached.cache_clear()


#: Not imported by the engine, behind a seam, or not read.
OUTSIDE = (
    *(
        "tasks/train.py",
        "slipstream/pipeline/prepare/__init__.py",
        "slipstream/pipeline/prepare/page.py",
        "slipstream/pipeline/train/limits.toml",
    ),
    *(
        "slipstream/shared/logs.py",
        "slipstream/text.py",
        "slipstream/shared/telemetry/__init__.py",
        "slipstream/shared/telemetry/ring.py",
    ),
)


@pytest.mark.parametrize("name", SOURCES)
def test_a_file_counts_if_and_only_if_the_engine_imports_or_reads_it(project: Path, name: str) -> None:
    before = versions.code_version("train")
    (project / name).write_text(SOURCES[name] + "\nchanged = 1")
    forget()
    assert (versions.code_version("train") != before) is (name not in OUTSIDE)


@pytest.mark.parametrize("name", [name for name in SOURCES if name.endswith(".py")])
def test_comments_and_docstrings_change_no_version(project: Path, name: str) -> None:
    before = versions.code_version("train")
    (project / name).write_text(f'"""A docstring."""\n\n{SOURCES[name]}  # a comment\n')
    forget()
    assert versions.code_version("train") == before


def test_the_number_of_a_seam_changes_the_versions_that_reach_it(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = versions.code_version("train")
    monkeypatch.setitem(versions.SEAMS, "slipstream.shared.logs", 2)
    forget()
    assert versions.code_version("train") != before


def test_an_edit_changes_exactly_the_stages_that_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``x + 1`` becomes ``x + 2`` in a module of this project, which only training runs."""
    before = {stage: versions.code_version(stage) for stage in CACHED}
    path = versions.ROOT / "slipstream/pipeline/train/loop/step.py"
    plain = Path.read_bytes

    def edited(self: Path) -> bytes:
        return plain(self) + (b"\nEDITED = 1 + 2\n" if self == path else b"")

    forget()
    monkeypatch.setattr(Path, "read_bytes", edited)
    after = {stage: versions.code_version(stage) for stage in CACHED}
    monkeypatch.undo()
    forget()
    assert [stage for stage in CACHED if after[stage] != before[stage]] == ["train"]


@pytest.mark.prove
def test_reformatting_every_module_changes_no_key_of_a_stage_and_no_checkpoint_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All sources of this project, and a factory of a user's own, without comments and in another format."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text("# a comment\ndef build(signature):\n    x = (1 +\n         2)\n    return x\n")
    model, placement = ModelConfig("mine:build"), current_profile().placement("train")

    def keys() -> dict[str, str]:
        code = fingerprint_model(model)
        inputs = {"model": model, "code": code, "prepared": "content"}
        described = {name: describe_input(value) for name, value in inputs.items()}
        made = {stage: content_key(stage, versions.code_version(stage), described) for stage in CACHED}
        return made | {"checkpoints": checkpoint_address("train", inputs, placement)}

    before, plain, rewritten = keys(), Path.read_bytes, set[Path]()

    def reformatted(self: Path) -> bytes:
        source = plain(self)
        if self.suffix != ".py":
            return source
        rewritten.add(self)
        return b'"""Another docstring."""\n' + ast.unparse(without_docstring(source)).encode() + b"  # a comment\n"

    forget()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(Path, "read_bytes", reformatted)
    after = keys()
    monkeypatch.undo()
    forget()
    assert after == before and len(rewritten) > 200 and tmp_path / "mine.py" in rewritten


def without_docstring(source: bytes) -> ast.Module:
    tree = ast.parse(source)
    if ast.get_docstring(tree) is not None:
        tree.body.pop(0)
    return tree


def test_an_edit_of_a_factory_changes_key_and_checkpoint_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    homes = set()
    for source in ("def build(signature):\n    return 1", "def build(signature):\n    return 2"):
        (tmp_path / "mine.py").write_text(source)
        code = fingerprint_model(ModelConfig("mine:build"))
        homes.add(checkpoint_address("train", {"code": code}, current_profile().placement("train")))
    assert len(homes) == 2


def test_an_import_inside_a_function_is_followed(project: Path) -> None:
    assert "slipstream.shared.errors" in versions.import_closure(("slipstream.pipeline.train.run",))


def test_an_engine_that_does_not_exist_is_an_error(project: Path) -> None:
    with refuses(ValueError, match=r"slipstream\.pipeline\.train\.gone:"):
        versions.import_closure(("slipstream.pipeline.train.gone",))


@pytest.mark.parametrize(
    "stage", [pytest.param(stage, marks=[] if stage == "train" else [pytest.mark.prove]) for stage in CACHED]
)
def test_the_closure_holds_every_module_that_importing_the_engine_loads(
    stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Python itself loads is part of what was found in the sources; more is found, as imports in functions are."""
    engines = STAGES[stage].engines
    code = f"import {', '.join(engines)}, sys; print(*(m for m in sys.modules if m.split('.')[0] == 'slipstream'))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    monkeypatch.setattr(versions, "SEAMS", {})
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
    *(
        "adlfs",
        "aiohttp",
        "azure",
        "boto3",
        "botocore",
        "fsspec",
        "gcsfs",
        "google",
        "huggingface_hub",
        "requests",
        "s3transfer",
    ),
    *("click", "filelock", "pydantic", "pydantic_core", "yaml"),
    *("psutil", "pynvml", "threadpoolctl", "tqdm"),
    "triton",  # torch pins its release
    *("cryptography", "google_crc32c", "safetensors", "xxhash"),
}


def imported_libraries(stage: str) -> set[str]:
    return {
        name.split(".")[0]
        for path in versions.import_closure(STAGES[stage].engines).values()
        for name in versions.cached_syntax(path).imports
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
