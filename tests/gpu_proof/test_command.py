"""The command that checks a GPU, rehearsed on the CPU."""

import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from click.testing import CliRunner, Result

from slipstream.operations.proofs.gpu import command, torch_names
from slipstream.operations.proofs.gpu.check import CHECKS, CheckFigure, CheckResult, GpuCheck, Limit
from slipstream.operations.proofs.gpu.checks import machine
from slipstream.operations.proofs.gpu.page import HEADER, NOT_RUN, fill, page, row
from slipstream.operations.proofs.gpu.run_check import context_for, run_check
from tests.support import REPOSITORY
from tests.support.proving import first_few

#: The cheapest that trains, and that which no bare image can run; ``test_bare_image.py`` has the others.
KEPT = ("EMA", "export")


def called(*arguments: str | Path) -> Result:
    return CliRunner().invoke(command.main, [str(each) for each in arguments])


@pytest.mark.parametrize("name", first_few(KEPT))
def test_a_check_holds_on_the_cpu(name: str, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    kept = next(check for check in CHECKS if check.name == name)
    with mock.patch.dict(os.environ):  # where a check says which rank it is
        found = run_check(kept, context_for(tmp_path / "work", tmp_path, quick=True))
    assert (found.state, found.reason) == ("held", "") and found.figures


@pytest.mark.prove
def test_whatever_becomes_of_a_check_the_others_are_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"hangs": 1.0}
    monkeypatch.setattr(command, "TOO_LITTLE", 1.0)
    checks = [faulty(name, limits.get(name, 60)) for name in ("dies", "hangs", "holds")]
    monkeypatch.setattr(command, "CHECKS", checks)
    ended = called("--quick", "--output", tmp_path)
    assert ended.exit_code == 1 and "failed: dies, hangs" in ended.output
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert {each["name"]: (each["state"], each["reason"]) for each in written["checks"]} == {
        "dies": ("failed", "ended with SIGKILL: the last thing that it says"),
        "hangs": ("failed", "not finished after 1 s: it said nothing"),
        "holds": ("held", ""),
    }
    assert written["quick"]
    assert written["checks"][-1]["figures"] == [{"name": "answer", "value": 42.0, "unit": "things"}]
    html = (tmp_path / "gpu.html").read_text()
    assert "A rehearsal on the CPU" in html and "answer 42 things" in html and "ended with SIGKILL" in html


def faulty(name: str, limit_s: float = 60) -> GpuCheck:
    return GpuCheck(name, f"it {name}", f"tests.support.faulty_checks:{name}", limit_s)


def test_a_check_that_is_killed_half_way_leaves_its_figures(tmp_path: Path) -> None:
    found = command.in_process(faulty("killed_half_way"), tmp_path, 60, quick=True)
    assert found.state == "failed" and found.reason == "ended with SIGKILL: it said nothing"
    assert found.figures == (CheckFigure("measured before", 7.0, "ms"), CheckFigure("and this", "too"))
    assert "measured before 7 ms" in command.line(found)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_every_claim_fails_with_a_figure_beyond_its_limit(check: GpuCheck) -> None:
    assert check.limits, "a claim that no figure can refute"
    within = [CheckFigure(each.figure, max(each.least, min(each.most, 1.0))) for each in check.limits]
    assert not check.describe_breach(within, rehearsed=False)
    for place, limit in enumerate(check.limits):
        for bound, beyond in ((limit.least, -1), (limit.most, 1)):
            if math.isfinite(bound):
                value = bound + beyond * max(1e-9, abs(bound) / 100)
                found = [*within[:place], CheckFigure(limit.figure, value), *within[place + 1 :]]
                assert limit.figure in check.describe_breach(found, rehearsed=False)
        missing = [*within[:place], *within[place + 1 :]]
        assert check.describe_breach(missing, rehearsed=False) == f"{limit.figure} was not measured"


@pytest.mark.prove
def test_a_broken_limit_fails_the_check_and_its_figures_stay(tmp_path: Path) -> None:
    for least, anywhere, state in ((43.0, True, "failed"), (43.0, False, "held"), (42.0, True, "held")):
        check = replace(faulty("answers"), limits=(Limit("answer", least, anywhere=anywhere),))
        found = command.in_process(check, tmp_path, 60, quick=True)
        assert (found.state, found.figures) == (state, (CheckFigure("answer", 42.0, "things"),))
    assert found.reason == "" and json.loads((tmp_path / "figures.jsonl").read_text().splitlines()[0])["value"] == 42.0


@pytest.mark.parametrize(
    ("name", "state", "reason"), [("fails", "failed", "AssertionError: two lines"), ("lacks", NOT_RUN, "needs 2 GPUs")]
)
def test_how_a_check_ended_is_one_line(name: str, state: str, reason: str, tmp_path: Path) -> None:
    found = run_check(faulty(name), context_for(tmp_path, tmp_path, quick=True))
    assert (found.state, found.reason) == (state, reason)


def test_without_a_clone_its_tests_are_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    (check,) = (check for check in CHECKS if check.name == "tests")
    found = run_check(check, context_for(tmp_path, tmp_path, quick=True))
    assert found.state == NOT_RUN and "in a clone of the project" in found.reason


def test_all_checks_end_after_530_seconds() -> None:
    (minutes,) = (each for each in command.main.params if each.name == "minutes")
    assert isinstance(minutes.default, float) and 60 * minutes.default <= 530


def test_no_check_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    ended = called("--quick", "--output", tmp_path, "--minutes", "0.1")
    assert ended.exit_code == 0
    assert {each["state"] for each in json.loads((tmp_path / "gpu.json").read_text())["checks"]} == {NOT_RUN}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_there_is_one_line_and_nothing_is_written(tmp_path: Path) -> None:
    ended = called("--output", tmp_path / "gpu")
    assert ended.exit_code == 1 and ended.output.count("\n") == 1 and "--quick" in ended.output
    assert not (tmp_path / "gpu").exists()


def results() -> list[CheckResult]:
    speed = CheckResult("speed", "", "held", figures=(CheckFigure("share of peak", 41.26, "% (…)"),))
    return [speed, CheckResult("saves", "", "failed", "wrong"), CheckResult("layouts", "", "not run", "needs 2 GPUs")]


def test_the_readme_has_the_table_that_the_command_fills() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    filled = fill(readme, "NVIDIA X", results())
    assert len(filled.splitlines()) >= len(readme.splitlines()) and HEADER in filled
    line = "| NVIDIA X | 1 of 2 | 41.3 % | not run | not run | not run | not run |"
    assert row("NVIDIA X", results()) == line and line in filled
    assert "| no GPU" not in filled
    # Another run on the same device takes the place of the last.
    assert fill(filled, "NVIDIA X", results()) == filled
    assert [name for name in ("| NVIDIA X |", "| NVIDIA Y |") if fill(filled, "NVIDIA Y", []).count(name) != 1] == []


def test_what_is_quoted_in_the_page_is_text() -> None:
    quoted = CheckResult("<b>", "", "failed", "<script>")
    assert not re.search("<(b|script)>", page("<b>", [quoted], 1.0, quick=False))


@pytest.mark.prove
def test_names_of_torch_that_the_engines_use_and_it_lacks_are_found(tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch import Tensor, nothing\n"
        "from torch.nowhere import thing\n"
        "dist.all_reduce, dist.gone, torch.cuda.lost, Tensor.anything, torch.nn.Linear\n"
    )
    names = ["torch.cuda.lost", "torch.distributed.gone", "torch.nothing", "torch.nowhere.thing"]
    assert sorted(torch_names.missing_names(tmp_path)) == names
    assert torch_names.missing_names() == []


def test_what_the_end_of_all_time_cuts_off_has_not_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "TOO_LITTLE", 1.0)
    found = command.in_process(faulty("hangs"), tmp_path, 2.0, quick=True)
    assert (found.state, found.reason) == (NOT_RUN, "the time was over after 2 s")
