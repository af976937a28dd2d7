"""The layout of the code: arrows point down only, and there is no circle."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tasks.artifacts.versions import ROOT, imported_names, project_imports

#: What each room of ``tasks/`` may import besides itself: the layers below it. Rooms of stages share no engine.
ERRORS = {"errors"}
BASE = ERRORS | {"settings"}
SHARED = BASE | {
    "logs",
    "text_table",
    "artifacts",
    "storage",
    "distributed",
    "hardware",
    "models",
    "network",
    "gate",
    "timing",
}
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "logs": set(),
    "cron": set(),
    "text_table": set(),
    "settings": ERRORS,
    "storage": ERRORS,
    "distributed": ERRORS,
    "hardware": BASE | {"text_table"},
    "artifacts": BASE | {"storage"},
    **dict.fromkeys(("models", "gate"), BASE | {"artifacts"}),
    "timing": {"artifacts", "models"},
    "network": BASE | {"logs", "artifacts", "storage", "hardware"},
    "flyte": BASE | {"logs", "artifacts", "storage", "distributed", "hardware"},
    **dict.fromkeys(("preprocess", "train", "evaluate", "compress", "export", "collectives"), SHARED),
    **dict.fromkeys(("report", "doctor"), SHARED | {"cron"}),
}
#: The configuration of a run names the settings of every stage; these name it, as it comes to them whole.
CONFIG = {
    "train/__main__.py",
    "collectives/__main__.py",
    "collectives/task.py",
    "export/registry/task.py",
    "preprocess/task.py",
    "report/task.py",
}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in sorted((ROOT / "tasks").rglob("*.py"))}
IMPORTS = {module: set(project_imports(path)) - {module} for module, path in MODULES.items()}


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) not in ("", "config", "task")])
def test_arrows_point_down(module: str) -> None:
    room, path = room_of(module), MODULES[module].relative_to(ROOT / "tasks").as_posix()
    allowed = ALLOWED[room] | {room}
    if path.endswith("/task.py"):
        allowed |= {"flyte"}
    if path in CONFIG:
        allowed |= {"config"}
    found = {room_of(imported) for imported in IMPORTS[module]} - {""}
    assert found <= allowed, f"{path} imports {sorted(found - allowed)}"


def test_there_is_no_circle() -> None:
    """Imports inside functions count: they only hide a circle."""
    left = {module: set(imports) for module, imports in IMPORTS.items()}
    while free := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import each other, or wait for such: {sorted(left)}"


def test_only_tasks_and_the_glue_import_flytekit() -> None:
    knows = [p for p in MODULES.values() if any(name.startswith("flytekit") for name in imported_names(p))]
    rooms = {p.relative_to(ROOT / "tasks").as_posix() for p in knows}
    assert rooms and not {name for name in rooms if Path(name).name != "task.py" and not name.startswith("flyte/")}


def test_a_folder_fits_on_one_screen() -> None:
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES.values()}}
    assert not {folder.name: size for folder, size in sizes.items() if size > 16}


def test_the_readme_names_every_folder() -> None:
    tree = (ROOT / "README.md").read_text(encoding="utf-8").split("## Architecture\n\n```\n")[1].split("```")[0]
    above, named = list[str](), set[str]()
    for indent, folder in re.findall(r"^( *)(\w+(?:/\w+)*)/ ", tree, re.MULTILINE):
        above = [*above[: len(indent) // 2], folder]
        named.add("/".join(above))
    code = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()}
    assert {name for name in named if name.startswith("tasks")} == code


def test_tests_share_helpers_only_through_support() -> None:
    """A file of tests may be moved, renamed or run alone: no other imports from it."""
    importing = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(from|import) tests\b(?!\.support\b)", line)
    ]
    assert not importing
