"""The layout of the code: three floors, imports point down only, also those by string, and there is no circle."""

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from slipstream.shared.artifacts.versions import ROOT, cached_syntax
from slipstream.subcommands import SUBCOMMANDS
from tests.support.documents.imports import FLOORS, GROUPS, IMPORTS, MODULES, loaded_by_string, names_in_strings

#: Imports that each package of ``slipstream/`` may have besides itself. First the foundations, then the stages. Stages
#: do not import each other. Exceptions: promotion evaluates exported packages, scoring runs promoted models, the
#: trials of a sweep are trainings, and runs are compared as promotion compares models.
ERRORS = {"errors"}
BASE = ERRORS | {"settings", "spelling"}
FOUNDATIONS = BASE | {
    "toml_file",
    "stages",
    "logs",
    "one_line",
    "formatting",
    "untrusted_files",
    "artifacts",
    "storage",
    "distributed",
    "machine",
    "telemetry",
    "profiles",
    "models",
    "interconnect",
    "comparison",
    "source",
    "language",
    "checkpoint_interval",
}
#: Groups that a group may not import.
GROUP_ABOVE = {"operations": set[str](), "pipeline": {"operations"}, "shared": {"operations", "pipeline"}}
STAGES = ("prepare", "train", "evaluate", "compress", "export", "collectives")
ALLOWED: dict[str, set[str]] = {
    "one_line": set(),
    "errors": {"one_line"},
    "logs": {"one_line"},
    "cron": set(),
    "checkpoint_interval": set(),
    "flytekit_plugin": {"flyte"},
    "sessions": {"flytekit_plugin"},
    "formatting": {"one_line"},
    "untrusted_files": set(),
    "toml_file": ERRORS,
    "stages": set(),
    "settings": ERRORS | {"toml_file", "spelling"},
    "spelling": ERRORS,
    "storage": ERRORS | {"untrusted_files"},
    "machine": ERRORS | {"logs"},
    "distributed": ERRORS | {"machine"},
    "profiles": BASE | {"stages", "formatting", "toml_file", "machine"},
    "artifacts": BASE | {"logs", "stages", "storage", "distributed", "untrusted_files"},
    "source": BASE | {"logs", "artifacts", "storage", "cron"},
    "language": BASE | {"one_line", "artifacts", "storage", "distributed"},
    "models": BASE | {"logs", "artifacts", "storage", "machine"},
    "comparison": BASE | {"formatting", "artifacts", "models"},
    "telemetry": BASE | {"logs", "one_line", "formatting", "toml_file", "artifacts", "storage", "machine", "profiles"},
    "interconnect": BASE | {"logs", "artifacts", "storage", "machine"},
    **dict.fromkeys(STAGES, FOUNDATIONS),
    "promote": FOUNDATIONS | {"export"},
    "score": FOUNDATIONS | {"export", "promote"},
    "sweep": FOUNDATIONS | {"train", "config"},
    "report": FOUNDATIONS | {"cron", "promote"},
    "doctor": FOUNDATIONS | {"cron"},
    "plan": FOUNDATIONS,
    "manifests": FOUNDATIONS,
    "flyte": FOUNDATIONS | {"config", "config_values", "doctor", "evaluate", "export"},
    "proofs": FOUNDATIONS | {"config", "flyte", "doctor", "plan", "report", *STAGES},
    "config": BASE | {"artifacts", "source", "models", "promote", "score", "sweep", *STAGES},
    "config_values": BASE | {"config", "logs"},
    "schema": BASE | {"config"},
    "versions": {"artifacts"},
    "subcommands": ERRORS | {"machine"},
    "__main__": {"subcommands", "export", "distributed"},
}
#: Commands read the configuration of a run, which names the settings of every stage.
READ_CONFIG = {
    "slipstream/pipeline/train/command.py",
    "slipstream/pipeline/train/memory/command.py",
    "slipstream/pipeline/collectives/command.py",
}


#: Commands that need a clone of the project may be in the upper floors; others are in what is installed.
COMMANDS = {known.module for known in SUBCOMMANDS.values()}
IN_CLONE = {known.module for known in SUBCOMMANDS.values() if known.in_clone}
#: Folders of Python that no installation has and nothing that is shipped may import.
UNSHIPPED = ("tests", "benchmarks", "harness", "monitoring")
#: Targets of the Makefile for those who change the project.
DEVELOPMENT = {"test", "check", "prove", "test-torch-oldest", "docs"}


@cache
def loaded_modules() -> dict[str, set[str]]:
    """Return the imports of every module, at its top, inside functions and by the names of modules in strings."""
    return {module: imports | loaded_by_string(module) for module, imports in IMPORTS.items()}


def package_of(module: str) -> str:
    """Return the package of ``slipstream/`` without its group, or the module's own name outside of packages."""
    parts = module.split(".")[1:]
    return ".".join(parts[1:2] if parts[:1] and parts[0] in GROUPS else parts[:1])


def group_of_module(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in GROUPS else ""


def floor_of(module: str) -> int:
    return FLOORS.index(module.split(".")[0])


def test_the_floors_are_workflows_above_tasks_above_slipstream() -> None:
    for module, imports in loaded_modules().items():
        above = {name for name in imports if floor_of(name) < floor_of(module)}
        assert above <= (IN_CLONE if module == "slipstream.subcommands" else set()), module


def test_imports_by_string_are_found() -> None:
    assert loaded_by_string("slipstream.subcommands") == COMMANDS
    assert "slipstream.operations.proofs.gpu.run_check" in loaded_modules()["slipstream.operations.proofs.gpu.command"]


def test_what_is_shipped_imports_and_names_nothing_of_the_tests() -> None:
    for path in (*MODULES.values(), *sorted((ROOT / "images").glob("*.py"))):
        names = {*cached_syntax(path).imports, *names_in_strings(path)}
        assert not [name for name in names if name.split(".")[0] in UNSHIPPED], path


def test_images_and_targets_for_users_do_without_the_tests() -> None:
    assert not [path.name for path in (ROOT / "images").iterdir() if re.search(r"\btests\b", path.read_text())]
    rules = re.split(r"^([\w-]+):(?!=).*\n", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    recipes = dict(zip(rules[1::2], rules[2::2], strict=True))
    commands = {name: "".join(re.findall(r"^\t.*\n", recipe, re.MULTILINE)) for name, recipe in recipes.items()}
    assert {"run", "rehearse", "gpu", *DEVELOPMENT} <= commands.keys()
    assert {name for name, text in commands.items() if re.search(r"\btests\b|-m pytest", text)} <= DEVELOPMENT


def test_groups_are_the_folders_of_slipstream() -> None:
    folders = {path.name for path in (ROOT / "slipstream").iterdir() if (path / "__init__.py").is_file()}
    assert folders == {*GROUPS, "flyte"}
    for group in GROUPS:
        assert not imports_of_group(group) & GROUP_ABOVE[group], group


def imports_of_group(group: str) -> set[str]:
    modules = (module for module in loaded_modules() if group_of_module(module) == group)
    return {group_of_module(name) for module in modules for name in loaded_modules()[module]}


def test_inside_the_lowest_floor_imports_point_down() -> None:
    for module in (name for name in MODULES if name.startswith("slipstream.") and package_of(name)):
        package = package_of(module)
        allowed = ALLOWED[package] | {package}
        if MODULES[module].relative_to(ROOT).as_posix() in READ_CONFIG:
            allowed |= {"config", "config_values"}
        loaded = loaded_modules()[module] - (COMMANDS if module == "slipstream.subcommands" else set())
        found = {package_of(imported) for imported in loaded} - {""}
        assert found <= allowed, f"{module} imports {sorted(found - allowed)}"


def test_a_class_name_has_one_meaning() -> None:
    defined = [
        node.name
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    assert not [name for name, times in Counter(defined).items() if times > 1]


def test_there_is_no_circle() -> None:
    """Imports inside functions count: they only hide a circle."""
    left = {module: set(imports) for module, imports in IMPORTS.items()}
    while free := [module for module, imports in left.items() if not imports & left.keys()]:
        for module in free:
            del left[module]
    assert not left, f"these import each other, or wait for such: {sorted(left)}"


def test_only_the_two_upper_floors_and_one_folder_import_flytekit() -> None:
    knows = {
        name for name, path in MODULES.items() if any(i.startswith("flytekit") for i in cached_syntax(path).imports)
    }
    floors = {name.split(".")[0] for name in knows if not name.startswith("slipstream.flyte.")}
    assert floors == {"tasks", "workflows"}


#: Most parameters of a workflow, and most fields of a tuple of promises.
MOST_PROMISES = 6
#: Tuples of tasks with more fields. Fewer would need further pods, or inputs that are attributes of a structure, for
#: which Flyte's cache never hits (flyte#6517).
WIDE_TUPLES = {"tasks.config.Sections": 8, "tasks.inputs.RunInputs": 14}


def decorators(node: ast.FunctionDef | ast.ClassDef) -> set[str]:
    calls = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {each.id for each in calls if isinstance(each, ast.Name)}


def fields_of(node: ast.ClassDef) -> int:
    """Return the number of fields of a ``NamedTuple`` or dataclass; 0 for other classes."""
    is_tuple = any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)
    found = sum(isinstance(each, ast.AnnAssign) for each in node.body)
    return found if is_tuple or "dataclass" in decorators(node) else 0


def test_workflows_hand_on_every_promise_by_its_name() -> None:
    trees = {name: ast.parse(MODULES[name].read_text(encoding="utf-8")) for name in MODULES if floor_of(name) < 2}
    nodes = [(module, node) for module, tree in trees.items() for node in ast.walk(tree)]
    functions = [node for _, node in nodes if isinstance(node, ast.FunctionDef)]
    workflows = [node for node in functions if "profile_workflow" in decorators(node)]
    entities = {node.name for node in functions if decorators(node) & {"task", "profile_workflow"}}
    assert len(workflows) > 20 and {"train", "prepare_by_units", "report"} <= entities

    splatted = [
        f"{MODULES[module].relative_to(ROOT)}:{node.lineno}"
        for module, node in nodes
        if isinstance(node, ast.Call) and any(keyword.arg is None for keyword in node.keywords)
        if module.startswith("workflows.") or (isinstance(node.func, ast.Name) and node.func.id in entities)
    ]
    assert not splatted
    many = {node.name for node in workflows if len(node.args.args + node.args.kwonlyargs) > MOST_PROMISES}
    assert many == {"retrain_on_schedule"}  # launch plans alone start it: those of retrain_if_drifted, and the time
    widths = {f"{module}.{node.name}": fields_of(node) for module, node in nodes if isinstance(node, ast.ClassDef)}
    assert {name: width for name, width in widths.items() if width > MOST_PROMISES} == WIDE_TUPLES


def test_a_folder_fits_on_one_screen() -> None:
    sizes = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in MODULES.values()}}
    assert not {folder.name: size for folder, size in sizes.items() if size > 16}


def folders_of_the_tree() -> set[str]:
    """The folders that the tree of the page names, with those above them."""
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    tree = page[page.index("```\nworkflows/ ") + 4 :].split("```")[0]
    above, named = list[str](), set[str]()
    for indent, folder in re.findall(r"^( *)(\w+(?:/\w+)*)/ ", tree, re.MULTILINE):
        above = [*above[: len(indent) // 2], folder]
        named.add("/".join(above))
    return {name for name in named if name.startswith(FLOORS)}


def test_the_tree_names_every_folder_and_the_readme_the_upper_two_levels() -> None:
    code = {path.parent.relative_to(ROOT).as_posix() for path in MODULES.values()}
    assert folders_of_the_tree() == code
    tour = (ROOT / "README.md").read_text(encoding="utf-8").split("## Tour\n")[1].split("\n## ")[0]
    named = re.findall(r"`((?:\w+/)+)`", tour)
    grouped = rf"slipstream/({'|'.join(GROUPS)})/"
    packages = {re.sub(grouped, "", name).removeprefix("slipstream/") for name in code}
    upper = {name for name in packages if "/" not in name}
    assert sorted(name.rstrip("/") for name in named) == sorted(upper)


def test_the_readme_is_read_at_once_and_names_what_is_there() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 150
    pages = set(re.findall(r"\]\((docs/\w+\.md)", readme))
    assert pages == {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    tour = re.findall(r"^\d\. `([\w/]+\.py)`", readme, re.MULTILINE)
    assert len(tour) == 5 and all((ROOT / path).is_file() for path in tour)


@pytest.mark.parametrize("document", [ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))], ids=str)
def test_the_tests_that_a_document_names_are_there(document: Path) -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", document.read_text())
    assert not [name for name in named if not (ROOT / name).exists()]
    assert len(named) > 10 or document.name not in ("SECURITY.md", "guarantees.md")


def test_tests_share_helpers_only_through_support() -> None:
    """A file of tests may be moved, renamed or run alone: no other imports from it."""
    importing = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.match(r"\s*(from|import) tests\b(?!\.support\b)", line)
    ]
    assert not importing


def test_text_is_read_and_written_with_an_encoding() -> None:
    """Under ``LC_ALL=C PYTHONUTF8=0`` the default is ASCII. Ruff's PLW1514 does not see a path whose type it cannot
    infer, nor the output of other programs."""

    def lacks_encoding(call: ast.Call) -> bool:
        named = {keyword.arg for keyword in call.keywords}
        name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if "encoding" in named:
            return False
        is_process = name in ("run", "Popen") and "text" in named
        return is_process or (name, len(call.args)) in {("read_text", 0), ("write_text", 1)}

    lacking = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for folder in ("slipstream", "tasks", "workflows")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and lacks_encoding(node)
    ]
    assert not lacking
