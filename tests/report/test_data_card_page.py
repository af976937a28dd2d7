"""The data card's page: escaped text, low cost of many columns, and a width that fits a phone."""

import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from slipstream.pipeline.report.engine import build_data, data_card_page
from slipstream.pipeline.report.pages.report_page import describe_column
from slipstream.shared.artifacts.format import ArtifactWriter
from slipstream.shared.artifacts.prepared.card import read_card
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.source.quarantine import BadRow
from tests.support.report_pages import CHROMIUM, HOSTILE, Parsed, assert_is_inert, too_wide
from tests.support.report_runs import STAGES, prepared, signature_of

MADE = datetime(2026, 1, 2, 3, 4)
BAD = [{"file": "f.csv", "line": 7, "column": "x", "reason": "infinite", "raw": "inf"}]


def card(columns: int, hostile: str = "") -> dict[str, Any]:
    numeric = {"role": "numeric", "type": "number", "missing": 12, "distinct": 900, "alone": 0.31}
    numeric |= {"mean": -1234.5678, "std": 0.00123, "min": -123456789012345.0, "median": 0.5, "max": 1e300}
    numeric |= {"histogram": {"edges": list(range(21)), "counts": [(n * 37) % 101 for n in range(20)]}}
    text = {"role": "categorical", "type": "text", "missing": 0, "distinct": 30, "rest": 9}
    text |= {"top": [[f"{hostile}value {n}", 1000 // (n + 1)] for n in range(20)]}
    unused = {"role": "identifier", "type": "text", "missing": 0, "why": f"{hostile}every value occurs once"}
    kinds = (numeric, text, unused, {"role": "dropped", "type": "other"})
    rows = {"read": 5003, "kept": 5000, "quarantined": 3, "train": 3500, "validation": 750, "test": 750}
    return {
        "source": f"{hostile}source.csv",
        "task": "classification",
        "target": f"{hostile}target",
        "rows": rows,
        "classes": {f"{hostile}{name}": {"train": 1750, "validation": 375, "test": 375} for name in ("no", "yes")},
        "columns": [{"name": f"{hostile}column_{n}"} | kinds[n % 4] for n in range(columns)],
        "sampled_rows": 2000,
        "of_sample": ["distinct numbers", "p1"],
        "warnings": [f"{hostile}warning"],
    }


def test_text_from_the_data_stays_text() -> None:
    bad = {name: value if name == "line" else f"{HOSTILE}{value}" for name, value in BAD[0].items()}
    page = data_card_page(card(8, HOSTILE), [bad], MADE)
    assert_is_inert(page)
    text = Parsed(page).text
    for said in ("source.csv", "target", "no", "warning", "column_0", "every value", "infinite", "f.csv"):
        assert f"{HOSTILE}{said}" in text


def test_two_hundred_columns_are_cheap() -> None:
    data_card_page(card(4), BAD, MADE)
    start = time.perf_counter()
    page = data_card_page(card(200), BAD, MADE)
    assert time.perf_counter() - start < 2
    assert page.count("<svg") == 100 and len(page) < 300_000


def test_a_histogram_is_as_high_as_its_counts() -> None:
    found = card(1)
    found["columns"][0]["histogram"]["counts"] = [50, 0, 100, 1]
    page = data_card_page(found, [], MADE)
    assert '<path d="M0 100v-50h.9v50zM2 100v-100h.9v100zM3 100v-1h.9v1z"/>' in "".join(page.split("\n"))


def test_figures_of_a_sample_are_said_to_be() -> None:
    page = " ".join(data_card_page(card(4), [], MADE).split())
    assert "From a sample of 2,000 rows: distinct numbers, p1; all other figures are from every row." in page
    exact = card(4) | {"of_sample": []}
    assert "sample" not in data_card_page(exact, [], MADE).split("<h2>Columns</h2>")[1]


def test_equal_cards_give_equal_bytes() -> None:
    assert data_card_page(card(9), BAD, MADE) == data_card_page(card(9), BAD, MADE)


def test_a_run_that_prepares_has_the_page_and_the_prepared_data(tmp_path: Path) -> None:
    bad = [BadRow("f.csv", number, "age", "not a number", f"raw-{number:02d}") for number in range(1, 61)]
    source = PreparedData.open(prepared(tmp_path / "in", signature_of(["no", "yes"]), bad, ["odd"]))
    assert "card.html" not in source.artifact.files, "a change of the page must not change the prepared data"
    summary = build_data(tmp_path / "runs", source, STAGES)
    run = Path(summary.directory)
    assert sorted(path.name for path in run.iterdir()) == ["card.html", "card.json", "prepared"]
    page = (run / summary.card).read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>") and "The first 50 of 60 rows" in page
    assert "raw-50" in page and "raw-51" not in page
    copied = PreparedData.open(run / summary.prepared)
    assert copied.artifact.check_sha256().fingerprint == source.artifact.fingerprint
    assert [(reason.rows, reason.line) for reason in summary.quarantined] == [(60, 1)]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the width of a page is what a browser makes of it")
def test_no_page_is_wider_than_the_screen(tmp_path: Path) -> None:
    raw = [BAD[0] | {"raw": "w" * 120, "file": "w" * 60}]
    pages = {"plain": data_card_page(card(8), raw, MADE)}
    pages["hostile"] = data_card_page(card(8, HOSTILE.replace(" ", "")), raw, MADE)
    assert too_wide(pages, (320, 390, 768, 1040, 1280), tmp_path) == []


def test_a_column_that_lacks_what_may_be_missing_is_shown(tmp_path: Path) -> None:
    bare = card(2)
    bare["columns"] = [{"name": "unknown", "type": "text"}, {"name": "few", "type": "text", "top": [["a", 3]]}]
    writer = ArtifactWriter(tmp_path / "prepared")
    writer.write_json("card.json", bare)
    found = read_card(writer.finish("prepare", {}))
    assert [column["role"] for column in found["columns"]] == ["", ""]
    assert "unknown" in Parsed(data_card_page(found, BAD, MADE)).text
    assert describe_column(found["columns"][1]) == "a (3)"
