"""Contenders of ``prepare.py``: functions that read the table ``data`` and write to the directory ``out``.

Every contender imports its own modules, and the import time counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path


def ours(data: Path, out: Path, shuffle: bool = True) -> None:
    from slipstream.pipeline.prepare.engine import prepare
    from slipstream.shared.machine.limits import usable_cores
    from slipstream.shared.source.config import DataConfig

    # In the main job another task computes the fingerprint.
    made_by = {"source": "benchmarks/prepare.py"}
    prepare(out / "prepared", str(data), "y", DataConfig(id="id", shuffle=shuffle), made_by, usable_cores())


def ours_in_order(data: Path, out: Path) -> None:
    ours(data, out, shuffle=False)


def ours_ingest(data: Path, out: Path) -> None:
    from slipstream.pipeline.prepare.resolve import resolve_source
    from slipstream.pipeline.prepare.table import OPENERS
    from slipstream.shared.artifacts.resume import resumable_scratch
    from slipstream.shared.distributed.pool import WorkerPool
    from slipstream.shared.machine.limits import usable_cores
    from slipstream.shared.source.config import DataConfig
    from slipstream.shared.source.files import list_source

    # Other tasks compute the fingerprint.
    source = resolve_source(list_source(str(data)), "y", DataConfig(id="id"), "benchmarks/prepare.py")
    with closing(WorkerPool(usable_cores())) as workers, resumable_scratch(out, workers) as scratch:
        table = OPENERS[source.kind](source, scratch)
    assert table.read == table.rows + len(table.bad)


def polars(data: Path, out: Path, the_same_work: bool = False) -> None:
    """Run two streaming passes: statistics of the training rows, then one uncompressed file per split.

    ``the_same_work`` also puts rows in random order and takes the SHA-256 of the output, as ours does.
    """
    import polars as pl

    lazy = pl.scan_parquet(data) if data.suffix == ".parquet" else pl.scan_csv(data, ignore_errors=True)
    share = (pl.col("id").hash(seed=0) % 10_000) / 10_000
    split = pl.when(share < 0.15).then(2).when(share < 0.3).then(1).otherwise(0)
    schema = lazy.collect_schema()
    numbers = [n for n, kind in schema.items() if kind.is_numeric() and n != "id"]
    texts = [n for n, kind in schema.items() if kind == pl.String]
    figures = [getattr(pl.col(numbers), figure)().name.suffix(f" {figure}") for figure in POLARS_FIGURES]
    counted = [pl.col(n).value_counts(sort=True).implode().alias(n) for n in texts]
    found = lazy.filter(split == 0).select(*figures, *counted).collect(engine="streaming").row(0, named=True)
    encoded = [((pl.col(n) - found[f"{n} mean"]) / found[f"{n} std"]).fill_null(0).cast(pl.Float32) for n in numbers]
    for n in texts:
        words = [entry[n] for entry in found[n] if entry[n] is not None]
        codes = pl.col(n).replace_strict(words, range(2, len(words) + 2), default=1, return_dtype=pl.Int32)
        encoded.append(codes.fill_null(0))
    order = pl.col("id").hash(seed=1).alias("order")
    files = [out / f"{part}.arrow" for part in range(3)]
    sinks = []
    for part, file in enumerate(files):
        rows = lazy.filter(split == part)
        rows = rows.select(order, *encoded).sort("order").drop("order") if the_same_work else rows.select(encoded)
        sinks.append(rows.sink_ipc(file, compression="uncompressed", lazy=True))
    pl.collect_all(sinks, engine="streaming")
    if the_same_work:
        with ThreadPoolExecutor() as threads:
            (out / "SHA256SUMS").write_text("".join(threads.map(sum_line, files)))


POLARS_FIGURES = ("mean", "std", "min", "max", "null_count")


def sum_line(path: Path) -> str:
    with path.open("rb") as file:
        return f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n"


def polars_the_same_work(data: Path, out: Path) -> None:
    polars(data, out, the_same_work=True)


def polars_sink(data: Path, out: Path) -> None:
    import polars as pl

    pl.scan_csv(data, ignore_errors=True).sink_parquet(out / "typed.parquet")


SAME_WORK, BARE, SINK = "Polars, the same work", "Polars, bare", "Polars, bare sink"
CONTENDERS: dict[str, Callable[[Path, Path], None]] = {
    "ours": ours,
    "ours, in order": ours_in_order,
    "ours, ingest": ours_ingest,
    SAME_WORK: polars_the_same_work,
    BARE: polars,
    SINK: polars_sink,
}
