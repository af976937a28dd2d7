"""Metrics against values computed by hand."""

import math

import numpy as np
import pytest

from slipstream.shared.models import metrics
from slipstream.shared.models.decision import count_decisions
from slipstream.shared.models.metrics import FEWEST

# Four rows, two classes: right, right, wrong, right; the truth has the probabilities .9 .8 .3 .6.
PROBABILITIES = np.array([[0.9, 0.1], [0.2, 0.8], [0.7, 0.3], [0.6, 0.4]])
LABELS = np.array([0, 1, 1, 0])


def test_classification_scores_by_hand() -> None:
    found = metrics.classification_scores(np.repeat(PROBABILITIES, FEWEST, axis=0), np.repeat(LABELS, FEWEST))
    assert found.accuracy == 0.75
    assert found.log_loss == pytest.approx(-(math.log(0.9) + math.log(0.8) + math.log(0.3) + math.log(0.6)) / 4)
    # Class 0: 2 hits, 3 predicted, 2 true: F1 = 4/5. Class 1: 1 hit, 1 predicted, 2 true: F1 = 2/3.
    assert found.macro_f1 == pytest.approx((4 / 5 + 2 / 3) / 2)
    # Of the pairs (class 1, class 0), .8 > .1, .8 > .4 and .3 > .1 are in order, .3 < .4 is not.
    assert found.roc_auc == 0.75
    # Each of the four is a bin of confidence: errors .1, .2, .7 and .4.
    assert found.ece == pytest.approx((0.1 + 0.2 + 0.7 + 0.4) / 4)


def test_calibration_pools_rows_of_equal_confidence() -> None:
    # 4 rows at confidence .8, 3 of them right: |.75 - .8| = .05 for any classes.
    probabilities = np.array([[0.8, 0.2]] * 4)
    bins = metrics.calibration_bins(probabilities, np.array([0, 0, 0, 1]))
    assert [(b.rows, b.accuracy) for b in bins] == [(4, 0.75)]
    assert metrics.calibration_error(bins) == pytest.approx(0.05)


@pytest.mark.parametrize("rows", [1, 19, 60, 265, 3000])
@pytest.mark.parametrize("kind", ["spread", "nearly certain", "certain"])
def test_no_bin_of_confidence_has_a_handful_of_rows(rows: int, kind: str) -> None:
    random = np.random.default_rng(0)
    confidence = {
        "spread": random.uniform(0.5, 1, rows),
        "nearly certain": 1 - 0.3 * random.random(rows) ** 20,
        "certain": np.where(random.random(rows) < 0.9, 1.0, random.uniform(0.5, 1, rows)),
    }[kind]
    probabilities = np.stack([confidence, 1 - confidence], axis=1)
    bins = metrics.calibration_bins(probabilities, np.zeros(rows, int))
    assert sum(each.rows for each in bins) == rows and len(bins) <= metrics.BINS
    assert min(each.rows for each in bins) >= min(rows, FEWEST)
    assert all(each.above < each.confidence <= each.to + 1e-12 for each in bins)
    assert len(bins) == max(1, min(metrics.BINS, rows // FEWEST)) or kind != "spread"


def test_a_bin_has_the_exact_interval_of_its_accuracy() -> None:
    """20 rows, all of them right: 0.025^(1/20) is the lower limit."""
    (only,) = metrics.calibration_bins(np.tile([0.9, 0.1], (20, 1)), np.zeros(20, int))
    assert (only.low, only.high) == (pytest.approx(0.025 ** (1 / 20)), 1.0)


def test_calibration_bins_cover_every_row_even_at_certainty() -> None:
    probabilities = np.array([[1.0, 0.0], [0.5, 0.5]])
    assert sum(b.rows for b in metrics.calibration_bins(probabilities, np.array([0, 0]))) == 2


def test_confusion_rows_are_truth() -> None:
    assert count_decisions(PROBABILITIES.argmax(axis=1), LABELS, 2).tolist() == [[2, 0], [1, 1]]


def test_macro_f1_leaves_out_classes_that_do_not_occur() -> None:
    assert metrics.macro_f1(np.array([[3, 0, 0], [0, 2, 0], [0, 0, 0]])) == 1.0


def test_auc_is_undefined_with_one_class() -> None:
    found = metrics.classification_scores(PROBABILITIES, np.zeros(4, int))
    assert found.roc_auc is None
    assert metrics.roc_points(PROBABILITIES[:, 1], np.zeros(4, int)) is None


def test_log_loss_of_a_hopeless_row_is_finite() -> None:
    found = metrics.classification_scores(np.array([[1.0, 0.0]]), np.array([1]))
    assert found.log_loss == pytest.approx(-math.log(1e-15))


def test_softmax_of_large_logits() -> None:
    found = metrics.softmax(np.array([[1000.0, 1000.0 + math.log(3)]], np.float32))
    assert found[0] == pytest.approx([0.25, 0.75], abs=1e-4)
    assert found.dtype == np.float64


def test_regression_scores_by_hand() -> None:
    found = metrics.regression_scores(np.array([1.0, 2.0, 6.0]), np.array([1.0, 3.0, 5.0]))
    # Errors 0, -1, 1; the targets spread by 4 + 0 + 4 around 3.
    assert (found.rmse, found.mae, found.r2) == pytest.approx((math.sqrt(2 / 3), 2 / 3, 1 - 2 / 8))


def test_r2_is_undefined_for_targets_that_do_not_vary() -> None:
    assert metrics.regression_scores(np.array([1.0, 2.0]), np.array([3.0, 3.0])).r2 is None


def test_roc_is_thinned_but_keeps_its_ends_and_its_area() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 20_000)
    positive = rng.random(20_000) + 0.3 * labels
    curve = metrics.roc_points(positive, labels, points=50)
    assert curve is not None
    assert len(curve.fpr) == len(curve.tpr) == 50
    assert (curve.fpr[0], curve.tpr[0], curve.fpr[-1], curve.tpr[-1]) == (0, 0, 1, 1)
    assert np.trapezoid(curve.tpr, curve.fpr) == pytest.approx(metrics.roc_auc(positive, labels), abs=0.005)
