"""One worker of a sweep in a process of its own, as a pod is one:
``python -m tests.support.sweep_worker CONFIG PREPARED STORE EXECUTION SLOTS [KILL_AT]``.

With KILL_AT ("create 5 before", "put 3 after") it kills itself at that write to its store, before the file is moved to
its name or right after.
"""

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.sweep import worker as engine
from slipstream.pipeline.sweep.engine import run_trials
from slipstream.pipeline.sweep.worker import WorkerPod
from slipstream.shared.artifacts.workspaces import Holder
from slipstream.shared.storage.local import LocalStorage
from tests.support.noted_trial import noted


def kill_at(method: str, number: int, when: str) -> None:
    """Kill this process at the ``number``-th call of a method of its store."""
    original, calls = getattr(LocalStorage, method), iter(range(1, 1 << 30))

    def counted(self: LocalStorage, *arguments: Any, **more: Any) -> None:
        here = next(calls) == number
        if here and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, *arguments, **more)
        if here:
            os.kill(os.getpid(), signal.SIGKILL)

    setattr(LocalStorage, method, counted)


if __name__ == "__main__":
    config, prepared, store, execution, slots, *fault = sys.argv[1:]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if fault:
        name, at, moment = fault[0].split()
        kill_at(name, int(at), moment)
    engine.train_trial = noted
    engine.MODULES = (*engine.MODULES, "tests.support.noted_trial")
    with tempfile.TemporaryDirectory() as scratch:
        pod = WorkerPod(Path(prepared), Path(scratch), int(slots), Holder(execution), grace_s=20.0)
        run_trials(read_settings(RunConfig, [config]), store, pod)
