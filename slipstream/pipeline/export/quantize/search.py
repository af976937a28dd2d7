"""Search for the finalists by estimated quality and speed on validation rows.

The test split is used once, for the finalists (:mod:`slipstream.pipeline.export.engine`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from slipstream.pipeline.export.choose import GateResult, is_within_size, left_out
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.quantize.recipes import CONVOLUTIONS, FOR_GPUS, LARGE, Recipe, fp32_shares, recipes_for
from slipstream.pipeline.export.session import onnx_predictor
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.export import VariantFigures
from slipstream.shared.comparison.latencies import SCREENING_ROUNDS, Workload, screen_speedups
from slipstream.shared.comparison.quality import UNITS, correct_predictions
from slipstream.shared.models.decision import with_threshold
from slipstream.shared.models.predict import ModelFunction, predict_records, record_inputs, record_targets


# All are timed briefly, then the faster half for twice as long, and so on.
@dataclass
class ExportCandidate:
    """Quantised file with its loss on the search rows and its speedup over FP32 by batch size."""

    name: str
    recipe: Recipe
    path: Path
    loss: float
    speed: dict[int, float] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """Recipe code; for mixed-precision files also the number of FP32 layers."""
        return self.path.name.removeprefix("model.").removesuffix(".onnx")

    @property
    def bytes(self) -> int:
        return self.path.stat().st_size


#: A candidate that never reaches this speed, relative to FP32, at a batch size is dropped there.
CLEARLY_SLOWER = 0.9
FP32 = "onnx-fp32"


@dataclass(frozen=True)
class SpeedRanking:
    """Speeds of candidates relative to the file ``fp32``, on ``records`` under ``config``."""

    fp32: Path
    signature: Signature
    records: np.ndarray
    config: ExportConfig
    batches: Sequence[int]

    @property
    def workload(self) -> Workload:
        return Workload(self.signature, self.records, self.config.threads)

    def screen(self, candidates: Sequence[ExportCandidate], deadline: float) -> None:
        """Set the candidates' speeds, except at batch sizes at which they are clearly slower than FP32.

        Every batch size gets at least one round; none starts after ``deadline`` (``time.perf_counter``).
        """
        if not candidates:
            return
        runs = self.loaded(candidates)
        for batch, until in self.shares(deadline):
            seen = screen_speedups(runs, FP32, self.workload, batch, SCREENING_ROUNDS, until)
            for candidate in candidates:
                if max(seen[candidate.name]) >= CLEARLY_SLOWER:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])

    def rank(self, candidates: Sequence[ExportCandidate], deadline: float) -> dict[int, list[ExportCandidate]]:
        """Return, by batch size, the candidates with a speed, fastest first.

        The fastest of many may only be lucky. So the faster half is measured again for twice as many rounds, until one
        is left or ``deadline`` (``time.perf_counter``) has passed.
        """
        runs, ranked = self.loaded(candidates), dict[int, list[ExportCandidate]]()
        for batch, until in self.shares(deadline):
            field, slower, rounds = fastest_first(candidates, batch), list[ExportCandidate](), SCREENING_ROUNDS
            while len(field) > 1 and time.perf_counter() < until:
                rounds *= 2
                compared = {name: runs[name] for name in (FP32, *(each.name for each in field))}
                seen = screen_speedups(compared, FP32, self.workload, batch, rounds, until)
                for candidate in field:
                    candidate.speed[batch] = statistics.median(seen[candidate.name])
                field = fastest_first(field, batch)
                half = -(-len(field) // 2)
                field, slower = field[:half], [*field[half:], *slower]
            ranked[batch] = [*field, *slower]
        return ranked

    def shares(self, deadline: float) -> Iterator[tuple[int, float]]:
        """Yield the batch sizes, smallest first, with the time at which each should end."""
        for left, batch in zip(range(len(self.batches), 0, -1), sorted(self.batches), strict=True):
            now = time.perf_counter()
            yield batch, now + (deadline - now) / left

    def loaded(self, candidates: Sequence[ExportCandidate]) -> Mapping[str, ModelFunction]:
        paths = {FP32: self.fp32, **{candidate.name: candidate.path for candidate in candidates}}
        return {name: onnx_predictor(path, self.config.threads, self.config.provider) for name, path in paths.items()}


def fastest_first(candidates: Sequence[ExportCandidate], batch: int) -> list[ExportCandidate]:
    return sorted((each for each in candidates if batch in each.speed), key=lambda each: -each.speed[batch])


def smallest_first(candidates: Sequence[ExportCandidate]) -> list[ExportCandidate]:
    return sorted(candidates, key=lambda each: each.bytes)


#: Function that returns a file's loss on the search rows, in points of accuracy or percent of RMSE.
LossOfFile = Callable[[Path], float]
BATCHES = (1, 32, 256)
MOST_FINALISTS = 3
#: Minimum and maximum number of validation rows that estimate a candidate's loss.
FEWEST_ROWS, MOST_ROWS = 64, 5000
#: Fractions of ``export.seconds``: duration of one loss estimate, then the ends of making files, screening their
#: speeds, making mixed-precision files, and ranking the fastest.
LOSS, MAKING, SCREENING, MIXING, RANKING = 0.01, 0.35, 0.5, 0.55, 0.65
#: Files above this fraction of FP32's size are dropped, as too little was quantised.
SHRUNK = 0.9


@dataclass
class SearchResult:
    """Finalists, and the report entries of all other recipes."""

    finalists: list[ExportCandidate]
    others: list[VariantFigures]


def search_recipes(
    directory: Path,
    fp32: Path,
    data: PreparedData,
    config: ExportConfig,
    started: float,
    batches: Sequence[int],
    threshold: float | None = None,
) -> SearchResult:
    """Make candidates from the file ``fp32`` and choose at most three finalists.

    The search ends before ``config.seconds`` after ``started`` (``time.perf_counter``). Only the finalists' files
    remain in ``directory``.
    """
    records, others = search_rows(fp32, data, config), list[VariantFigures]()
    over_budget = not is_within_size(fp32.stat().st_size, config)
    with TemporaryDirectory(dir=directory) as scratch:
        quantiser = Quantiser(
            fp32, calibration_inputs(data, config), Path(scratch), 8 if config.target == "vnni" else 7
        )
        expected = predict_with_file(fp32, data, records, config)
        loss_of = partial(
            quality_loss, data=data, records=records, expected=expected, config=config, threshold=threshold
        )
        candidates = list(make_all(directory, quantiser, loss_of, config, started, others))
        speeds = SpeedRanking(fp32, data.signature, records, config, batches)
        speeds.screen(candidates, started + SCREENING * config.seconds)
        try:
            small = [each for each in candidates if is_within_size(each.bytes, config)]
            mixed = make_mixed_precision(directory, quantiser, small, loss_of, config, started)
        except Exception as error:
            others.append(left_out("mixed precision", creation_failure(error), recipe="mixed"))
            for path in directory.glob("model.*-mixed*.onnx"):
                path.unlink()
        else:
            candidates += mixed
            speeds.screen(mixed, started + MIXING * config.seconds)
    good = [each for each in candidates if each.loss <= config.max_loss]
    if over_budget:
        good = [each for each in good if is_within_size(each.bytes, config)] or smallest_first(good)[:MOST_FINALISTS]
    ranked = {} if config.optimise == "size" else speeds.rank(good, started + RANKING * config.seconds)
    finalists = choose_finalists(good, ranked, config, over_budget)
    for candidate in candidates:
        if candidate not in finalists:
            verdict = rejection_reason(candidate, data.signature.task, config)
            others.append(left_out(candidate.name, verdict, recipe=candidate.code))
            candidate.path.unlink()
    return SearchResult(finalists, others)


def calibration_inputs(data: PreparedData, config: ExportConfig) -> tuple[np.ndarray, ...]:
    """Return calibration rows of the training split, as model inputs."""
    return record_inputs(data.signature, data.sample("train", config.calibration_rows))


def search_rows(fp32: Path, data: PreparedData, config: ExportConfig) -> np.ndarray:
    """Return rows of the validation split, or of the training split if that is empty.

    Their number is limited so that FP32 predicts them in the fraction ``LOSS`` of ``config.seconds``.
    """
    records = data.sample("validation", MOST_ROWS)
    if not len(records):
        records = data.sample("train", MOST_ROWS)
    started = time.perf_counter()
    predict_with_file(fp32, data, records[:FEWEST_ROWS], config)
    taken = (time.perf_counter() - started) / len(records[:FEWEST_ROWS])
    return records[: max(FEWEST_ROWS, int(LOSS * config.seconds / max(taken, 1e-9)))]


def predict_with_file(path: Path, data: PreparedData, records: np.ndarray, config: ExportConfig) -> np.ndarray:
    return predict_records(onnx_predictor(path, 1, config.provider), data.signature, records)


def quality_loss(
    path: Path,
    *,
    data: PreparedData,
    records: np.ndarray,
    expected: np.ndarray,
    config: ExportConfig,
    threshold: float | None = None,
) -> float:
    """Return a file's loss on the search rows, in points of accuracy or percent of RMSE."""
    outputs, truth = predict_with_file(path, data, records, config), record_targets(records)
    task = data.signature.task
    if task != "regression":
        decided = (with_threshold(each, threshold) for each in (expected, outputs))
        right, still = (float(np.mean(correct_predictions(task, each, truth))) for each in decided)
        return 100 * (right - still)
    before, after = (float(np.sqrt(np.mean((each[:, 0] - truth) ** 2))) for each in (expected, outputs))
    return 100 * (after / max(before, 1e-12) - 1)


def make_all(
    directory: Path,
    quantiser: Quantiser,
    loss_of: LossOfFile,
    config: ExportConfig,
    started: float,
    others: list[VariantFigures],
) -> Iterable[ExportCandidate]:
    """Yield a candidate per recipe until the time is over, at least one; collect failures in ``others``."""
    import onnx

    seen, fp32 = dict[bytes, str](), onnx.load(quantiser.fp32)
    for_size = config.optimise == "size" or not is_within_size(quantiser.fp32.stat().st_size, config)
    recipes = FOR_GPUS if config.provider == "cuda" else recipes_for(fp32, for_size)
    late = GateResult("not tried", f"the time limit was reached (export.seconds: {config.seconds:g})")
    for recipe in recipes:
        path = directory / f"model.{recipe.code}.onnx"
        try:
            if recipe != recipes[0] and time.perf_counter() - started > MAKING * config.seconds:
                verdict = late
            else:
                quantiser.make(recipe, path)
                content = path.read_bytes()
                if content in seen:
                    verdict = GateResult("the same", f"gives the same file as {seen[content]}")
                elif not has_shrunk(path, quantiser.fp32):
                    verdict = GateResult("did not shrink", size_in_words(path, quantiser.fp32))
                else:
                    seen[content] = recipe.name
                    yield ExportCandidate(recipe.name, recipe, path, loss_of(path))
                    continue
        except Exception as error:
            verdict = creation_failure(error)
        others.append(left_out(recipe.name, verdict, recipe=recipe.code))
        path.unlink(missing_ok=True)


def has_shrunk(path: Path, fp32: Path) -> bool:
    return path.stat().st_size <= SHRUNK * fp32.stat().st_size


def size_in_words(path: Path, fp32: Path) -> str:
    """Return a file's size relative to the file ``fp32``, and the operators with most of its FP32 weights."""
    import onnx

    words = f"its file has {100 * path.stat().st_size / fp32.stat().st_size:.0f} % of FP32's size"
    large = [f"{name} ({share:.0%})" for name, share in fp32_shares(onnx.load(path)).items() if share >= LARGE]
    return f"{words}; these weights stay in FP32: {', '.join(large)}" if large else words


def creation_failure(error: Exception) -> GateResult:
    """Return the gate result of a variant whose creation raised ``error``."""
    reason = " ".join(str(error).split()) or type(error).__name__
    return GateResult("not made", f"could not be made: {reason[:300]}")


def make_mixed_precision(
    directory: Path,
    quantiser: Quantiser,
    candidates: Sequence[ExportCandidate],
    loss_of: LossOfFile,
    config: ExportConfig,
    started: float,
) -> list[ExportCandidate]:
    """Return the fastest candidate, if its loss exceeds ``max_loss``, with its most sensitive layers in FP32.

    The number of layers is doubled until the loss is within the limit.
    """
    at = config.decide_at_batch
    ranked = fastest_first(candidates, at)
    if not ranked or ranked[0].loss <= config.max_loss or ranked[0].recipe.kind not in ("static", "dynamic"):
        return []
    fastest, deadline = ranked[0], started + MIXING * config.seconds
    layers = list(rank_by_error(quantiser, fastest.recipe, deadline))
    count = 1
    while count < len(layers) and time.perf_counter() < deadline:
        name = f"{fastest.name}, {count} layer{'s' if count > 1 else ''} in FP32"
        path = directory / f"model.{fastest.code}-mixed{count}.onnx"
        quantiser.make(fastest.recipe, path, fp32=layers[:count])
        if (loss := loss_of(path)) <= config.max_loss:
            return [ExportCandidate(name, fastest.recipe, path, loss)]
        path.unlink()
        count *= 2
    return []


def choose_finalists(
    good: Sequence[ExportCandidate],
    ranked: Mapping[int, Sequence[ExportCandidate]],
    config: ExportConfig,
    over_budget: bool = False,
) -> list[ExportCandidate]:
    """Return the fastest at every batch size, then the next fastest at ``decide_at_batch``; or the smallest."""
    at, smallest = config.decide_at_batch, smallest_first(good)
    if config.optimise == "size":
        # The smallest may all be too slow for a budget of latency.
        fastest = fastest_first(good, at)[:1] if config.budget_ms else []
        chosen = [*smallest[:1], *fastest, *smallest]
    else:
        batches = sorted(ranked, key=lambda batch: batch != at)
        first = [ranked[batch][0] for batch in batches if ranked[batch]]
        # With FP32 over the budget no speed is required, so those without a rank, which are clearly slower, may do.
        chosen = [*first, *ranked[at], *(smallest if over_budget else [])]
    return list({each.name: each for each in chosen}.values())[:MOST_FINALISTS]


def rejection_reason(candidate: ExportCandidate, task: str, config: ExportConfig) -> GateResult:
    """Return why a candidate is not a finalist."""
    if candidate.loss > config.max_loss:
        return GateResult("failed", f"it lost {candidate.loss:.2f} {UNITS[task]} on the rows of the search")
    if not is_within_size(candidate.bytes, config):
        return GateResult("over budget", f"its {candidate.bytes:,} bytes are over the budget")
    if config.optimise == "size":
        return GateResult("dropped", f"others are smaller than its {candidate.bytes:,} bytes")
    if not candidate.speed:
        return GateResult("dropped", "clearly slower than FP32 at every batch size in the first measurements")
    seen = ", ".join(f"{speed:.2f} at batch {batch}" for batch, speed in candidate.speed.items())
    return GateResult("dropped", f"others were faster in the first measurements (times as fast as FP32: {seen})")


def matmul_names(path: Path) -> list[str]:
    """Return the names of convolutions and matmuls with a weight."""
    import onnx

    graph = onnx.load(path).graph
    weights = {tensor.name for tensor in graph.initializer}
    return [node.name for node in graph.node if node.op_type in CONVOLUTIONS and weights & set(node.input)]


def rank_by_error(quantiser: Quantiser, recipe: Recipe, deadline: float) -> dict[str, float]:
    """Return the mean absolute output error of quantising only one layer, by name, largest first.

    Layers after ``deadline`` (``time.perf_counter``) are missing.
    """
    expected = onnx_predictor(quantiser.fp32, 1)(quantiser.inputs)
    target, errors = quantiser.scratch / "single.onnx", dict[str, float]()
    for name in matmul_names(quantiser.prepared(recipe.smooth)):
        if time.perf_counter() > deadline:
            break
        quantiser.make(recipe, target, only=[name])
        errors[name] = float(np.abs(onnx_predictor(target, 1)(quantiser.inputs) - expected).mean())
    return dict(sorted(errors.items(), key=lambda item: -item[1]))
