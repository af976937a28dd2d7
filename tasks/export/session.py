"""ONNX Runtime sessions without log output and with a given number of threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.models.predict import Predictor

if TYPE_CHECKING:
    import onnxruntime

ERRORS_ONLY = 3


@contextmanager
def default_threads(count: int) -> Iterator[None]:
    """Sessions whose options name no number of threads get ``count`` within the block.

    Otherwise they start one per core of the node, and the quantisation tool takes no options for its sessions.
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
    """Options of a session with ``threads`` threads per call that logs errors only."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(ERRORS_ONLY)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Threads that spin between calls would take the cores from the variants that are measured in between.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def onnx_predictor(path: Path, threads: int) -> Predictor:
    """The model at ``path`` on the CPU with ``threads`` threads per call."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path, session_options(threads), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    outputs = [session.get_outputs()[0].name]

    def run(inputs: Sequence[np.ndarray]) -> np.ndarray:
        return session.run(outputs, dict(zip(names, inputs, strict=True)))[0]

    return run
