"""Speed and size of the variants chosen by our export, compared with other quantisation tools.

    python benchmarks/export.py [OPTIONS]

Our own trainer trains the models: the default table model and a plain MLP 200-512-256-64 on a seeded table of 200
features and 40,000 rows, the ResNet with group and with batch normalisation on the handwritten digits enlarged to 32 x
32, and the transformer (4 layers of width 256) on random walks of 16 tokens. Peers are ONNX Runtime's
``quantize_static`` and ``quantize_dynamic`` with their defaults, NNCF's ``quantize`` (if it is installed), and a fixed
recipe (per-channel U8S8 of matmuls; in convolutional models also of all operators between convolutions). All are timed
on the same rows in shuffled turns. A peer counts if it does not fail our gate on the test rows. "copy" is a second copy
of the FP32 file: its difference from speed 1 is the measurement error.

Acceptance limits (bars): at batches 1, 32 and 256, the chosen variant has at least 0.95 of the best peer's speed (lower
end of the 95 % interval: 0.90) and is not slower than FP32. Optimised for size, it has at most 1.05 times the smallest
peer's size. An export takes at most two minutes. On a CPU with VNNI at batch 32, the speedup over FP32 is 1.8 for the
plain MLP, 2.4 for the ResNet with batch normalisation and 1.4 for the transformer.

The part "sizes" exports an MLP 512-512-256 for its size. Its bars: INT4 has at most 30 % of FP32's bytes, and no label
of the chosen variant depends on the rows per call, or the reason says how many.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from harness.command import benchmark, part_option
from harness.models import PLAIN_MLP, train, write_table
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures
from slipstream.pipeline.export import engine
from slipstream.pipeline.export.choose import FP32, FP32_FILE
from slipstream.pipeline.export.config import ExportConfig
from slipstream.pipeline.export.convert import exporters_silenced
from slipstream.pipeline.export.package.assemble import MODEL
from slipstream.pipeline.export.quantize.quantise import Quantiser
from slipstream.pipeline.export.quantize.recipes import Recipe, has_convolutions
from slipstream.pipeline.export.quantize.search import BATCHES, calibration_inputs
from slipstream.pipeline.export.session import at_batch, onnx_predictor
from slipstream.pipeline.prepare.engine import prepare
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.prepared.token_rows import write_token_rows
from slipstream.shared.artifacts.results.export import Estimate, LatencyFigures, read_export
from slipstream.shared.comparison.latencies import Workload, measure_latencies
from slipstream.shared.comparison.quality import quality_loss
from slipstream.shared.machine.description import VNNI, this_machine
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.models.predict import predict_records, record_targets
from slipstream.shared.models.trained import TrainedModel
from slipstream.shared.source.config import DataConfig

MAX_LOSS = 1.0
#: Bars: fractions of the best peer's speed (the estimate, the lower end of its interval); multiple of the smallest
#: peer's size.
SPEED_BAR, LEAST_BAR, SIZE_BAR = 0.95, 0.90, 1.05
#: Limits for the whole export and for its search, in seconds.
TIME_BAR, SEARCH_SECONDS = 120.0, 100.0
#: Search time of an export that is optimised for size, in seconds.
SIZE_SECONDS = 40.0
#: Speed over FP32 that still counts as "not slower", as a copy of FP32 deviates that much.
COPY = 0.95
#: Required speedups over FP32 at batch 32 on a CPU with VNNI.
VNNI_BARS = {"plain-mlp": 1.8, "resnet-batch": 2.4, "transformer": 1.4}


@dataclass(frozen=True)
class Case:
    """A model with its data and training settings."""

    data: Literal["table", "digits", "tokens"]
    model: Mapping[str, Any]
    training: Mapping[str, Any]


CASES = {
    "table": Case("table", {}, {"epochs": 4}),
    "plain-mlp": Case("table", {"name": PLAIN_MLP}, {"epochs": 8}),
    "resnet-group": Case("digits", {"name": "resnet"}, {"epochs": 12}),
    "resnet-batch": Case("digits", {"name": "resnet", "arguments": {"norm": "batch"}}, {"epochs": 12}),
    "transformer": Case("tokens", {"name": "transformer"}, {"epochs": 1, "batch_size": 32, "learning_rate": 0.001}),
}


def write_digits(path: Path, side: int) -> None:
    """Write scikit-learn's 8 x 8 digits, enlarged to ``side`` x ``side`` by repeating pixels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images / 16 * 255, np.ones((side // 8, side // 8))).astype(np.uint8)
    np.savez(path, images=images, labels=digits.target)


def walks(rows: int, length: int, tokens: int) -> np.ndarray:
    """Return random walks over tokens, of shape ``(rows, length)``.

    Every token has four successors, the first with probability 0.6.
    """
    rng = np.random.default_rng(0)
    after, walked = rng.integers(0, tokens, (tokens, 4)), rng.integers(0, tokens, (rows, length))
    for place in range(1, length):
        walked[:, place] = after[walked[:, place - 1], rng.choice(4, rows, p=[0.6, 0.2, 0.1, 0.1])]
    return walked


def prepared_data(case: Case, directory: Path, quick: bool) -> PreparedData:
    out = directory / "prepared"
    if case.data == "tokens":
        rows = walks(9000, 17, 64)
        return write_token_rows(out, {"train": rows[:6000], "validation": rows[6000:7000], "test": rows[7000:]}, 64)
    target = "label" if case.data == "table" else ""
    source = directory / ("table.parquet" if case.data == "table" else "digits.npz")
    if case.data == "table":
        write_table(source, 2000 if quick else 40_000, 20 if quick else 200)
    else:
        write_digits(source, 32)
    prepare(out, str(source), target, DataConfig(), {"command": "benchmarks/export.py"}, 1)
    return PreparedData.open(out)


def trained_model(case: Case, data: PreparedData, directory: Path, quick: bool) -> TrainedModel:
    training = TrainingConfig.from_dict({**case.training, "epochs": 1} if quick else dict(case.training))
    return train(data.artifact.directory, directory / "trained", ModelConfig.from_dict(case.model), training)


def make_peers(fp32: Path, data: PreparedData, config: ExportConfig, directory: Path) -> dict[str, Path]:
    """Quantise ``fp32`` with every peer and return the files by the peer's name.

    A peer that fails is skipped, with a line on stderr.
    """
    inputs = calibration_inputs(data, config)
    makers = {"ort-static": ort_static, "ort-dynamic": ort_dynamic, "nncf": nncf_quantize, "fixed-recipe": fixed_recipe}
    made = {}
    for name, make in makers.items():
        target = directory / f"{name}.onnx"
        try:
            with exporters_silenced():
                make(fp32, target, inputs)
            onnx_predictor(target, 1)
            made[name] = target
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}", file=sys.stderr)
    return made


def ort_static(fp32: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    import onnx
    from onnxruntime.quantization import quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from slipstream.pipeline.export.quantize.quantise import calibration_rows

    prepared = target.with_suffix(".prepared")
    quant_pre_process(fp32, prepared)
    names = [value.name for value in onnx.load(fp32).graph.input]
    quantize_static(prepared, target, calibration_rows(names, inputs))


def ort_dynamic(fp32: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = target.with_suffix(".prepared")
    quant_pre_process(fp32, prepared)
    quantize_dynamic(prepared, target)


def nncf_quantize(fp32: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    os.environ["NNCF_CI"] = "1"  # disables NNCF's usage reports
    import nncf
    import onnx

    model = onnx.load(fp32)
    names = [value.name for value in model.graph.input]
    rows = [
        {name: array[row : row + 1] for name, array in zip(names, inputs, strict=True)} for row in range(len(inputs[0]))
    ]
    onnx.save(nncf.quantize(model, nncf.Dataset(rows), subset_size=len(rows)), target)


def fixed_recipe(fp32: Path, target: Path, inputs: Sequence[np.ndarray]) -> None:
    import onnx

    images = has_convolutions(onnx.load(fp32))
    recipe = Recipe("static", operators="between", fp32_outputs=False) if images else Recipe("static", smooth=True)
    with tempfile.TemporaryDirectory() as scratch:
        Quantiser(fp32, inputs, Path(scratch), 7 if this_machine().saturates else 8).make(recipe, target)


def compare(name: str, directory: Path, quick: bool) -> Table:
    """Export one model, time it against the peers, and return the table, with the bars as remarks."""
    case = CASES[name]
    data = prepared_data(case, directory, quick)
    trained = trained_model(case, data, directory, quick)
    # The digits have too few test rows to show a loss of one point, so variants are accepted unless they are
    # shown to fail, ours and the peers'.
    searching = 1.0 if quick else SEARCH_SECONDS
    config = ExportConfig(seconds=searching, max_loss=MAX_LOSS, when_in_doubt="take", decide_at_batch=32)
    exported, started = directory / "exported", time.perf_counter()
    engine.export(exported, trained, data, config, {"command": "benchmarks/export.py"})
    taken = time.perf_counter() - started
    report = read_export(exported)
    files = {variant.name: exported / variant.file for variant in report.variants if variant.file}
    shutil.copyfile(exported / FP32_FILE, directory / "copy.onnx")
    peers = make_peers(exported / FP32_FILE, data, config, directory)
    test = data.split("test")
    failed = failing({**peers}, exported / FP32_FILE, data, test)
    contenders = {FP32: files[FP32], "copy": directory / "copy.onnx", **peers}
    contenders |= {f"chosen-{batch}": files[best] for batch, best in report.best.items()}
    loads = {key: partial(onnx_predictor, path, 1) for key, path in contenders.items()}
    seconds = 0.5 if quick else 45.0
    workload = Workload(data.signature, test, 1)
    timed = measure_latencies(loads, FP32, workload, seconds, BATCHES)
    able = [peer for peer in peers if peer not in failed]
    rows = {key: row_of(timed[key], path) for key, path in contenders.items()}
    remarks = [f"fails the gate: {', '.join(sorted(failed))}"] if failed else []
    remarks += [f"batch {batch}: too slow to be searched" for batch in BATCHES if str(batch) not in report.best]
    for batch in report.best:
        chosen = f"chosen-{batch}"
        against = measure_latencies(
            {FP32: loads[FP32], chosen: loads[chosen]} | {peer: loads[peer] for peer in able},
            chosen,
            workload,
            seconds / 2,
            [int(batch)],
        )
        remarks += list(bars(name, batch, report.best[batch], against, able))
        if batch == "32" and name in VNNI_BARS:
            share = at_batch(contenders[chosen], data.signature, test, config, 32).products
            fastest = 1 / (share * speedup_of(against, FP32, batch).value)
            remarks.append(
                f"batch {batch}: {share:.0%} of its time are ONNX Runtime's kernels of products and convolutions; were "
                f"all else free, it would be {fastest:.2f} times as fast as FP32"
            )
    smallest = directory / "smallest"
    for_size = replace(config, optimise="size", seconds=searching if quick else SIZE_SECONDS)
    engine.export(smallest, trained, data, for_size, {"command": "benchmarks/export.py"})
    remarks.append(size_bar(smallest / MODEL, [contenders[peer] for peer in able]))
    remarks.append(f"the export took {taken:.0f} s, asked at most {TIME_BAR:.0f}: {held(taken <= TIME_BAR)}")
    return Table(name, columns(), rows, tuple(remarks))


def write_tanh_table(path: Path, rows: int) -> None:
    """Write a table of 100 features, whose label follows a network of 64 tanh units."""
    import pandas as pd

    draw = np.random.default_rng(3)
    features = draw.normal(size=(rows, 100)).astype("f4")
    weights, heads = draw.normal(size=(100, 64)) / 10, draw.normal(size=64)
    score = np.tanh(2 * features @ weights) @ heads
    score = (score - score.mean()) / score.std()
    table = pd.DataFrame(features.round(4), columns=[f"f{index}" for index in range(100)])
    table["y"] = np.where(draw.random(rows) < 1 / (1 + np.exp(-4 * score)), "b", "a")
    table.to_parquet(path)


def sizes(directory: Path, quick: bool) -> Table:
    """Export an MLP for its size; every timed variant has its bytes and the labels that depend on the rows per call."""
    write_tanh_table(directory / "table.parquet", 2000 if quick else 20_000)
    source = str(directory / "table.parquet")
    prepare(directory / "prepared", source, "y", DataConfig(), {"command": "benchmarks/export.py"}, 1)
    data = PreparedData.open(directory / "prepared")
    model = ModelConfig("mlp", {"hidden": [512, 512, 256]})
    trained = train(data.artifact.directory, directory / "trained", model, TrainingConfig(epochs=1))
    config = ExportConfig(seconds=10.0, optimise="size")
    engine.export(directory / "exported", trained, data, config, {"command": "benchmarks/export.py"})
    report = read_export(directory / "exported")
    files = {each.name: each for each in report.timed if each.file}
    whole = files[FP32].bytes or 1
    test = data.split("test")
    rows: dict[str, Figures] = {}
    for name, each in files.items():
        run = onnx_predictor(directory / "exported" / str(each.file), 1)
        labels = [predict_records(run, data.signature, test, most).argmax(axis=1) for most in (1, 256)]
        rows[name] = {"bytes": each.bytes or 0, "share": 100 * (each.bytes or 0) / whole}
        rows[name] |= {"accuracy": 100 * float(np.mean(labels[0] == record_targets(test)))}
        rows[name] |= {"differ": int(np.sum(labels[0] != labels[1]))}
    share, depend = rows["int4"]["share"] if "int4" in rows else 100.0, rows[report.chosen]["differ"]
    remarks = (
        f"INT4 has {share:.1f} % of FP32's bytes, asked at most 30: {held(share <= 30)}",
        f"{depend} of {len(test):,} labels of {report.chosen} depend on the rows per call, asked 0, or said: "
        + held(not depend or "depends on the other rows of its call" in report.why),
    )
    columns = (
        Column("KB", "bytes", "{:.1f}", 1000),
        Column("% of FP32", "share", "{:.1f}"),
        Column("accuracy %", "accuracy", "{:.2f}"),
        Column("labels by batch", "differ", "{:.0f}"),
    )
    return Table("sizes", columns, rows, remarks)


def failing(peers: Mapping[str, Path], fp32: Path, data: PreparedData, test: np.ndarray) -> set[str]:
    """Return the peers whose loss of accuracy significantly exceeds :data:`MAX_LOSS`."""
    task, truth = data.signature.task, record_targets(test)
    before = predict_records(onnx_predictor(fp32, 1), data.signature, test)
    losses = {
        name: quality_loss(
            task, truth, before, predict_records(onnx_predictor(path, 1), data.signature, test), MAX_LOSS
        )
        for name, path in peers.items()
    }
    return {name for name, loss in losses.items() if loss.answer(MAX_LOSS) == "failed"}


def row_of(latency: Mapping[str, LatencyFigures], path: Path) -> Figures:
    figures: Figures = {"bytes": path.stat().st_size}
    for batch, at in latency.items():
        if at.p50:
            figures[f"p50_ms_{batch}"] = at.p50.value
        if at.speedup:
            figures |= {f"speed_{batch}": at.speedup.value, f"low_{batch}": at.speedup.low}
    return figures


def speedup_of(timed: Mapping[str, Mapping[str, LatencyFigures]], name: str, batch: str) -> Estimate:
    """Return the speedup over the reference of a file that is not the reference itself."""
    speedup = timed[name][batch].speedup
    assert speedup
    return speedup


def bars(
    name: str, batch: str, chosen: str, against: Mapping[str, Mapping[str, LatencyFigures]], able: Sequence[str]
) -> Iterator[str]:
    """Yield one line of text per bar; ``against`` has the latencies with the variant ``chosen`` as reference."""

    def chosen_over(other: str) -> Estimate:
        theirs = speedup_of(against, other, batch)
        return Estimate(1 / theirs.value, 1 / theirs.high, 1 / max(theirs.low, 1e-9))

    if able:
        best = min(able, key=lambda peer: chosen_over(peer).value)
        found = chosen_over(best)
        yield (
            f"batch {batch}: {chosen} has {found.value:.2f} ({found.low:.2f} to {found.high:.2f}) of the "
            f"speed of {best}, asked {SPEED_BAR} ({LEAST_BAR}): "
            + held(found.value >= SPEED_BAR and found.low >= LEAST_BAR)
        )
    fp32 = chosen_over(FP32)
    yield (
        f"batch {batch}: {chosen} is {fp32.value:.2f} ({fp32.low:.2f} to {fp32.high:.2f}) times as fast as "
        f"FP32, asked not slower: " + held(fp32.high >= 1 and fp32.value >= COPY)
    )
    if batch == "32" and name in VNNI_BARS and set(VNNI) & set(this_machine().flags):
        yield f"batch {batch}: with VNNI asked {VNNI_BARS[name]}: " + held(fp32.value >= VNNI_BARS[name])


def size_bar(chosen: Path, peers: Sequence[Path]) -> str:
    ours = chosen.stat().st_size
    theirs = min((path.stat().st_size for path in peers), default=ours)
    return f"size: {ours / theirs:.2f} of the smallest peer's, asked at most {SIZE_BAR}: " + held(
        ours <= SIZE_BAR * theirs
    )


def held(met: bool) -> str:
    return "held" if met else "NOT HELD"


def columns() -> tuple[Column, ...]:
    """Return the columns; ``speed`` is the speedup over FP32, ``low`` the lower end of its interval."""
    by_batch = [
        (
            Column(f"batch {batch}: p50 ms", f"p50_ms_{batch}", "{:.4f}"),
            Column("speed", f"speed_{batch}", "{:.2f}"),
            Column("low", f"low_{batch}", "{:.2f}"),
        )
        for batch in BATCHES
    ]
    return (*chain.from_iterable(by_batch), Column("KB", "bytes", "{:.0f}", 1000))


@part_option([*CASES, "sizes"])
@benchmark
def main(quick: bool, parts: Sequence[str]) -> Iterator[Table]:
    """Compare the chosen variant with other tools' variants of the same model."""
    for name in ["plain-mlp"] if quick else parts:
        with tempfile.TemporaryDirectory() as directory:
            yield sizes(Path(directory), quick) if name == "sizes" else compare(name, Path(directory), quick)


if __name__ == "__main__":
    main()
