"""Sweep worker with one slot whose trials write notes: ``python -m harness.sweeps.one_worker PLACE``.

The directory ``PLACE`` has the configuration ``run.json`` and the data ``prepared``.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.sweeps.noted_trial import noted_trial
from slipstream.config import RunConfig
from slipstream.config_values import read_settings
from slipstream.pipeline.sweep import worker
from slipstream.pipeline.sweep.engine import run_trials
from slipstream.pipeline.sweep.worker import WorkerPod
from slipstream.shared.artifacts.workspaces import Holder

if __name__ == "__main__":
    place = Path(sys.argv[1])
    worker.train_trial = noted_trial
    worker.MODULES = (*worker.MODULES, "harness.sweeps.noted_trial")
    pod = WorkerPod(place / "prepared", place / "scratch", 1, Holder("benchmark"))
    run_trials(read_settings(RunConfig, [str(place / "run.json")]), str(place / "store"), pod)
