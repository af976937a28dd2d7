"""Contenders that score a table in a fresh process: our engine, its parts timed separately, and pandas."""

from __future__ import annotations

import json
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from slipstream.operations.proofs.turns import Figures

OURS, APART, PANDAS, QUARTER = "ours", "apart", "pandas", "ours, a quarter"
PARTS = ("read", "convert", "run", "write")


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def largest_memory() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) * 1024


def ours(package: Path, data: Path) -> Figures:
    import slipstream.pipeline.score.part
    from slipstream.pipeline.score.config import ScoringConfig
    from slipstream.pipeline.score.publish import score_data
    from slipstream.shared.source.config import DataConfig

    assert slipstream.pipeline.score.part
    with tempfile.TemporaryDirectory(dir=package.parent) as out:
        began = processor_seconds()
        score_data("", str(data), out, DataConfig(), ScoringConfig(keep=["id"]), package=str(package), workers=1)
        return {"cpu_seconds": processor_seconds() - began, "bytes": largest_memory()}


def apart(package: Path, data: Path) -> Figures:
    """Time reading, converting, running and writing separately, one file at a time to bound memory."""
    from slipstream.pipeline.export.package.raw_columns import RawColumns, read_columns
    from slipstream.pipeline.score.model import ServedModel
    from slipstream.pipeline.score.part import PartFile
    from slipstream.pipeline.score.predict import BATCH_ROWS, RawPredictor, open_session
    from slipstream.shared.source.columnar import list_units, read_unit
    from slipstream.shared.source.files import list_source
    from slipstream.shared.source.memory import MemoryBudget

    model = ServedModel(package)
    known, raw = read_columns(model.statistics), model.signature.raw
    assert isinstance(known, RawColumns) and raw
    predictor = RawPredictor(open_session(package / raw.model), known, raw)
    names = [output.name for output in raw.outputs]
    took = dict.fromkeys(PARTS, 0.0)

    def timed(part: str, work: Callable[[], Any]) -> Any:
        began = processor_seconds()
        made = work()
        took[part] += processor_seconds() - began
        return made

    with tempfile.TemporaryDirectory(dir=package.parent) as out:
        for number, file in enumerate(list_source(str(data)).files):
            units = list_units(file, "parquet")[1]
            wanted, budget = [*known.types, "id"], MemoryBudget(0.25)
            batches = timed("read", lambda: [b for unit in units for b, _ in read_unit(unit, wanted, budget)])  # noqa: B023
            feeds = timed(
                "convert",
                lambda: [
                    {
                        given.name: predictor.column(batch.column(name), name, kind)[:, None]
                        for given, (name, kind) in zip(raw.inputs, known.types.items(), strict=True)
                    }
                    for batch in batches  # noqa: B023
                ],
            )

            def run() -> list[list[np.ndarray]]:
                return [
                    predictor.session.run(names, {name: v[start : start + BATCH_ROWS] for name, v in feed.items()})
                    for feed in feeds  # noqa: B023
                    for start in range(0, len(next(iter(feed.values()))), BATCH_ROWS)
                ]

            answers = timed("run", run)
            tables = [pa.table({"id": batch.column("id")}) for batch in batches]
            labels = np.concatenate([answer[0][:, 0] for answer in answers])
            probabilities = np.concatenate([answer[1] for answer in answers])

            def write() -> None:
                with PartFile(Path(out) / f"{number}.parquet") as part:  # noqa: B023
                    whole = pa.concat_tables(tables)  # noqa: B023
                    part.add(
                        whole.append_column("label", pa.array(labels, pa.string()))  # noqa: B023
                        .append_column("probability_no", pa.array(probabilities[:, 0]))  # noqa: B023
                        .append_column("probability_yes", pa.array(probabilities[:, 1]))  # noqa: B023
                        .append_column("model_version", pa.repeat(pa.scalar("0" * 16), whole.num_rows))
                    )

            timed("write", write)
    return {"cpu_seconds": sum(took.values()), **took}


def with_pandas(package: Path, data: Path) -> Figures:
    """Score as a notebook would: pandas, one call of the model, one thread."""
    import onnxruntime
    import pandas as pd

    signature = json.loads((package / "signature.json").read_text())["raw"]
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with tempfile.TemporaryDirectory(dir=package.parent) as out:
        began = processor_seconds()
        session = onnxruntime.InferenceSession(package / signature["model"], options, ["CPUExecutionProvider"])
        frame = pd.read_parquet(data)
        feed = {}
        for given in signature["inputs"]:
            column = frame[given["name"]]
            text = given["dtype"] == "string"
            values = column.fillna(signature["missing"]).str.strip().astype(object) if text else column.astype(float)
            feed[given["name"]] = values.to_numpy()[:, None]
        labels, probabilities = session.run(None, feed)
        scored = frame[["id"]].assign(label=labels[:, 0])
        scored["probability_no"], scored["probability_yes"] = probabilities[:, 0], probabilities[:, 1]
        scored.assign(model_version="0" * 16).to_parquet(Path(out) / "scored.parquet", index=False)
        return {"cpu_seconds": processor_seconds() - began, "bytes": largest_memory()}


CONTENDERS = {OURS: ours, QUARTER: ours, APART: apart, PANDAS: with_pandas}


def in_child(contender: str, package: Path, data: Path, target: Path) -> None:
    target.write_text(json.dumps(CONTENDERS[contender](package, data)), encoding="utf-8")
