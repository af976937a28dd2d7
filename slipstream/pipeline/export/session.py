"""ONNX Runtime sessions with quiet logs and fixed threads, and a profile by operator."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from slipstream.pipeline.export.config import ExportConfig
from slipstream.shared.artifacts.prepared.data import Signature
from slipstream.shared.artifacts.results.export import ProfileFigures
from slipstream.shared.artifacts.versions import installed_version
from slipstream.shared.errors import UserError
from slipstream.shared.models.predict import ModelFunction, record_inputs

if TYPE_CHECKING:
    import onnxruntime

ERRORS_ONLY = 3
#: Names of ONNX Runtime's execution providers by ``export.provider``.
PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
#: With TF32, CUDA's default of 10 mantissa bits, FP32 outputs would differ from torch's by more than is allowed.
OPTIONS: dict[str, dict[str, str]] = {"cpu": {}, "cuda": {"use_tf32": "0"}}
#: Distributions of the same module; the last installed overwrites files of the other.
ONNX_RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


@contextmanager
def default_threads(count: int) -> Iterator[None]:
    """Limit sessions created in the block to ``count`` threads, unless they set a number.

    ONNX Runtime's quantisation tool accepts no session options; it would use one thread per core.
    """
    import onnxruntime

    before = onnxruntime.SessionOptions

    def limited() -> onnxruntime.SessionOptions:
        options = before()
        options.intra_op_num_threads = count
        return options

    onnxruntime.SessionOptions = limited
    try:
        yield
    finally:
        onnxruntime.SessionOptions = before


def session_options(threads: int) -> onnxruntime.SessionOptions:
    """Return session options for ``threads`` threads per call that log errors only."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(ERRORS_ONLY)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Spinning threads would take cores from the variants that are measured in between.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def check_provider(provider: str) -> None:
    """Raise ``UserError`` if ONNX Runtime lacks the provider, or, for "cuda", is installed twice."""
    import onnxruntime

    if provider == "cuda" and "absent" not in map(installed_version, ONNX_RUNTIMES):
        raise UserError(
            f'export.provider: "{provider}" expects one ONNX Runtime, and {" and ".join(ONNX_RUNTIMES)} are installed '
            f"over each other; keep only one: pip uninstall --yes {' '.join(ONNX_RUNTIMES)}, then pip install "
            "onnxruntime-gpu"
        )
    available = onnxruntime.get_available_providers()
    if PROVIDERS[provider] not in available:
        raise UserError(
            f'export.provider: "{provider}" is not available: this ONNX Runtime has {", ".join(available)}; install '
            "onnxruntime-gpu in place of onnxruntime, or set it to cpu"
        )


def session_on(path: Path, options: onnxruntime.SessionOptions, provider: str) -> onnxruntime.InferenceSession:
    """Return a session on the provider.

    Raises ``UserError`` if ONNX Runtime falls back to another one.
    """
    import onnxruntime

    session = onnxruntime.InferenceSession(path, options, providers=[(PROVIDERS[provider], OPTIONS[provider])])
    if (first := session.get_providers()[0]) != PROVIDERS[provider]:
        raise UserError(
            f'export.provider: "{provider}" cannot be used here, ONNX Runtime fell back to {first}; check that there '
            "is a GPU with its driver and the CUDA that onnxruntime-gpu was built for, or set it to cpu"
        )
    return session


def onnx_predictor(path: Path, threads: int, provider: str = "cpu") -> ModelFunction:
    """Return a function that runs the model at ``path`` with ``threads`` threads per call."""
    session = session_on(path, session_options(threads), provider)
    names = [value.name for value in session.get_inputs()]
    outputs = [session.get_outputs()[0].name]

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        return session.run(outputs, dict(zip(names, inputs, strict=True)))[0]

    return run


#: Profiled calls per batch size; the first is a warm-up.
CALLS = 22
#: Number of resampled sets of calls for an interval.
RESAMPLED = 500
#: Parts of the names of ONNX Runtime's kernels, fused or not, that INT8 speeds up.
PRODUCTS = ("Conv", "Gemm", "MatMul")


def operator_times(
    path: Path, signature: Signature, records: np.ndarray, config: ExportConfig, batches: Sequence[int]
) -> list[ProfileFigures]:
    """Return each operator's fraction of the time at every batch size, from ONNX Runtime's profiler.

    Empty on a GPU, where the profiler would time only kernel launches.
    """
    if config.provider == "cuda":
        return []
    return [at_batch(path, signature, records, config, rows) for rows in batches]


def at_batch(path: Path, signature: Signature, records: np.ndarray, config: ExportConfig, rows: int) -> ProfileFigures:
    with tempfile.TemporaryDirectory() as directory:
        options = session_options(config.threads)
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(directory) / "profile")
        session = session_on(path, options, config.provider)
        names = [value.name for value in session.get_inputs()]
        feed = dict(zip(names, record_inputs(signature, np.resize(records, rows)), strict=True))
        for _ in range(CALLS):
            session.run(None, feed)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    kernels = [event for event in events if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    return figures_by_operator(rows, [(each["name"], each["args"]["op_name"], each["dur"]) for each in kernels])


def figures_by_operator(rows: int, kernels: Sequence[tuple[str, str, int]]) -> ProfileFigures:
    """Return the shares of operators from all executions: node, operator and whole microseconds, call by call."""
    # A node counts with the median of its calls, so that other work on the machine, which delays some, moves no share.
    calls: dict[tuple[str, str], list[int]] = {}
    for name, operator, duration in kernels:
        calls.setdefault((name, operator), []).append(duration)
    of_nodes = [np.array(each[len(each) // CALLS :]) for each in calls.values()]
    draw = np.random.default_rng(0)
    # Fractions of a microsecond are unknown, and small models have nodes of one or two.
    each_call = [durations + draw.random(len(durations)) for durations in of_nodes]
    medians = np.array([np.median(durations) for durations in each_call])
    took: Counter[str] = Counter()
    for (_, operator), median in zip(calls, medians.tolist(), strict=True):
        took[operator] += median
    total = sum(took.values())
    operators = {name: duration / total for name, duration in took.most_common()}
    are_products = np.array([any(part in operator for part in PRODUCTS) for _, operator in calls])
    resampled = np.stack([resampled_medians(durations, draw) for durations in each_call], axis=1)
    shares = resampled[:, are_products].sum(axis=1) / resampled.sum(axis=1)
    low, high = np.quantile(shares, (0.025, 0.975)).tolist()
    return ProfileFigures(rows, operators, float(medians[are_products].sum() / total), (low, high))


def resampled_medians(durations: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    return np.median(draw.choice(durations, (RESAMPLED, len(durations))), axis=1)
