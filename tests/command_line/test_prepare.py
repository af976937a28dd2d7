"""Preparing alone, as a person runs it: the card, the prepared data and a closing block that says what is in it."""

from __future__ import annotations

import json
from pathlib import Path

from tasks.preprocess.prepared import PreparedData
from tests.command_line.conftest import Run

ROWS = 300


def table() -> str:
    """Three hundred rows, one of which has a letter for a number and one no target."""
    lines = [f"{i % 17},{(i * 37) % 101},{'Oslo' if i % 3 else 'Rome'},{'yes' if i % 2 else 'no'}" for i in range(ROWS)]
    lines[100] = "x,5,Oslo,yes"
    lines[200] = "5,5,Oslo,"
    return "number,amount,city,bought\n" + "\n".join(lines) + "\n"


def test_the_prepared_data_the_card_and_what_is_in_them(pyflyte_run: Run, tmp_path: Path) -> None:
    (tmp_path / "shop.csv").write_text(table())
    arguments = ("--data", "shop.csv", "--target", "bought", "--config", '{"training": {"epochs": 3}}')
    first = pyflyte_run(*arguments, workflow="prepare")
    assert first.returncode == 0, first.stdout
    (run,) = (tmp_path / "runs").iterdir()
    said = " ".join(first.stdout.split())
    for words in (
        "shop.csv → bought",
        "300 rows read, 298 kept, 2 quarantined",
        "1 row: not number in column 'number' (first in shop.csv, line 102)",
        "1 row: the target is missing in column 'bought' (first in shop.csv, line 202)",
        "2 numeric, 1 categorical, 1 target",
        f"Card runs/{run.name}/card.html",
        f"Prepared runs/{run.name}/prepared",
    ):
        assert words in said, first.stdout
    data = PreparedData.open(run / "prepared")
    data.artifact.check_sha256()
    card = json.loads((run / "card.json").read_text())
    assert card == data.card and card["rows"]["kept"] == sum(
        len(data.split(s)) for s in ("train", "validation", "test")
    )
    assert (run / "card.html").read_text().startswith("<!doctype html>")
    assert not list(tmp_path.glob(".slipstream/prepare/*.checkpoints")), "unfinished work outlived the finished"

    # The section `training` is not the data's: nothing is made again.
    second = pyflyte_run("--data", "shop.csv", "--target", "bought", workflow="prepare")
    assert second.returncode == 0 and "prepare      reused" in second.stdout, second.stdout
