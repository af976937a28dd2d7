"""The report of a sweep."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.report.engine import build_report
from slipstream.pipeline.report.terminal import WIDTH
from slipstream.shared.artifacts.results.sweep import AgainstGiven, Sweep
from tests.support.report_pages import CHROMIUM, HOSTILE, assert_is_inert, too_wide
from tests.support.report_runs import STAGES, results, swept


def built(directory: Path, sweep: Sweep) -> tuple[str, str]:
    """The page, and the text for the terminal."""
    found = results(directory / "in", ["no", "yes"])
    summary = build_report(directory / "runs", found, STAGES, {}, sweep=sweep)
    figures = json.loads(Path(summary.directory, "summary.json").read_text())["sweep"]
    assert figures["best"] == sweep.best and len(figures["trials"]) == len(sweep.trials)
    return Path(summary.directory, summary.report).read_text(encoding="utf-8"), str(summary)


def test_the_page_has_the_trials_and_whether_the_best_is_better(tmp_path: Path) -> None:
    page, said = built(tmp_path, swept())
    assert_is_inert(page)
    words = " ".join(page.split())
    better = "better than the settings as given: +1.25 points of accuracy on 600 test rows"
    for expected in (
        "5 trials: 2 complete, 1 pruned, 1 failed, 1 unfinished. Trial 2 is the best: <b>learning_rate 0.01</b>",
        better,
        "training.learning_rate: the loss is not finite",
        "slipstream sweep /data/swept",
        "Validation loss of each trial",
        "Importance of settings",
    ):
        assert expected in words, expected
    text = " ".join(said.split())
    assert (
        "5 trials: 2 complete, 1 pruned, 1 failed, 1 unfinished trial 2 is the best: learning_rate 0.01 Better" in text
    )
    assert max(len(line) for line in said.splitlines() if "runs/" not in line) <= WIDTH


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.1, 2.0, "better than the settings as given: +1.00"),
        (-0.1, 2.0, "not significantly better than the settings as given: +1.00"),
        (-2.0, -0.1, "worse than the settings as given: +1.00"),
    ],
)
def test_what_an_interval_shows(low: float, high: float, said: str) -> None:
    assert AgainstGiven(1.0, low, high, "points of accuracy", 50).sentence.startswith(said)


def test_the_settings_as_given_may_be_the_best(tmp_path: Path) -> None:
    page, said = built(tmp_path / "given", replace(swept(), best=0, against=None, importance={}))
    assert "The settings as given were the best of all trials." in page and "were the best of all trials" in said
    assert "Importance of settings" not in page
    page, said = built(tmp_path / "incomplete", replace(swept(), against=None))
    nothing = "No model was trained with the settings as given, so there is no comparison."
    assert nothing in page and nothing in " ".join(said.split())


def test_a_sweep_of_hundreds_and_hostile_words(tmp_path: Path) -> None:
    first = swept()
    many = [replace(first.trials[number % 4], number=number, settings=HOSTILE, reason=HOSTILE) for number in range(300)]
    page, _ = built(tmp_path, replace(first, trials=many, store=HOSTILE))
    assert_is_inert(page)
    assert page.count('data-label="settings"') < 30


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the width of a page is what a browser makes of it")
def test_the_page_is_not_wider_than_the_screen(tmp_path: Path) -> None:
    long = [
        replace(each, settings="dropout 0.2024, hidden [256, 128], learning_rate 0.01377") for each in swept().trials
    ]
    page, _ = built(tmp_path, replace(swept(), trials=long))
    assert too_wide({"sweep": page}, (320, 768, 1280), tmp_path) == []
