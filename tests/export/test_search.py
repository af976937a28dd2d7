"""The fastest of many candidates is found despite noisy short measurements."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import to_onnx
from slipstream.pipeline.export.quantize import search
from slipstream.pipeline.export.quantize.recipes import Recipe
from slipstream.pipeline.export.quantize.search import FP32, ExportCandidate, SpeedRanking, choose_finalists
from slipstream.shared.artifacts.prepared.data import Signature, TensorSpec
from slipstream.shared.models.predict import record_inputs
from tests.support.toys import trained_on

NUMERIC = Signature((TensorSpec("numeric", "float32", (3,)),), "regression", "y")


def candidates() -> list[ExportCandidate]:
    return [ExportCandidate(f"c{number}", Recipe("static"), Path(f"c{number}"), 0.0) for number in range(16)]


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> SpeedRanking:
    """c3 is 1.2 times as fast as FP32, the others 1.1 times, and each turn is off by 15 %."""
    random = np.random.default_rng(0)

    def screen_speedups(runs: Mapping[str, Any], *arguments: Any) -> dict[str, list[float]]:
        rounds = arguments[3]
        return {name: random.normal(1.2 if name == "c3" else 1.1, 0.15, rounds).tolist() for name in runs}

    monkeypatch.setattr(search, "screen_speedups", screen_speedups)
    monkeypatch.setattr(search, "onnx_predictor", lambda path, threads, provider: None)
    return SpeedRanking(Path("fp32"), NUMERIC, np.zeros(4, NUMERIC.record), ExportConfig(), (1, 32))


def found_in_twenty(speeds: SpeedRanking, seconds: float) -> int:
    found = 0
    for _ in range(20):
        field = candidates()
        speeds.screen(field, 0.0)
        ranked = speeds.rank(field, time.perf_counter() + seconds)
        assert sorted(ranked) == [1, 32] and all(len(each) == 16 for each in ranked.values())
        found += ranked[1][0].name == "c3"
    return found


def test_longer_looks_at_fewer_find_the_fastest(speeds: SpeedRanking) -> None:
    screened, ranked = found_in_twenty(speeds, 0.0), found_in_twenty(speeds, 60.0)
    assert screened <= 12 and ranked >= 16 and ranked > screened


def test_what_is_clearly_slower_has_no_rank(speeds: SpeedRanking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "screen_speedups", lambda runs, *_: {n: [0.5 if n == "c1" else 1.0] * 3 for n in runs})
    field = candidates()
    speeds.screen(field, 0.0)
    ranked = speeds.rank(field, 0.0)
    assert field[1].speed == {} and len(ranked[1]) == 15 and FP32 not in ranked[1][0].name


def test_finalists_are_the_best_at_each_batch_and_then_the_next_where_it_counts() -> None:
    a, b, c, d, *_ = candidates()
    ranked = {1: [a, b, c, d], 32: [a, d], 256: [c, a]}
    assert choose_finalists([], ranked, ExportConfig(decide_at_batch=1)) == [a, c, b]
    assert choose_finalists([], ranked, ExportConfig(decide_at_batch=32)) == [a, c, d]
    assert choose_finalists([], {1: [], 32: []}, ExportConfig()) == []


@pytest.fixture
def files(tmp_path: Path) -> list[ExportCandidate]:
    """Four candidates, the largest first, which is the fastest; the smallest is clearly slower than FP32."""
    made = []
    for number, (size, speed) in enumerate([(900, {1: 3.0}), (800, {1: 2.0}), (700, {1: 1.5}), (100, {})]):
        path = tmp_path / f"model.c{number}.onnx"
        path.write_bytes(bytes(size))
        made.append(ExportCandidate(f"c{number}", Recipe("static"), path, 0.0, speed))
    return made


def test_the_slow_are_finalists_only_if_fp32_is_over_the_budget(files: list[ExportCandidate]) -> None:
    ranked = {1: files[1:3]}
    assert choose_finalists(files[1:], ranked, ExportConfig(), over_budget=True) == files[1:]
    assert choose_finalists(files[1:], ranked, ExportConfig()) == files[1:3]


def test_the_smallest_and_the_fastest_are_finalists_if_a_latency_has_a_budget(files: list[ExportCandidate]) -> None:
    assert choose_finalists(files, {}, ExportConfig(optimise="size")) == [files[3], files[2], files[1]]
    assert choose_finalists(files, {}, ExportConfig(optimise="size", budget_ms=1.0)) == [files[3], files[0], files[2]]


def test_finalists_are_within_a_budget_that_fp32_exceeds(tmp_path: Path) -> None:
    """Of a real search, whichever are the fastest: some files of half of FP32's size are, others are not."""
    data, fp32 = write_table(tmp_path / "data", "classification"), tmp_path / "model.fp32.onnx"
    model = trained_on(data, 1).load()
    to_onnx(model, data.signature, record_inputs(data.signature, data.sample("test", 2)), 20, fp32)
    size = fp32.stat().st_size
    budget = 0.5 * size / 1e6
    config = ExportConfig(seconds=2.0, when_in_doubt="take", budget_mb=budget, max_loss=100.0)
    found = search.search_recipes(tmp_path, fp32, data, config, time.perf_counter(), (1,))
    assert found.finalists and all(each.bytes <= budget * 1e6 for each in found.finalists)
    assert any(each.verdict == "over budget" for each in found.others)
