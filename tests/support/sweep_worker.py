"""One worker of a sweep in a process of its own, as a pod is one:
``python -m tests.support.sweep_worker CONFIG PREPARED STORE EXECUTION SLOTS``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from slipstream.artifacts.homes import Holder
from slipstream.config import RunConfig
from slipstream.sweep.engine import work
from slipstream.sweep.worker import Pod

if __name__ == "__main__":
    config, prepared, store, execution, slots = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as scratch:
        pod = Pod(Path(prepared), Path(scratch), int(slots), Holder(execution), grace_s=20.0)
        work(RunConfig.from_file(Path(config)), store, pod)
