"""The training loader, compared with other loaders and with the memory bandwidth.

    python benchmarks/loader.py [OPTIONS]

One process reads 2 M rows of 200 float32 in shuffled segments from a warm page cache, in batches of 1024, with one
thread per library. ``bound``: our loader, with and without verification, alternates in one process with contiguous
copies of 1024 rows from the memory map into a reused buffer; medians of 7 epochs. ``peers``: libraries and loops of a
few lines run in turns, each in a fresh process; the first turn is discarded. Figures are medians; ours is compared with
the fastest peer. Loaders that are not installed are skipped (litdata is not in ``[bench]``, as it needs torchvision;
mosaicml-streaming needs older libraries than ours). ``shuffle``: for a column that was sorted in the source, the
ratio of the variance of our batch means to the variance when drawing without replacement (1 is ideal). ``augment``:
RGB images of 32 x 32 in batches of 256, without augmentation and with several, which alternate in one process;
``per image``: seconds of the loader's thread for the augmentation.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import numpy as np

from harness.command import benchmark, part_option
from harness.processes import alone
from harness.table import Column, Table
from slipstream.operations.proofs.turns import Figures, in_turns, settled
from slipstream.pipeline.prepare.shuffle import block_rows
from slipstream.shared.artifacts.format import Artifact, ArtifactWriter
from slipstream.shared.artifacts.prepared.data import KIND, TARGET, PreparedData, Signature, TensorSpec
from slipstream.shared.artifacts.records import write_record

COLUMNS, BATCH = 200, 1024
IMAGES, IMAGE_BATCH = (3, 32, 32), 256
PAIRS = 7
#: Time limit for measuring a rate, in seconds; slow loaders do not finish an epoch.
SECONDS = 10.0
SIGNATURE = Signature((TensorSpec("numeric", "float32", (COLUMNS,)),), "classification", "y", ("a", "b"))
OF_IMAGES = Signature((TensorSpec("image", "uint8", IMAGES),), "classification", "y", ("a", "b"))
AUGMENTED: dict[str, list[dict[str, Any]]] = {
    "stored images": [],
    "flips, padded crops": [{"transform": "horizontal_flip"}, {"transform": "crop", "padding": 4}],
    "flips, crops by area": [{"transform": "horizontal_flip"}, {"transform": "crop", "area": [0.3, 1]}],
    "colours": [{"transform": "colour", "brightness": [0.8, 1.2], "contrast": [0.8, 1.2], "saturation": [0.8, 1.2]}],
}


# The data: the first column is the row's position in a sorted source


def make(directory: Path, rows: int) -> None:
    """Write prepared data, and the same table as ``x.npy`` and ``y.npy`` for the peers."""
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
    write_record(writer, "signature.json", SIGNATURE)
    writer.finish(KIND, {})
    x.flush()
    y.flush()


# The loaders: each yields batches of tensors or arrays, endlessly or for one epoch


def ours(directory: Path) -> Iterator[Any]:
    import torch

    from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
    from slipstream.pipeline.train.data_order import GlobalOrder
    from slipstream.shared.distributed.process_group import RankContext

    data = PreparedData.open(directory / "prepared")
    order, alone = (
        GlobalOrder(stored_blocks(data, "train"), BATCH, seed=0),
        RankContext(0, 1, torch.device("cpu"), "gloo"),
    )
    return training_batches(data, order, alone)


def tensors(directory: Path) -> Any:
    import torch

    return tuple(torch.from_numpy(np.load(directory / f"{name}.npy")) for name in "xy")


def indexed_tensor(directory: Path) -> Iterator[Any]:
    """Yield random batches from tensors in memory by ``x[rows]``."""
    import torch

    x, y = tensors(directory)
    for chosen in torch.randperm(len(x)).split(BATCH):
        yield x[chosen], y[chosen]


def index_select(directory: Path) -> Iterator[Any]:
    """Yield random batches by ``index_select``, which copies whole rows; ``x[rows]`` copies single elements."""
    import torch

    x, y = tensors(directory)
    for chosen in torch.randperm(len(x)).split(BATCH):
        yield x.index_select(0, chosen), y.index_select(0, chosen)


def sorted_memory_map(directory: Path) -> Iterator[Any]:
    """Yield random batches from a memory map, with the rows of a batch in file order."""
    import torch

    x, y = (np.load(directory / f"{name}.npy", mmap_mode="r") for name in "xy")
    order = np.random.default_rng(0).permutation(len(x))
    for begin in range(0, len(order), BATCH):
        chosen = np.sort(order[begin : begin + BATCH])
        yield torch.from_numpy(x[chosen]), torch.from_numpy(y[chosen])


def batch_sampler(directory: Path) -> Iterator[Any]:
    """Return a DataLoader that requests a whole batch from its dataset at once."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

    rows = TensorDataset(*tensors(directory))
    batches = BatchSampler(RandomSampler(rows), BATCH, drop_last=False)
    return iter(DataLoader(rows, batch_size=None, sampler=batches))


def data_loader(directory: Path, workers: int = 0) -> Iterator[Any]:
    from torch.utils.data import DataLoader, TensorDataset

    return iter(DataLoader(TensorDataset(*tensors(directory)), BATCH, shuffle=True, num_workers=workers))


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
    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
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


def plain_copies(directory: Path) -> Iterator[None]:
    """Copy the stored rows contiguously into one reused buffer, endlessly: the upper bound of a loader."""
    raw = PreparedData.open(directory / "prepared").mapped("train-00000.rows")
    buffer = np.empty((BATCH, raw.shape[1]), np.uint8)
    for begin in itertools.cycle(range(0, len(raw) - BATCH + 1, BATCH)):
        np.copyto(buffer, raw[begin : begin + BATCH])
        yield


class Loader(NamedTuple):
    """Contender: function that returns its batches, required module, and writer of its file format (if any)."""

    batches: Callable[[Path], Iterator[Any]]
    module: str = "torch"
    make: Callable[[Path], None] | None = None


OURS, COPIES = "ours", "plain copies"
LOADERS = {
    COPIES: Loader(plain_copies),
    OURS: Loader(ours),
    "tensor, brackets": Loader(indexed_tensor),
    "tensor, index_select": Loader(index_select),
    "memory map, sorted": Loader(sorted_memory_map),
    "BatchSampler": Loader(batch_sampler),
    "DataLoader": Loader(data_loader),
    "DataLoader, 2 workers": Loader(data_loader_with_workers),
    "grain": Loader(grain, "grain"),
    "HF datasets": Loader(hf_datasets, "datasets", make_hf_datasets),
    "litdata": Loader(litdata, "litdata", make_litdata),
}


# Measuring


def rate(batches: Iterator[Any], most: int, seconds: float = float("inf")) -> float:
    """Return rows per second over ``most`` batches or ``seconds``, whichever ends first, after a warm-up batch."""
    next(batches)
    count, started = 0, time.perf_counter()
    for _ in itertools.islice(batches, most):
        count += 1
        if time.perf_counter() - started > seconds:
            break
    return count * BATCH / (time.perf_counter() - started)


def bound_part(directory: Path, rows: int, runs: int) -> Table:
    import torch

    torch.set_num_threads(1)
    plain, verified, unverified = plain_copies(directory), ours(directory), ours(directory)

    def epoch(batches: Iterator[Any]) -> Figures:
        return {"rows_per_s": rate(batches, rows // BATCH - 1)}

    def without_verification() -> Figures:
        with mock.patch.object(Artifact, "check_block"):
            return epoch(unverified)

    found = in_turns(
        {
            COPIES: functools.partial(epoch, plain),
            OURS: functools.partial(epoch, verified),
            "ours, unverified": without_verification,
        },
        runs,
    )
    for figures in found.values():
        for mine, bound in zip(figures, found[COPIES], strict=True):
            mine["of_copies"] = mine["rows_per_s"] / bound["rows_per_s"]
    ratios = [mine["of_copies"] for mine in found[OURS][1:]]
    remark = f"ours: {min(ratios):.2f} to {max(ratios):.2f} of copies; bar: at least 0.40"
    columns = (KROWS, Column("of copies", "of_copies", "{:.2f}"))
    return Table(
        f"The speed of memory, {rows:,} x {COLUMNS}, medians of {len(ratios)}",
        columns,
        {name: settled(figures) for name, figures in found.items()},
        (remark,),
    )


KROWS = Column("krows/s", "rows_per_s", "{:.1f}", 1e3)


def one_loader(name: str, directory: Path, rows: int, seconds: float) -> Figures:
    """Return the rows per second of a loader in this process, and the process's anonymous memory in bytes."""
    import torch

    torch.set_num_threads(1)
    batches = LOADERS[name].batches(directory)
    taken = rate(batches, rows // BATCH - 2, seconds)
    status = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    anonymous = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon:"))
    click.echo(f"  {name:<24}{taken / 1e3:9.1f} krows/s", err=True)
    return {"rows_per_s": taken, "anonymous_bytes": anonymous}


def peers_part(directory: Path, rows: int, runs: int) -> Table:
    contenders = {}
    for name, loader in LOADERS.items():
        if importlib.util.find_spec(loader.module) is None:
            click.echo(f"  {name} is skipped: {loader.module} is not installed", err=True)
            continue
        if loader.make is not None:
            alone(loader.make, directory)
        contenders[name] = functools.partial(alone, one_loader, name, directory, rows, SECONDS if runs > 1 else 0.2)
    table = {name: settled(figures) for name, figures in in_turns(contenders, runs).items()}
    for figures in table.values():
        figures["of_copies"] = figures["rows_per_s"] / table[COPIES]["rows_per_s"]
        figures["ours_over_it"] = table[OURS]["rows_per_s"] / figures["rows_per_s"]
    strongest = max(table.keys() - {OURS, COPIES}, key=lambda name: table[name]["rows_per_s"])
    times = table[strongest]["ours_over_it"]
    columns = (
        KROWS,
        Column("of copies", "of_copies", "{:.3f}"),
        Column("anon GiB", "anonymous_bytes", "{:.2f}", 1 << 30),
        Column("ours over it", "ours_over_it", "{:.2f}x"),
    )
    remark = f"ours is {times:.2f} x the strongest peer, {strongest}"
    return Table(f"Loaders, {rows:,} x {COLUMNS}, batches of {BATCH}", columns, table, (remark,))


def shuffle_part(directory: Path, rows: int, runs: int) -> Table:
    """Compare the variance of our batch means over an epoch with an ideal shuffle's."""
    means = []
    for batch in itertools.islice(ours(directory), rows // BATCH):
        means.append(batch.inputs[0][:, 0].double().mean().item())
    ideal = (rows**2 - 1) / 12 / BATCH * (rows - BATCH) / (rows - 1)
    ratio = float(np.mean((np.array(means) - (rows - 1) / 2) ** 2)) / ideal
    columns = (Column("over ideal", "over_ideal", "{:.3f}"), Column("chance alone: 1 ±", "chance", "{:.3f}"))
    return Table(
        "Shuffle", columns, {"variance of batch means": {"over_ideal": ratio, "chance": (2 / len(means)) ** 0.5}}
    )


def augment_part(directory: Path, rows: int, runs: int) -> Table:
    """Compare the loader of images with and without augmentation."""
    import torch

    from slipstream.operations.proofs.gpu.trainings import write_prepared
    from slipstream.pipeline.train.config import TrainingConfig
    from slipstream.pipeline.train.data_loader import stored_blocks, training_batches
    from slipstream.pipeline.train.data_order import GlobalOrder
    from slipstream.pipeline.train.telemetry.step_times import LoaderTimes
    from slipstream.shared.distributed.process_group import RankContext

    torch.set_num_threads(1)
    images = rows // 40
    records = np.zeros(images, OF_IMAGES.record)
    records["image"] = np.random.default_rng(0).integers(0, 256, (images, *IMAGES))
    write_prepared(directory / "images", OF_IMAGES, {"train": records})
    data = PreparedData.open(directory / "images")
    order = GlobalOrder(stored_blocks(data, "train"), IMAGE_BATCH, seed=0)

    def epoch(transforms: list[dict[str, Any]]) -> Figures:
        times, augment = LoaderTimes(), TrainingConfig.from_dict({"augment": transforms}).augment
        group = RankContext(0, 1, torch.device("cpu"), "gloo")
        started = time.perf_counter()
        for _ in training_batches(data, order, group, 0, images, times=times, augment=augment):
            pass
        seconds = time.perf_counter() - started
        return {"rows_per_s": images / seconds, "augmentation_s": times.augmentation / images}

    found = in_turns({name: functools.partial(epoch, each) for name, each in AUGMENTED.items()}, runs)
    columns = (KROWS, Column("per image", "augmentation_s", "{:.1f} µs", 1e-6))
    table = {name: settled(figures) for name, figures in found.items()}
    return Table(f"Augmentation, {images:,} images, medians of {runs - 1}", columns, table)


PARTS = {"bound": bound_part, "peers": peers_part, "shuffle": shuffle_part, "augment": augment_part}


@benchmark
@part_option(PARTS)
@click.option("--runs", default=3, show_default=True, help="Measured turns of every peer.")
def main(quick: bool, parts: tuple[str, ...], runs: int) -> Iterator[Table]:
    """Measure the speed of loaders, and the quality of our shuffle."""
    rows = 20_000 if quick else 2_000_000
    turns = dict.fromkeys(("bound", "augment"), 2 if quick else PAIRS + 1) | {"peers": 1 if quick else runs + 1}
    with tempfile.TemporaryDirectory(prefix="loader-") as directory:
        make(Path(directory), rows)
        for part in parts:
            yield PARTS[part](Path(directory), rows, turns.get(part, 1))


if __name__ == "__main__":
    main()
