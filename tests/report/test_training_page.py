"""The deck of a training: its content over time, without scripts and with everything escaped."""

from dataclasses import replace
from datetime import UTC, datetime

from slipstream.pipeline.report.pages.rendering import training_page
from slipstream.shared.artifacts.results.training import LiveAttempt, LiveProgress, LossPoint, ValidationPoint

NOW = datetime(2026, 11, 25, 12, tzinfo=UTC)
BEST = ValidationPoint(20, 2.0, 0.4)
GOING = LiveProgress(
    step=25,
    steps_total=100,
    skipped=1,
    steps=[LossPoint(step, step / 10, 1 / step, 1e-3) for step in range(1, 26)],
    evaluations=[ValidationPoint(10, 1.0, 0.5), BEST],
    best=BEST,
    attempts=[
        LiveAttempt(1, 2, 0, 10, 14, 60.0, 512.0, "SIGTERM, <script>alert(1)</script>"),
        LiveAttempt(2, 2, 10, 20, 25, 30.0, 1024.0, ""),
    ],
)


def test_it_says_how_training_goes() -> None:
    page = training_page(GOING, NOW)
    lead = " ".join(page.partition('<p class="lead">')[2].partition("</p>")[0].split())
    assert lead == (
        "Step 25 of 100, 1,024 rows/s, saved at step 20, validation loss 0.4000 at the best evaluation, step 20, 1 "
        "step skipped for a non-finite loss or gradient."
    )
    assert page.count("<svg") == 2 and "Learning rate over the epochs" in page
    assert page.count('class="note"') == 2 and ">in progress<" in page


def test_it_runs_no_script_and_escapes_what_it_is_told() -> None:
    page = training_page(GOING, NOW)
    assert "<script" not in page and "SIGTERM, &lt;script&gt;" in page


def test_before_the_first_point_there_are_no_charts() -> None:
    page = training_page(replace(GOING, step=0, skipped=0, steps=[], evaluations=[], best=None, attempts=[]), NOW)
    assert "Step 0 of 100." in page and "<svg" not in page and "<table" not in page


def test_before_the_first_evaluation_there_is_the_training_loss() -> None:
    page = training_page(replace(GOING, evaluations=[], best=None), NOW)
    assert page.count("<svg") == 2 and "best evaluation" not in page
