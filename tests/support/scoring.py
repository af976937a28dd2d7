"""A model in service, rows to score, and their scores."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from slipstream.pipeline.promote.store import Registry
from slipstream.pipeline.score.config import ScoringConfig
from slipstream.pipeline.score.plan import plan_scoring
from slipstream.pipeline.score.publish import (
    fetch_table,
    fetched_model,
    publish_table,
    read_scored,
    score_data,
    score_portions,
)
from slipstream.shared.artifacts.prepared.data import PreparedData
from slipstream.shared.artifacts.results.scoring import Publication, ScoredTable
from slipstream.shared.source.config import DataConfig
from tests.support.packages import package
from tests.support.promotions import put
from tests.support.raw_tables import mixed_frame, mixed_table

KEEP = ScoringConfig(keep=["id"])


def registry_with_model(directory: Path, task: str = "classification", opset: int = 20, **settings: Any) -> Registry:
    """Make a registry with a promoted model of :func:`mixed_frame`, and its package in the same directory."""
    data = PreparedData.open(mixed_table(directory / "prepared", task, **settings))
    registry = Registry(str(directory / "registry"))
    put(package(directory / "package", data, opset=opset), registry, data)
    return registry


def rows(number: int, seed: int = 7) -> pd.DataFrame:
    """Rows of the same table, with an id and without the target."""
    frame = mixed_frame(number, "classification", seed).drop(columns="y")
    frame["id"] = [f"row {index}" for index in range(number)]
    return frame


def by_hand(registry: Registry, frame: pd.DataFrame) -> np.ndarray:
    """Probabilities, or values, of the package's raw model, with inputs made by pandas alone."""
    package = Path(registry.uri).parent / "package"
    session = onnxruntime.InferenceSession(package / "model.raw.onnx", providers=["CPUExecutionProvider"])
    types, feed = json.loads((package / "statistics.json").read_text())["types"], {}
    for given in session.get_inputs():
        values = frame[given.name]
        if types[given.name] == "text":
            inputs = values.astype(object).where(values.notna(), "").to_numpy()
        elif types[given.name] == "time":
            times = pd.to_datetime(values, utc=True)
            inputs = ((times - pd.Timestamp(0, tz="UTC")) / pd.Timedelta("1s")).to_numpy()
            if given.type == "tensor(string)":
                inputs = times.map(lambda time: time.isoformat()).astype(object).to_numpy()
        else:
            inputs = values.astype("float64").to_numpy()
        feed[given.name] = inputs[:, None]
    return session.run([session.get_outputs()[-1].name], feed)[0]


def write_files(directory: Path, files: int, of_each: int) -> Path:
    """Some CSV files of a table."""
    directory.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        rows(of_each, seed=100 + number).to_csv(directory / f"{number:02d}.csv", index=False)
    return directory


def scored(
    registry: Registry, data: Path | str, output: Path, config: ScoringConfig = KEEP, **reading: Any
) -> pa.Table:
    """All rows of the table that is published."""
    publication, _ = score_data(registry.uri, str(data), str(output), DataConfig(**reading), config, workers=1)
    return table_of(output, publication)


def in_shares(registry: Registry, data: Path, output: Path, number: int) -> Publication:
    """As ``number`` pods score: each a share of the files."""
    plan = plan_scoring(registry.uri, "", str(data), str(output), DataConfig(), KEEP)
    parts = [part for share in reversed(plan.shares(number)) for part in score_portions(share, workers=1)]
    with fetched_model(plan) as model:
        return publish_table(plan, parts, model)[0]


def table_of(output: Path, publication: Publication) -> pa.Table:
    fetched_table = output.parent / f"{output.name}-{publication.key}-fetched"
    artifact = fetch_table(str(output), publication, fetched_table)
    parts = [pq.read_table(artifact.path(name)) for name in sorted(artifact.files) if name.startswith("part-")]
    return pa.concat_tables(parts)


def manifest_of(output: Path, publication: Publication) -> ScoredTable:
    return read_scored(str(output), publication)


def bytes_below(output: Path) -> dict[str, bytes]:
    """Every file of the tables of an output, by its name."""
    return {
        path.relative_to(output).as_posix(): path.read_bytes()
        for path in sorted((output / "tables").rglob("*"))
        if path.is_file()
    }
