"""Every path, command, workflow and link of every page exists."""

import re
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from slipstream.operations.doctor.archive import RegistrationArchive
from slipstream.pipeline.report import run_directory
from slipstream.shared.artifacts.versions import ROOT
from slipstream.subcommands import SUBCOMMANDS

PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
#: Folders of the project; a path that starts with one of them is in it.
FOLDERS = "workflows|tasks|slipstream|benchmarks|examples|images|monitoring|docs|tests"
#: Paths of files that a run, a registry or a table makes, of other projects, machines and clusters.
ELSEWHERE = re.compile(
    r"https?:|\w+://|/|[\w.-]+\.(com|sh|io|org|net|ai)/|.*(…|[{}A-Z]{2})"  # addresses, labels, placeholders
    r"|(tables|history|models|_quarantine|\.slipstream|\.venv|\.well-known)\b"  # of stores and environments
    r"|runs/(gpu|rehearsal)|(adapter|hugging-face|model|tokenizer|test|train|val|validation)/|doc/PERFORMANCE"
)
#: Parts of ``runs/…/`` that a run directory has.
OF_A_RUN = {
    *(run_directory.PREPARED, run_directory.TRAINED, run_directory.MODEL, run_directory.REPORT),
    *(run_directory.SUMMARY, run_directory.CARD, run_directory.CARD_DATA, run_directory.DATED_CARD),
    *("comparison.html", "compare.html", "checkpoints"),
}


@cache
def files() -> set[str]:
    """All files and folders of the project, as paths from its root."""
    tops = [ROOT / name for name in (".ci", *FOLDERS.split("|"))]
    found = [*ROOT.iterdir(), *(path for top in tops for path in top.rglob("*") if "__pycache__" not in path.parts)]
    return {path.relative_to(ROOT).as_posix() for path in found}


def exists(path: str, page: Path) -> bool:
    """Return True for a path from the root or the page, or the end of a path of the project."""
    clean = path.rstrip("/").removeprefix("./")
    if "*" in clean:
        return any(ROOT.glob(clean))
    return (page.parent / clean).exists() or any(each == clean or each.endswith(f"/{clean}") for each in files())


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_text_exist(page: Path) -> None:
    named = re.findall(r"`([\w.…*{}/:-]+/[\w.…*{}/-]*)`", FENCE.sub("", text_of(page)))
    runs = {part for path in named for part in re.findall(r"^runs/…/([\w.-]+)", path)}
    assert runs <= OF_A_RUN
    missing = [path for path in named if not path.startswith("runs/…") and not ELSEWHERE.match(path)]
    assert not [path for path in missing if not exists(path, page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_commands_in_code_exist(page: Path) -> None:
    for block in FENCE.findall(text_of(page)):
        words = re.findall(rf"(?<![\w/.:…-])(?:{FOLDERS})/[\w./-]*\w", block)
        assert not [path for path in words if not exists(path, page)], block
        assert set(re.findall(r"\bruns/(?:…|\d{4}[\w-]*)/([\w.-]+)", block)) <= OF_A_RUN, block
        named = re.findall(r"^(?:\$ |\.venv/bin/)?slipstream ([a-z][a-z-]*)", block, re.MULTILINE)
        assert set(named) <= SUBCOMMANDS.keys(), block


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_workflows_of_commands_are_in_their_files(page: Path) -> None:
    for path, workflow in re.findall(r"(workflows/\w+\.py)\s+(?:\\\n\s+)?([a-z_]+)\b", text_of(page)):
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {workflow}\(", source, re.MULTILINE), f"{page.name}: {path} {workflow}"


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_pages_and_their_sections(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(page))):
        path, _, section = target.partition("#")
        if re.match(r"https?:|mailto:", target):
            continue
        linked = (page.parent / path) if path else page
        assert linked.exists(), target
        assert not section or section in anchors(linked), target


def test_the_counts_of_the_doctor_are_those_of_the_package(
    package_for: Callable[[str], RegistrationArchive],
) -> None:
    package = package_for("local")
    counts = len(package.tasks), len(package.workflows), len(package.launch_plans)
    shown = re.findall(r"of (\d+) tasks, (\d+) workflows, (\d+) launch plans", text_of(ROOT / "docs/cluster.md"))
    assert shown == [tuple(map(str, counts))], "run `slipstream doctor flyte-package.tgz` and copy its line"


def test_a_missing_path_is_found(tmp_path: Path) -> None:
    assert exists("slipstream/pipeline/train/config.py", PAGES[0]) and exists("checkpoint/manager.py", PAGES[0])
    assert not exists("slipstream/pipeline/train/settings.py", PAGES[0]) and not exists("config", tmp_path / "page")
    assert all(first != second for first, second in pairwise(PAGES))
