"""The search for the finalists: variants are made, looked at on calibration and validation rows, and glanced at.

The test split is not read here: it is looked at once, for the finalists (:mod:`tasks.export.engine`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from tasks.artifacts.prepared.data import PreparedData
from tasks.export.candidates.candidate import Candidate
from tasks.export.candidates.quantise import Quantiser
from tasks.export.candidates.recipes import FOR_GPUS, recipes_for
from tasks.export.candidates.sensitive import by_error
from tasks.export.candidates.speed import Speeds, fastest_first
from tasks.export.choose import Verdict
from tasks.export.config import ExportConfig
from tasks.export.session import onnx_predictor
from tasks.gate.quality import UNITS, right_of
from tasks.models.predict import inputs_of, predict, targets_of

#: Points of accuracy or percent of RMSE that a file loses on the rows of the search.
Judge = Callable[[Path], float]
BATCHES = (1, 32, 256)
MOST_FINALISTS = 3
#: Rows of the validation split that a candidate is looked at on.
FEWEST_ROWS, MOST_ROWS = 64, 5000
#: Shares of the whole time: for looking at one candidate on these rows; until which files are made, glanced at, mended,
#: and the fastest of them looked for.
JUDGING, MAKING, LOOKING, MENDING, RANKING = 0.01, 0.35, 0.5, 0.55, 0.65
#: A quantised file is smaller than this share of FP32's, or little of it was quantised.
SHRUNK = 0.9


@dataclass
class Found:
    """The finalists, and what became of the recipes that are none."""

    finalists: list[Candidate]
    others: dict[str, Verdict]


def search(
    directory: Path, fp32: Path, data: PreparedData, config: ExportConfig, started: float, batches: Sequence[int]
) -> Found:
    """Make candidates of the file ``fp32`` within the time that ``config.seconds`` leaves after ``started``
    (``time.perf_counter``), and choose at most three finalists. Only their files stay in ``directory``."""
    records, others = search_rows(fp32, data, config), dict[str, Verdict]()
    with TemporaryDirectory(dir=directory) as scratch:
        quantiser = Quantiser(fp32, calibration(data, config), Path(scratch), 8 if config.target == "vnni" else 7)
        expected = predicted(fp32, data, records, config)
        judge = partial(lost, data=data, records=records, expected=expected, config=config)
        candidates = list(make_all(directory, quantiser, judge, config, started, others))
        speeds = Speeds(fp32, data.signature, records, config, batches)
        speeds.look(candidates, started + LOOKING * config.seconds)
        try:
            mended = mend(directory, quantiser, candidates, judge, config, started)
        except Exception as error:
            others["mixed"] = not_made(error)
            for path in directory.glob("model.*-mixed*.onnx"):
                path.unlink()
        else:
            candidates += mended
            speeds.look(mended, started + MENDING * config.seconds)
    good = [each for each in candidates if each.loss <= config.max_loss]
    if config.optimise == "size":
        finalists = sorted(good, key=lambda each: each.bytes)[:MOST_FINALISTS]
    else:
        finalists = choose_finalists(speeds.rank(good, started + RANKING * config.seconds), config)
    for candidate in candidates:
        if candidate not in finalists:
            others[candidate.name] = why_not(candidate, data.signature.task, config)
            candidate.path.unlink()
    return Found(finalists, others)


def calibration(data: PreparedData, config: ExportConfig) -> tuple[np.ndarray, ...]:
    """The inputs that ranges are taken from: rows of the training split."""
    return inputs_of(data.signature, data.sample("train", config.calibration_rows))


def search_rows(fp32: Path, data: PreparedData, config: ExportConfig) -> np.ndarray:
    """Rows of the validation split, or of the training split if there are none: as many as FP32 predicts in a small
    share of the time."""
    found = data.sample("validation", MOST_ROWS)
    if not len(found):
        found = data.sample("train", MOST_ROWS)
    started = time.perf_counter()
    predicted(fp32, data, found[:FEWEST_ROWS], config)
    taken = (time.perf_counter() - started) / len(found[:FEWEST_ROWS])
    return found[: max(FEWEST_ROWS, int(JUDGING * config.seconds / max(taken, 1e-9)))]


def predicted(path: Path, data: PreparedData, records: np.ndarray, config: ExportConfig) -> np.ndarray:
    return predict(onnx_predictor(path, 1, config.provider), data.signature, records)


def lost(path: Path, *, data: PreparedData, records: np.ndarray, expected: np.ndarray, config: ExportConfig) -> float:
    """Points of accuracy or percent of RMSE that a file loses on the rows of the search."""
    outputs, truth = predicted(path, data, records, config), targets_of(records)
    task = data.signature.task
    if task != "regression":
        right, still = (float(np.mean(right_of(task, each, truth))) for each in (expected, outputs))
        return 100 * (right - still)
    before, after = (float(np.sqrt(np.mean((each[:, 0] - truth) ** 2))) for each in (expected, outputs))
    return 100 * (after / max(before, 1e-12) - 1)


def make_all(
    directory: Path,
    quantiser: Quantiser,
    judge: Judge,
    config: ExportConfig,
    started: float,
    others: dict[str, Verdict],
) -> Iterable[Candidate]:
    """The files that can be made in time, the first in any case; ``others`` gets what became of the rest."""
    import onnx

    fp32_bytes, seen = quantiser.fp32.stat().st_size, dict[bytes, str]()
    recipes = FOR_GPUS if config.provider == "cuda" else recipes_for(onnx.load(quantiser.fp32))
    for recipe in recipes:
        if recipe != recipes[0] and time.perf_counter() - started > MAKING * config.seconds:
            others[recipe.name] = Verdict("not tried", f"the time was over (export.seconds: {config.seconds:g})")
            continue
        path = directory / f"model.{recipe.name}.onnx"
        try:
            quantiser.make(recipe, path)
            content = path.read_bytes()
            if content in seen:
                others[recipe.name] = Verdict("the same", f"gives the very file of {seen[content]}")
            elif len(content) > SHRUNK * fp32_bytes:
                share = 100 * len(content) / fp32_bytes
                others[recipe.name] = Verdict("did not shrink", f"its file has {share:.0f} % of FP32's size")
            else:
                seen[content] = recipe.name
                yield Candidate(recipe.name, recipe, path, judge(path))
                continue
        except Exception as error:
            others[recipe.name] = not_made(error)
        path.unlink(missing_ok=True)


def not_made(error: Exception) -> Verdict:
    """What ONNX Runtime's tools raise is of any type."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return Verdict("not made", f"could not be made: {reason[:300]}")


def mend(
    directory: Path,
    quantiser: Quantiser,
    candidates: Sequence[Candidate],
    judge: Judge,
    config: ExportConfig,
    started: float,
) -> list[Candidate]:
    """If the fastest candidate loses too much: the same with its most sensitive layers in FP32, as few as help."""
    at = config.decide_at_batch
    ranked = fastest_first(candidates, at)
    if not ranked or ranked[0].loss <= config.max_loss or ranked[0].recipe.kind not in ("static", "dynamic"):
        return []
    fastest, deadline = ranked[0], started + MENDING * config.seconds
    layers = list(by_error(quantiser, fastest.recipe, deadline))
    count = 1
    while count < len(layers) and time.perf_counter() < deadline:
        name = f"{fastest.name}-mixed{count}"
        path = directory / f"model.{name}.onnx"
        quantiser.make(fastest.recipe, path, fp32=layers[:count])
        if (loss := judge(path)) <= config.max_loss:
            return [Candidate(name, fastest.recipe, path, loss)]
        path.unlink()
        count *= 2
    return []


def choose_finalists(ranked: Mapping[int, Sequence[Candidate]], config: ExportConfig) -> list[Candidate]:
    """The best at each batch size, the one that decides first, and then the next best there."""
    batches = sorted(ranked, key=lambda batch: batch != config.decide_at_batch)
    first = [ranked[batch][0] for batch in batches if ranked[batch]]
    ordered = {each.name: each for each in (*first, *ranked[config.decide_at_batch])}
    return list(ordered.values())[:MOST_FINALISTS]


def why_not(candidate: Candidate, task: str, config: ExportConfig) -> Verdict:
    """Why a candidate is no finalist."""
    if candidate.loss > config.max_loss:
        return Verdict("failed", f"it lost {candidate.loss:.2f} {UNITS[task]} on the rows of the search")
    if config.optimise == "size":
        return Verdict("dropped", f"others are smaller than its {candidate.bytes:,} bytes")
    if not candidate.speed:
        return Verdict("dropped", "clearly slower than FP32 at every batch size, in its first turns")
    seen = ", ".join(f"{speed:.2f} at batch {batch}" for batch, speed in candidate.speed.items())
    return Verdict("dropped", f"others were faster in their first turns (times as fast as FP32: {seen})")
