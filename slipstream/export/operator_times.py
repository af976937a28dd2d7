"""Where the FP32 model spends its time, and so what quantisation could gain at most."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.artifacts.prepared.data import Signature
from slipstream.artifacts.results.export import ProfileFigures
from slipstream.export.config import ExportConfig
from slipstream.export.session import session_on, session_options
from slipstream.models.predict import inputs_of

#: Calls at each batch size; the first is not counted.
CALLS = 12
#: Parts of the names of ONNX Runtime's kernels, fused or not, that integers speed up.
PRODUCTS = ("Conv", "Gemm", "MatMul")


def operator_times(
    path: Path, signature: Signature, records: np.ndarray, config: ExportConfig, batches: Sequence[int]
) -> list[ProfileFigures]:
    """The shares of the time by operator at each batch size, from ONNX Runtime's own profiler."""
    return [at_batch(path, signature, records, config, rows) for rows in batches]


def at_batch(path: Path, signature: Signature, records: np.ndarray, config: ExportConfig, rows: int) -> ProfileFigures:
    with tempfile.TemporaryDirectory() as directory:
        options = session_options(config.threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(directory) / "profile")
        session = session_on(path, options, config.provider)
        names = [value.name for value in session.get_inputs()]
        feed = dict(zip(names, inputs_of(signature, np.resize(records, rows)), strict=True))
        for _ in range(CALLS):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    took: Counter[str] = Counter()
    for event in kernels[len(kernels) // CALLS :]:
        took[event["args"]["op_name"]] += event["dur"]
    total = max(sum(took.values()), 1)
    operators = {name: duration / total for name, duration in took.most_common()}
    products = sum(share for name, share in operators.items() if any(part in name for part in PRODUCTS))
    return ProfileFigures(rows, operators, products, at_most=1 / max(1 - products, 1e-3))
