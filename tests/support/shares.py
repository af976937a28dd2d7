"""A table prepared by the steps of several machines, one after the other in this process."""

import shutil
from pathlib import Path

from slipstream.pipeline.prepare.resolve import resolve_source
from slipstream.pipeline.prepare.sharded import merge_partitions, shares
from slipstream.shared.artifacts.exchange import SUMMARY
from slipstream.shared.artifacts.format import Artifact
from slipstream.shared.source.config import DataConfig
from slipstream.shared.source.files import Listing, list_source

CONFIG = DataConfig(id="id", quarantine_limit=0.05)
MADE_BY = {"code": "this"}


def on_several(
    root: Path, data: str | Listing, number: int, config: DataConfig = CONFIG, target: str = "y"
) -> Artifact:
    """As the pods do it: each step in directories of its own, and the places that it read moved before the next."""

    def moved(path: Path) -> Path:
        return Path(shutil.move(path, path.with_name(f"{path.name}-downloaded")))

    root.mkdir()
    source = resolve_source(list_source(data) if isinstance(data, str) else data, target, config)
    assert source.division != "none"
    by_files = source.division == "files"
    texts = [moved(share) for share in shares.open_texts(source, number, root / "texts")] if by_files else []
    for index, share in enumerate(texts):
        shares.parse_share(share, root / f"parsed-{index}")
    parsed = [moved(root / f"parsed-{index}") for index in range(len(texts))]
    opened = shares.open_shares(source, number, [directory / SUMMARY for directory in parsed], root / "opened")
    table, made = moved(opened.table), [moved(share) for share in opened.shares]
    spools = [moved(spool) for spool in opened.spools] or parsed
    for index, (share, spool) in enumerate(zip(made, spools, strict=True)):
        shares.scan_share(share, spool, root / f"scanned-{index}")
    scanned = [moved(root / f"scanned-{index}") for index in range(len(made))]
    count = shares.fit_shares(table, scanned, number, root / "fitted", root / "plan")
    plan = moved(root / "plan")
    for index, (share, spool) in enumerate(zip(made, spools, strict=True)):
        shares.encode_share(share, spool, scanned[index], plan, root / f"encoded-{index}")
    encoded = [moved(root / f"encoded-{index}") for index in range(len(made))]
    for partition in range(count):
        runs = [share / merge_partitions.partition_directory(partition) for share in encoded]
        merge_partitions.merge_partition(partition, plan, runs, root / f"merged-{partition}")
    merged = [part for index in range(count) for part in merge_partitions.local_parts(moved(root / f"merged-{index}"))]
    merge_partitions.assemble_artifact(root / "prepared", MADE_BY, moved(root / "fitted"), merged)
    assert not [path for path in root.rglob("*") if path.name.endswith((".work", ".scratch"))]
    return Artifact.open(root / "prepared", "prepare")
