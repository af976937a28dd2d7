"""Arguments that ``make`` passes to pip, recorded by a fake Python."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support import REPOSITORY

#: ``-m venv DIRECTORY`` puts this program there as its Python; every other call is written down.
PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m venv" ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; exit; fi
printf '%s\\n' "$@" >> "$NOTES"
"""
CONSTRAINED = ["--constraint", "constraints.txt", "--editable", ".[dev]"]


@pytest.mark.parametrize("wheels", ["", "https://wheels.test/whl/cpu?channel=a&b=$c"])
def test_make_installs_the_build_of_torch_that_the_user_names(wheels: str, tmp_path: Path) -> None:
    python, notes = tmp_path / "python", tmp_path / "notes"
    python.write_text(PYTHON)
    python.chmod(0o755)
    made = tmp_path / "made"
    subprocess.run(
        ["make", f"{made}/.ready", f"VENV={made}", f"PYTHON={python}", f"TORCH_WHEELS={wheels.replace('$', '$$')}"],
        cwd=REPOSITORY,
        env={**os.environ, "NOTES": str(notes)},
        check=True,
        capture_output=True,
    )
    said = notes.read_text().splitlines()
    index = ["--extra-index-url", wheels] if wheels else []
    assert said[said.index("install") :] == ["install", "--quiet", *index, *CONSTRAINED]
