"""The report's page: data never becomes markup, nothing is loaded, and it fits a phone."""

import json
import re
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support

from slipstream.config import RunConfig
from slipstream.pipeline.report.engine import build_report, run_summary
from slipstream.pipeline.report.pages.report_page import class_scores, draw_charts, report_page, stored_charts
from slipstream.pipeline.report.run_directory import RunOrigin
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.results.compression import Compression
from slipstream.shared.artifacts.results.evaluation import Gain
from slipstream.shared.artifacts.results.export import LibraryFiles, VariantFigures
from slipstream.shared.settings import as_written, to_dict
from slipstream.shared.source.quarantine import BadRow
from tests.support.proving import first_few
from tests.support.report_pages import CHROMIUM, HOSTILE, Parsed, assert_is_inert, too_wide
from tests.support.report_runs import ATTEMPT, STAGES, compression, results

KINDS = {
    "two classes": ["<=50K", ">50K"],
    "ten classes": list("0123456789"),
    "long names": [f"a-rather-long-name-without-any-space-{n}" for n in range(20)],
    "many classes": [f"species-{n:03d}" for n in range(150)],
    "regression": [],
}


def page_of(directory: Path, classes: list[str], hostile: str = "", world: int = 2) -> str:
    bad = [BadRow(f"{hostile}file.csv", 3, f"{hostile}column", f"{hostile}reason", "raw")]
    found = results(
        directory / "in", classes, target=f"{hostile}income", bad=bad, warnings=[f"{hostile}warning"], world=world
    )
    found.card["source"] = f"{hostile}source"
    for column in found.card["columns"]:
        column["name"] = f"{hostile}{column['name']}"
    config = {
        "inputs": {"data": hostile},
        **to_dict(RunConfig()),
        "model": {"name": hostile, "arguments": {hostile: hostile}},
    }
    summary = build_report(directory / "runs", found, STAGES, config)
    return Path(summary.directory, summary.report).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("threshold", "rule"),
    [
        (None, "A row counts as the class with the highest probability."),
        (0.1, "A row counts as >50K with a probability above 0.1, otherwise as <=50K (training.threshold)."),
        (1 - 2.0**-40, "A row counts as >50K with a probability above 1 - 9.09e-13, otherwise as <=50K"),
    ],
)
def test_the_page_says_how_rows_are_decided(tmp_path: Path, threshold: float | None, rule: str) -> None:
    found = results(tmp_path / "in", KINDS["two classes"])
    found = replace(found, evaluation=replace(found.evaluation, threshold=threshold))
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    text = " ".join(Parsed(Path(summary.directory, summary.report).read_text(encoding="utf-8")).text.split())
    assert rule in text and "above 50 %" not in text


@pytest.mark.parametrize("classes", first_few([0, 2, 3, 30]))
def test_names_and_labels_from_the_data_stay_text(tmp_path: Path, classes: int) -> None:
    page = page_of(tmp_path, [f"{HOSTILE}{n}" for n in range(classes)], HOSTILE)
    assert_is_inert(page)
    text = Parsed(page).text
    for named in ("source", "income", "warning", "reason", "column", "file.csv", "age"):
        assert f"{HOSTILE}{named}" in text


@pytest.mark.parametrize(
    ("versions", "line"), first_few([(["0a1b"], "version 0a1b."), (["0a1b", "2c3d"], "0a1b, then 2c3d.")])
)
def test_the_page_and_the_summary_name_the_code_versions_that_trained(
    tmp_path: Path, versions: list[str], line: str
) -> None:
    trained = {"attempt.json": replace(ATTEMPT, code_versions=versions)}
    found = results(tmp_path / "in", ["no", "yes"], trained=trained)
    summary = build_report(tmp_path / "runs", found, STAGES, {"inputs": {}, **to_dict(RunConfig())})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert line in " ".join(Parsed(page).text.split())
    recorded = json.loads(Path(summary.directory, "summary.json").read_text())
    assert recorded["training"]["code_versions"] == versions


@pytest.mark.parametrize("kind", first_few(KINDS))
def test_nothing_is_loaded_and_the_page_is_small(tmp_path: Path, kind: str) -> None:
    page = page_of(tmp_path, KINDS[kind])
    assert_is_inert(page)
    assert 'href="card.html"' in page
    assert len(page) < 300_000


def test_equal_results_give_equal_bytes(tmp_path: Path) -> None:
    found = results(tmp_path, KINDS["two classes"])
    assert draw_charts(found) == draw_charts(found)
    summary = run_summary(found, STAGES, "")
    first, second = (report_page(summary, found, {}, datetime(2026, 1, 2, 3, 4)) for _ in range(2))
    assert first == second and "02 January 2026, 03:04" in first


@pytest.mark.parametrize("kind", first_few(KINDS))
def test_every_colour_is_one_of_the_style_sheet(tmp_path: Path, kind: str) -> None:
    """Or else a chart would be unreadable in the dark theme."""
    page = page_of(tmp_path, KINDS[kind])
    drawings = re.findall(r"<svg.*?</svg>", page)
    assert len(drawings) >= 4
    assert not [drawing for drawing in drawings if re.search(r"#[0-9a-f]{6}[;\"]|rgb", drawing)]
    used = {name for drawing in drawings for name in re.findall(r"var\((--\w+)\)", drawing)}
    assert used <= set(re.findall(r"(--\w+):", page))


def test_no_identifier_occurs_twice(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["two classes"])
    identifiers = re.findall(r' id="([^"]+)"', page)
    assert identifiers and len(identifiers) == len(set(identifiers))
    assert set(re.findall(r'href="#([^"]+)"', page)) == set(identifiers)


def test_results_come_first_and_the_machine_is_folded(tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"])
    settings = as_written(RunConfig(training=TrainingConfig(epochs=3)))
    origin = RunOrigin("run it", "abc", {}, {"training": {"epochs": 3}}, settings)
    summary = build_report(tmp_path / "runs", found, STAGES, settings, origin=origin)
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    heads = re.findall(r"<h2>(.*?)</h2>", page)
    assert heads[:4] == ["Evaluation", "Data", "Training", "Recommended variant"]
    folded = page.split('<details class="folded">')[1]
    assert re.findall(r"<h2>(.*?)</h2>", folded)[-3:] == ["Interconnect", "Time", "Settings"]
    changed, everything = folded.split("All settings")
    assert "training.epochs" in changed and "learning_rate" not in changed and "learning_rate" in everything
    assert "Precision and recall by class" in page and "Learning rate" in page and "All-reduce</dt>" not in page
    assert {"prepared", "trained", "model/model.onnx"} <= Parsed(page).attributes["href"]


def test_precision_and_recall_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    truth, predicted = rng.integers(0, 4, 300), rng.integers(0, 3, 300)  # the last class is never predicted
    counts = confusion_matrix(truth, predicted, labels=range(4)).tolist()
    precision, recall, _, rows = precision_recall_fscore_support(truth, predicted, zero_division=0)
    found = {each.name: each for each in class_scores(counts, ["a", "b", "c", "d"])}
    for place, name in enumerate("abcd"):
        its = found[name]
        assert (its.precision or 0.0, its.recall, its.rows) == pytest.approx(
            (precision[place], recall[place], rows[place])
        )
    assert found["d"].precision is None and next(iter(found)) == "d"


def test_it_speaks_the_language_of_the_field(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["two classes"])
    for words in (
        "Confusion matrix",
        "Reliability diagram",
        "chance",
        "max abs error",
        "Warnings",
        "Recommended variant",
    ):
        assert words in page


def test_the_interconnect_is_drawn_with_its_model_intervals_and_history(tmp_path: Path) -> None:
    page = page_of(tmp_path, KINDS["two classes"])
    interconnect = page[page.index("<h2>Interconnect</h2>") : page.index("<h2>Time</h2>")]
    bandwidth, course, time = re.findall(r"<svg.*?</svg>", interconnect, re.DOTALL)
    for drawing in (bandwidth, time):
        assert "model of all_reduce" in drawing
        bars = re.findall(r'd="M ([\d.]+) [\d.]+ L \1 [\d.]+" style="fill:none;stroke:var\(--c\d\)"', drawing)
        assert len(bars) == 3 * 8  # an interval for each size of each operation
    assert 'aria-label="Bus bandwidth of the largest all_reduce over time"' in course


def test_what_was_lost_to_interruptions_is_said(tmp_path: Path) -> None:
    page = page_of(tmp_path, next(iter(KINDS.values())))
    assert "2 attempts: 10 of 130 steps executed were lost; steps that were kept took 76 % of 12.6 s" in " ".join(
        page.split()
    )


def test_what_was_trained_is_told_from_what_was_frozen(tmp_path: Path) -> None:
    found = results(tmp_path, KINDS["two classes"])
    for trained, said in ((None, "76,310 parameters, 2 processes"), (76_310, "76,310 parameters, 2 processes")):
        history = replace(found.history, trained=trained)
        summary = run_summary(replace(found, history=history), STAGES, "")
        assert said in words_of(report_page(summary, replace(found, history=history), {}, datetime(2026, 1, 2)))
    adapted = replace(found, history=replace(found.history, trained=1_234))
    page = report_page(run_summary(adapted, STAGES, ""), adapted, {}, datetime(2026, 1, 2))
    assert "76,310 parameters, 1,234 of them trained, 2 processes" in words_of(page)


@pytest.mark.prove
def test_the_speed_of_training_is_said_where_it_was_measured(tmp_path: Path) -> None:
    page = " ".join(page_of(tmp_path / "a", next(iter(KINDS.values()))).split())
    assert "12,346 rows a second: the model's matmuls used 5.00 % of the peak of 98.7 GFLOP/s of all processes" in page
    assert "Largest memory of a process: 346 MB" in page
    found = results(tmp_path / "in", next(iter(KINDS.values())))
    found = replace(found, attempt=replace(found.attempt, throughput=None))
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    assert "rows a second" not in Path(summary.directory, summary.report).read_text(encoding="utf-8")


def test_the_operations_of_a_profile_are_listed_and_its_trace_lies_beside_the_page(tmp_path: Path) -> None:
    operations = [{"name": f"aten::op{number}", "calls": 6, "seconds": 0.02 / (1 + number)} for number in range(14)]
    more = {"operations.json": {"steps": 3, "seconds": 0.1, "operations": operations}, "trace.json.gz": b"a trace"}
    found = results(tmp_path / "in", next(iter(KINDS.values())), trained=more)
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    page = " ".join(Path(summary.directory, summary.report).read_text(encoding="utf-8").split())
    assert "Operations of 3 steps" in page and "aten::op0" in page and "20.00 %" in page and "aten::op12" not in page
    assert 'href="trace.json.gz"' in page
    assert Path(summary.directory, "trace.json.gz").read_bytes() == b"a trace"


@pytest.mark.parametrize("kind", first_few(KINDS))
def test_every_count_of_a_small_confusion_matrix_is_on_the_page(tmp_path: Path, kind: str) -> None:
    found = results(tmp_path / "in", KINDS[kind])
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    matrix = "".join(re.findall(r'<svg[^>]+aria-label="Confusion matrix.*?</svg>', page))
    drawn = re.findall(r'style="[^"]*font-size:[^"]*"(?: transform="[^"]*")?>([\d,]+)</text>', matrix)
    counts = [n for line in found.evaluation.confusion or [] for n in line if n]
    assert sorted(map(int, drawn)) == (sorted(counts) if 2 <= len(KINDS[kind]) <= 20 else [])


def test_a_perfect_model_of_many_classes_has_no_mistakes(tmp_path: Path) -> None:
    found = results(tmp_path / "in", KINDS["many classes"])
    counts = [[4 * (r == c) for c in range(150)] for r in range(150)]
    found = replace(found, evaluation=replace(found.evaluation, confusion=counts))
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert "Every row of the test split was predicted correctly." in page


def test_a_variant_that_could_not_be_made_says_why(tmp_path: Path) -> None:
    found = results(tmp_path / "in", KINDS["two classes"])
    first, second, third, _ = found.export.variants
    failed = VariantFigures(third.name, None, None, False, "not made", "could not be made: <odd>")
    variants = [first, replace(second, chosen=True), failed]
    found = replace(found, export=replace(found.export, variants=variants, chosen=second.name))
    summary = build_report(tmp_path / "runs", found, STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert "not made: could not be made: &lt;odd&gt;" in " ".join(re.sub(r"</?b>", "", page).replace(",", ":").split())


def test_of_a_gpu_no_times_of_operators_are_claimed(tmp_path: Path) -> None:
    found = results(tmp_path / "in", KINDS["two classes"])
    summary = build_report(tmp_path / "runs", replace(found, export=replace(found.export, profile=[])), STAGES, {})
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    assert "Time of FP32 by operator" not in page and "profiler counts" not in words_of(page)


def with_weights_alone(directory: Path, library: str = "hugging-face") -> str:
    found = results(directory / "in", KINDS["two classes"])
    files = [LibraryFiles(library, 7, 32_121_080_000)]
    why = "8,030,261,248 parameters are more than 500,000,000"
    export = replace(found.export, variants=[], chosen="", why=why, profile=[], libraries=files)
    found = replace(found, export=export)
    assert stored_charts(found, None)["variants"] is None
    summary = build_report(directory / "runs", found, STAGES, {})
    assert summary.model_file == f"model/{library}"
    assert max(len(line) for line in str(summary).splitlines() if "/runs/" not in line) <= 80
    assert f"Model       {library[:8]}" in str(summary)
    return Path(summary.directory, summary.report).read_text(encoding="utf-8")


def test_of_weights_alone_it_says_what_loads_them(tmp_path: Path) -> None:
    page = with_weights_alone(tmp_path)
    assert_is_inert(page)
    text = words_of(page)
    assert "The model: hugging-face/ , 32.1 GB in 7 files, for transformers and vLLM." in text
    assert "No ONNX variants: 8,030,261,248 parameters are more than 500,000,000." in text
    assert "vLLM: vllm serve hugging-face" in text and "Recommended variant" not in text and "Variants" not in text


def with_smaller_network(directory: Path, found: Compression) -> str:
    results_of_run = results(directory / "in", KINDS["two classes"])
    summary = build_report(directory / "runs", results_of_run, STAGES, {}, compression=found)
    return Path(summary.directory, summary.report).read_text(encoding="utf-8")


def words_of(page: str) -> str:
    return " ".join(re.sub("<[^>]+>", " ", page).split())


def test_a_smaller_network_is_shown_beside_the_one_that_it_was_made_from(tmp_path: Path) -> None:
    page = with_smaller_network(tmp_path / "taken", compression())
    assert_is_inert(page)
    text = words_of(page)
    for said in (
        "Pruned, with the trained model as teacher. 50 % fewer units is evaluated and exported: it lost 0.11",
        "as trained 512, 256, 64 250,818 88.08 % — — —",
        "50 % fewer units taken 256, 128, 32 88,546 87.91 % 0.17 (-0.30 to 0.71) 1.93 (1.87 to 1.99) passed",
        "75 % fewer units 3 x 128, 64 41,010 86.10 % 1.90 (1.10 to 2.70) 2.71 (2.60 to 2.80) failed",
    ):
        assert said in text
    stays = with_smaller_network(tmp_path / "stays", replace(compression(), taken="", why="none is shown"))
    text = words_of(stays)
    assert "The trained model stays : none is shown." in text and "as trained taken" in text
    assert "Smaller model" not in page_of(tmp_path / "none", KINDS["two classes"])


@pytest.mark.prove
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: the width of a page is what a browser makes of it")
def test_no_page_is_wider_than_the_screen(tmp_path: Path) -> None:
    pages = {kind: page_of(tmp_path / kind.replace(" ", "-"), classes) for kind, classes in KINDS.items()}
    pages["hostile"] = page_of(tmp_path / "hostile", [f"{HOSTILE}{n}" for n in range(3)], HOSTILE.replace(" ", ""))
    pages["weights"] = with_weights_alone(tmp_path / "weights", "hugging-face-of-a-rather-long-name")
    pages["smaller"] = with_smaller_network(tmp_path / "smaller", compression())
    assert too_wide(pages, (320, 768, 940, 1280), tmp_path) == []


@pytest.mark.parametrize(("low", "mark"), [(0.2, '<span class="up">'), (-0.2, None)])
def test_only_what_is_shown_is_green_and_bold(low: float, mark: str | None, tmp_path: Path) -> None:
    found = results(tmp_path / "in", ["no", "yes"])
    found = replace(found, evaluation=replace(found.evaluation, gain=Gain(1.51, low, 3.8)))
    summary = build_report(tmp_path / "runs", found, STAGES, to_dict(RunConfig()))
    page = Path(summary.directory, summary.report).read_text(encoding="utf-8")
    first = page[page.index('<p class="verdict">') :].partition("</p>")[0]
    assert ("Not significantly better" in first) == (mark is None) and (mark or "1.51 points above") in first
    assert f"{low:.2f} to 3.80 with 95 % confidence" in first and ("<span" in first) == (mark is not None)
    assert page.count('<td class="number better">') == (mark is not None)
