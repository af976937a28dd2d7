"""The closing summary of a run."""

from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.pipeline.report.engine import run_summary
from slipstream.pipeline.report.summary import CompressionSummary, RunSummary
from slipstream.pipeline.report.terminal import WIDTH
from slipstream.shared.source.config import DataConfig, SplitConfig
from slipstream.shared.source.given_splits import in_words
from slipstream.shared.stages import StageRun
from tests.support.report_runs import STAGES, compression, results


def summary_of(tmp_path: Path, classes: list[str], world: int = 2) -> RunSummary:
    return run_summary(results(tmp_path, classes, world=world), STAGES, "runs/2026-01-02T03-04-05")


def test_the_block_says_it_all_within_80_columns(tmp_path: Path) -> None:
    text = str(summary_of(tmp_path, ["no", "yes"]))
    assert max(map(len, text.splitlines())) <= WIDTH == 80
    for said in (
        "4,000 rows read, 4,000 kept, none quarantined",
        "2,800 to train, 600 to validate, 600 to test",
        "HistGradientBoosting",
        "▸ onnx-int8   84.3 KB  62.0 µs   744 µs  5.58 ms   87.74 %",
        "1 other was ruled out earlier",
        "onnx-int8 is 1.93 times as fast as FP32",
        "all-reduce 301 µs at 1 KiB, 1.18 GB/s at 16 MiB (2 processes",
        "prepare            reused",
        "train              31.2 s  ━",
        "runs/2026-01-02T03-04-05/report.html",
        "runs/2026-01-02T03-04-05/model/model.onnx",
    ):
        assert said in text


def test_a_split_that_was_drawn_stands_below_the_rows(tmp_path: Path) -> None:
    drawn = in_words([1], DataConfig(split=SplitConfig(column="part", validation=0.2)))
    stages = results(tmp_path, ["no", "yes"], warnings=["another", *drawn])
    words = " ".join(str(run_summary(stages, STAGES, "runs/2026-01-02T03-04-05")).split())
    assert f"600 to test {drawn[0]} " in words and "another" not in words


@pytest.mark.parametrize("versions", [[], ["0a1b"], ["0a1b", "2c3d"]])
def test_several_code_versions_that_trained_a_model_are_named(tmp_path: Path, versions: list[str]) -> None:
    summary = summary_of(tmp_path, ["no", "yes"])
    assert summary.training
    text = str(replace(summary, training=replace(summary.training, code_versions=versions)))
    assert ("Code        trained by 0a1b, then 2c3d\n" in text) is (len(versions) > 1)
    assert ("trained by" in text) is (len(versions) > 1)


def test_a_short_benchmark_says_so(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ["no", "yes"])
    assert summary.network and "short" not in str(summary)
    text = str(replace(summary, network=replace(summary.network, short=True)))
    assert "; a short benchmark)" in " ".join(text.split())


def test_a_long_name_fits(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ["no", "yes"])
    name = "u8s8-tensor-between-out8-mixed16"
    variants = [replace(each, name=name if each.chosen else each.name) for each in summary.export.variants]
    lines = str(replace(summary, export=replace(summary.export, chosen=name, variants=variants))).splitlines()
    assert any("▸ u8s8-tensor-between-…" in line for line in lines) and max(map(len, lines)) <= WIDTH


def test_a_name_of_several_words_takes_several_lines(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ["no", "yes"])
    name = "int8 static, per tensor, int8 outputs, wide layers"
    variants = [replace(each, name=name if each.chosen else each.name) for each in summary.export.variants]
    lines = str(replace(summary, export=replace(summary.export, chosen=name, variants=variants))).splitlines()
    at = next(number for number, line in enumerate(lines) if "▸ int8 static, per " in line)
    assert [line.strip() for line in lines[at + 1 : at + 3]] == ["tensor, int8 outputs,", "wide layers"]
    assert lines[at].endswith("87.74 %") and max(map(len, lines)) <= WIDTH


def test_a_smaller_network_is_a_table_within_80_columns(tmp_path: Path) -> None:
    summary = replace(summary_of(tmp_path, ["no", "yes"]), compression=compression())
    lines = str(summary).splitlines()
    assert "Tried       model             parameters  lost, points  speed" in lines
    assert "          ▸ 50 % fewer units      88,546  0.17, ≤ 0.71   1.93  passed" in lines
    why = next(number for number, line in enumerate(lines) if "lost, points" in line) + 2 + len(compression().tried)
    assert lines[why].strip() == "The losses in the table are those of the validation rows."
    assert max(map(len, lines)) <= WIDTH
    wide = replace(
        compression().tried[0], name="hidden 1024-1024, dropout 0.1", answer="can't tell", loss=-93.78, high=-76.1
    )
    speeds = {wide.name: next(iter(compression().speeds.values()))}
    found = replace(compression(), tried=[wide], speeds=speeds, taken=wide.name)
    lines = str(CompressionSummary(found)).splitlines()
    assert any("▸ hidden 1024-1024, …" in line for line in lines) and max(map(len, lines)) <= WIDTH


def test_bars_are_as_long_as_their_stages(tmp_path: Path) -> None:
    stages = [StageRun("a", 10.0, False), StageRun("b", 5.0, False), StageRun("c", 9.0, True)]
    lines = str(replace(summary_of(tmp_path, []), stages=stages)).splitlines()
    bars = {line[12]: line.count("━") for line in lines if line[12:14] in ("a ", "b ", "c ")}
    assert bars == {"a": 40, "b": 20, "c": 0}


def test_a_run_that_reused_everything(tmp_path: Path) -> None:
    stages = [replace(stage, reused=True) for stage in STAGES]
    text = str(replace(summary_of(tmp_path, []), stages=stages))
    assert text.count("reused") == len(STAGES)
    assert "━" not in text


def test_a_regression_is_judged_by_its_error(tmp_path: Path) -> None:
    text = str(summary_of(tmp_path, []))
    words = " ".join(text.split())
    assert "test RMSE 19.18 (HistGradientBoosting: 18.61; 3.1 % above, 2.1 to 4.1 with 95 % confidence)" in words
    assert "accuracy 9" not in text


def test_one_process_has_no_bandwidth(tmp_path: Path) -> None:
    assert "no bandwidth, because one process has no link" in " ".join(str(summary_of(tmp_path, [], world=1)).split())


def test_a_variant_that_could_not_be_made_has_no_figures(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, ["no", "yes"])
    first = summary.export.variants[0]
    failed = replace(first, name="dynamic", bytes=None, latency_ms={}, metrics=None, file=None)
    text = str(replace(summary, export=replace(summary.export, variants=[*summary.export.variants[:3], failed])))
    assert "dynamic" not in text and "1 other was ruled out earlier: see the report." in text


@pytest.mark.parametrize("source", ["s3://a-bucket/" + "deep/" * 40 + "file.parquet"])
def test_paths_are_never_torn(tmp_path: Path, source: str) -> None:
    summary = replace(summary_of(tmp_path, []), directory=source)
    assert f"{source}/report.html" in str(summary)
