"""The training loader beside what a user would pick instead, and beside the speed of memory.

    python benchmarks/loader.py [--quick] [--json FILE] [--part bound|peers|shuffle] [--runs N]

2 M rows of 200 float32 in shuffled segments, read in batches of 1024 by one process from a warm page cache, one thread
per library. ``bound``: one epoch of ours, with and without verification, and contiguous copies of 1024 rows from the
memory map into one reused buffer take turns in one process; medians of 7. ``peers``: each loader in a fresh process,
in turns, the first of which is discarded; medians; loaders that are not installed are left out (litdata is no part of
``[bench]``: it asks for torchvision; mosaicml-streaming asks for older libraries than ours). ``shuffle``: the
variance of batch means over what drawing without replacement gives (1 is ideal), for a quantity that was sorted in the
source.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np

from tasks.artifacts.format import Artifact, ArtifactWriter
from tasks.artifacts.prepared import KIND, TARGET, PreparedData, Signature, TensorSpec
from tasks.preprocess.shuffle.sorted_runs import block_rows

COLUMNS, BATCH = 200, 1024
PAIRS = 7
SIGNATURE = Signature((TensorSpec("numeric", "float32", (COLUMNS,)),), "classification", "y", ("a", "b"))


# The data: the first column is the row's place in a source that was sorted


def make(directory: Path, rows: int) -> None:
    """Prepared data, and the same table as ``x.npy`` and ``y.npy`` for the others."""
    draw = np.random.default_rng(0)
    place = draw.permutation(rows)
    x = np.lib.format.open_memmap(directory / "x.npy", "w+", np.float32, (rows, COLUMNS))
    y = np.lib.format.open_memmap(directory / "y.npy", "w+", np.int64, (rows,))
    writer = ArtifactWriter(directory / "prepared")
    record = SIGNATURE.record
    with writer.create("train-00000.rows", block_rows(record.itemsize) * record.itemsize) as file:
        for begin in range(0, rows, 1 << 16):
            chosen = place[begin : begin + (1 << 16)]
            records = np.zeros(len(chosen), record)
            records["numeric"] = draw.normal(size=(len(chosen), COLUMNS))
            records["numeric"][:, 0] = chosen
            records[TARGET] = chosen % 2
            file.write(records.view(np.uint8))
            x[begin : begin + len(chosen)], y[begin : begin + len(chosen)] = records["numeric"], records[TARGET]
    writer.write_json("signature.json", SIGNATURE.to_json())
    writer.finish(KIND, {})
    x.flush()
    y.flush()


# The loaders: each gives batches of tensors or arrays, endlessly or for one epoch


def ours(directory: Path) -> Iterator[Any]:
    import torch

    from tasks.train.data.loader import layout, training_batches
    from tasks.train.data.order import GlobalOrder

    data = PreparedData.open(directory / "prepared")
    return training_batches(data, GlobalOrder(layout(data, "train"), BATCH, seed=0), 0, 1, torch.device("cpu"))


def in_memory(directory: Path) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.from_numpy(np.load(directory / "x.npy")), torch.from_numpy(np.load(directory / "y.npy")))


def data_loader(directory: Path, workers: int = 0) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    return iter(DataLoader(in_memory(directory), BATCH, shuffle=True, num_workers=workers))


def data_loader_with_workers(directory: Path) -> Iterator[Any]:
    return data_loader(directory, workers=2)


def grain(directory: Path) -> Iterator[Any]:
    from grain import MapDataset

    x, y = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in "xy")
    return iter(MapDataset.range(len(x)).shuffle(seed=0).map(lambda i: (x[i], y[i])).batch(BATCH).to_iter_dataset())


def hf_datasets(directory: Path) -> Iterator[Any]:
    from datasets import load_from_disk

    return iter(load_from_disk(str(directory / "hf")).shuffle(seed=0).with_format("torch").iter(BATCH))


def make_hf_datasets(directory: Path) -> None:
    import pyarrow as pa
    from datasets import Dataset

    x, y = (np.load(directory / f"{name}.npy") for name in "xy")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.reshape(-1)), COLUMNS)
    Dataset(pa.table({"x": lists, "y": y})).save_to_disk(str(directory / "hf"))


def litdata(directory: Path) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset

    rows = StreamingDataset(str(directory / "litdata"), shuffle=True, seed=0)
    return iter(StreamingDataLoader(rows, batch_size=BATCH))


def make_litdata(directory: Path) -> None:
    from litdata.streaming import Cache

    x, y = (np.load(directory / f"{name}.npy") for name in "xy")
    cache = Cache(str(directory / "litdata"), chunk_bytes="64MB")
    for number, (row, target) in enumerate(zip(x, y, strict=True)):
        cache[number] = {"x": row, "y": int(target)}
    cache.done()
    cache.merge()


#: The loader, the module it needs, and what writes its own kind of file.
LOADERS: dict[str, tuple[Callable[[Path], Iterator[Any]], str, Callable[[Path], None] | None]] = {
    "ours": (ours, "torch", None),
    "DataLoader": (data_loader, "torch", None),
    "DataLoader, 2 workers": (data_loader_with_workers, "torch", None),
    "grain": (grain, "grain", None),
    "HF datasets": (hf_datasets, "datasets", make_hf_datasets),
    "litdata": (litdata, "litdata", make_litdata),
}


# Measuring


def rate(batches: Iterator[Any], count: int) -> float:
    """Rows per second over the next ``count`` batches, after one that starts everything."""
    next(batches)
    started = time.perf_counter()
    for _ in itertools.islice(batches, count):
        pass
    return count * BATCH / (time.perf_counter() - started)


def copies(raw: np.ndarray) -> Iterator[None]:
    """Contiguous copies of batches of rows into one reused buffer."""
    buffer = np.empty((BATCH, raw.shape[1]), np.uint8)
    for begin in itertools.cycle(range(0, len(raw) - BATCH + 1, BATCH)):
        np.copyto(buffer, raw[begin : begin + BATCH])
        yield


def bound_part(directory: Path, rows: int, runs: int) -> dict[str, Any]:
    """Pairs of an epoch of ours and of an epoch of plain copies."""
    import torch

    torch.set_num_threads(1)
    raw = PreparedData.open(directory / "prepared").mapped("train-00000.rows")
    count = rows // BATCH - 1
    found: dict[str, list[float]] = {"copies": [], "ours": [], "ours, unverified": []}
    plain, verified, unverified = copies(raw), ours(directory), ours(directory)
    for pair in range(PAIRS + 1):
        taken = {"copies": rate(plain, count), "ours": rate(verified, count)}
        with mock.patch.object(Artifact, "check_block"):
            taken["ours, unverified"] = rate(unverified, count)
        for name, value in taken.items():
            if pair:
                found[name].append(value)
    of_copies = [mine / bound for mine, bound in zip(found["ours"], found["copies"], strict=True)]
    of_unverified = [mine / other for mine, other in zip(found["ours"], found["ours, unverified"], strict=True)]
    figures = {name: statistics.median(values) for name, values in found.items()}
    click.echo(
        f"\nThe speed of memory, {rows:,} x {COLUMNS}, medians of {PAIRS}\n{'':<24}{'krows/s':>9}{'x copies':>10}"
    )
    for name, value in figures.items():
        ratio = statistics.median(a / b for a, b in zip(found[name], found["copies"], strict=True))
        click.echo(f"{name:<24}{value / 1e3:9.0f}{ratio:10.2f}")
    spread = f"{min(of_copies):.2f} to {max(of_copies):.2f}"
    click.echo(f"ours over copies {statistics.median(of_copies):.2f} (at least 0.40 expected; {spread})")
    return {
        "rows_per_s": figures,
        "of_copies": statistics.median(of_copies),
        "of_copies_range": [min(of_copies), max(of_copies)],
        "of_unverified": statistics.median(of_unverified),
    }


def peers_part(directory: Path, rows: int, runs: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    for name, (_, module, maker) in LOADERS.items():
        if importlib.util.find_spec(module) is None:
            click.echo(f"  {name}: not installed, left out", err=True)
            continue
        if maker is not None:
            subprocess.run([sys.executable, __file__, "--maker", name, "--data", str(directory)], check=True)
        found[name] = []
    # Slow loaders need not run through an epoch for a rate: each has about ten seconds of batches.
    for turn in range(runs + 1):
        for name, figures in found.items():
            command = [sys.executable, __file__, "--loader", name, "--data", str(directory), "--rows", str(rows)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            taken = json.loads(printed.splitlines()[-1])
            click.echo(f"  {name:<24}{taken['rows_per_s'] / 1e3:9.1f} krows/s", err=True)
            if turn:
                figures.append(taken)
    medians = {
        name: {key: statistics.median(run[key] for run in figures) for key in figures[0]}
        for name, figures in found.items()
    }
    mine = medians["ours"]["rows_per_s"]
    click.echo(
        f"\nLoaders, {rows:,} x {COLUMNS}, batches of {BATCH}\n{'':<24}{'krows/s':>9}{'anon GiB':>10}{'ours':>9}"
    )
    for name, taken in medians.items():
        memory = f"{taken['anonymous_bytes'] / 2**30:10.2f}"
        click.echo(f"{name:<24}{taken['rows_per_s'] / 1e3:9.1f}{memory}{mine / taken['rows_per_s']:8.1f}x")
    return medians


SECONDS = 10.0


def one_loader(name: str, directory: Path, rows: int) -> dict[str, float]:
    """The rate of one loader in this process, and the anonymous memory that it took."""
    import torch

    torch.set_num_threads(1)
    batches = LOADERS[name][0](directory)
    next(batches)
    count, started, end = 0, time.perf_counter(), time.perf_counter() + SECONDS
    for _ in itertools.islice(batches, rows // BATCH - 2):
        count += 1
        if time.perf_counter() > end:
            break
    seconds = time.perf_counter() - started
    status = Path("/proc/self/status").read_text().splitlines()
    anonymous = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    return {"rows_per_s": count * BATCH / seconds, "anonymous_bytes": anonymous}


def shuffle_part(directory: Path, rows: int, runs: int) -> dict[str, Any]:
    """The variance of the batches' means of the sorted quantity, over an epoch."""
    means = []
    for batch in itertools.islice(ours(directory), rows // BATCH):
        means.append(batch.inputs[0][:, 0].double().mean().item())
    ideal = (rows**2 - 1) / 12 / BATCH * (rows - BATCH) / (rows - 1)
    ratio = float(np.mean((np.array(means) - (rows - 1) / 2) ** 2)) / ideal
    noise = (2 / len(means)) ** 0.5
    click.echo(f"\nShuffle: variance of batch means over ideal {ratio:.3f} (chance alone: 1 ± {noise:.3f})")
    return {"variance_of_batch_means": ratio, "chance": noise}


PARTS = {"bound": bound_part, "peers": peers_part, "shuffle": shuffle_part}


@click.command()
@click.option("--quick", is_flag=True, help="A twentieth of the rows.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the figures here.")
@click.option("--part", "parts", type=click.Choice(list(PARTS)), multiple=True, help="Only this part.")
@click.option("--runs", default=3, show_default=True, help="Turns that count, among peers.")
@click.option("--loader", hidden=True)
@click.option("--maker", hidden=True)
@click.option("--data", type=click.Path(path_type=Path), hidden=True)
@click.option("--rows", type=int, default=0, hidden=True)
def main(
    quick: bool,
    json_file: Path | None,
    parts: tuple[str, ...],
    runs: int,
    loader: str | None,
    maker: str | None,
    data: Path,
    rows: int,
) -> None:
    """Measure, and print a table for each part."""
    if loader is not None:
        click.echo(json.dumps(one_loader(loader, data, rows)))
        return
    if maker is not None:
        write = LOADERS[maker][2]
        assert write is not None
        write(data)
        return
    rows = 100_000 if quick else 2_000_000
    directory = Path(tempfile.mkdtemp(prefix="loader-"))
    try:
        make(directory, rows)
        results = {part: PARTS[part](directory, rows, runs) for part in parts or tuple(PARTS)}
    finally:
        shutil.rmtree(directory)
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
