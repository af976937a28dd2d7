"""Preempted trainings of two ranks of ``slipstream.pipeline.train.run`` with a minimum step time.

The model counts executed steps, and the parent process measures times. Ranks are forked from a server that has imported
torch, which otherwise takes seconds.
"""

from __future__ import annotations

import io
import math
import os
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.processes import FRESH
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.probe import ROWS
from slipstream.shared import logs
from slipstream.shared.artifacts.format import MANIFEST
from slipstream.shared.artifacts.prepared.data import PreparedData, Signature
from slipstream.shared.artifacts.results.ledger import AttemptRecord, read_attempts
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.settings import to_dict
from slipstream.shared.storage import storage_for

WORLD = 2
STEPS_PER_EPOCH = 20


@dataclass(frozen=True)
class Job:
    """Training of ``steps`` steps of at least ``step_s`` seconds, on the data ``prepared`` in ``place``.

    Names of files that it writes there start with ``name``; ``saving`` are its checkpoint settings.
    """

    place: Path
    name: str
    steps: int
    step_s: float
    saving: Mapping[str, Any]

    @property
    def counter(self) -> Path:
        return self.place / f"{self.name}.executed"

    @property
    def model(self) -> Path:
        return self.place / f"{self.name}.model"

    @property
    def executed(self) -> int:
        """Number of steps started in all attempts."""
        return self.counter.stat().st_size if self.counter.exists() else 0

    def pages(self) -> list[AttemptRecord]:
        """Return the attempts' records; a killed attempt's record is some seconds old, but consistent."""
        return read_attempts(storage_for(f"{self.place}/{self.name}.home"))


class Fault(NamedTuple):
    """End of an attempt, by SIGTERM if ``warned``, else by SIGKILL.

    ``at_s`` is in seconds from the attempt's first step if ``from_first_step``, else from its start.
    """

    at_s: float
    warned: bool
    from_first_step: bool = False


class Ended(NamedTuple):
    """Result of an attempt: seconds until its first step started, until the fault, and until its processes ended.

    Without a first step, ``start_s`` is the time until the fault.
    """

    finished: bool
    start_s: float
    fault_s: float
    wall_s: float


class Steady(nn.Module):
    """Network whose training steps take at least ``step_s``; rank 0 adds a byte to ``counter`` per step."""

    def __init__(self, pixels: int, outputs: int, counter: str, step_s: float) -> None:
        super().__init__()
        self.counter, self.step_s = Path(counter), step_s
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        # The trainer's passes before the first step, which probe the model and settle the buckets, have fewer rows.
        if self.training and len(inputs) > ROWS:
            if dist.get_rank() == 0:
                with self.counter.open("ab", buffering=0) as executed:
                    executed.write(b".")
            time.sleep(self.step_s)
        return self.layers(inputs.float())


def build(signature: Signature, counter: str, step_s: float) -> nn.Module:
    return Steady(math.prod(signature.inputs[0].shape), signature.outputs, counter, step_s)


def rank_main(rank: int, port: int, job: Job) -> None:
    from slipstream.pipeline.train.fault_tolerance.guard import Preempted
    from slipstream.pipeline.train.request import TrainingRequest
    from slipstream.pipeline.train.run import run_attempt

    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    # As in torch elastic, whose agent hosts the store.
    where["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    rows = sum(PreparedData.open(job.place / "prepared").segment_rows("train"))
    logs.configure_logging("error")
    with redirect_stdout(io.StringIO()):
        try:
            training = TrainingConfig(
                batch_size=math.ceil(rows / STEPS_PER_EPOCH),
                epochs=job.steps // STEPS_PER_EPOCH,
                patience=0,
                **job.saving,
            )
            request = TrainingRequest(
                prepared=job.place / "prepared",
                model=ModelConfig("harness.preempted:build", {"counter": str(job.counter), "step_s": job.step_s}),
                training=training,
                directory=job.model,
                home=f"{job.place}/{job.name}.home",
                made_by={"training": to_dict(training)},
            )
            run_attempt(request)
        except Preempted:
            os._exit(1)


def attempt(job: Job, fault: Fault | None) -> Ended:
    """Run the ranks until training ends or ``fault`` stops them, and return the result."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [FRESH.Process(target=rank_main, args=(rank, store.port, job), daemon=True) for rank in range(WORLD)]
    before, started = job.executed, time.perf_counter()

    def passed() -> float:
        return time.perf_counter() - started

    for process in ranks:
        process.start()
    early = math.inf if fault is None or fault.from_first_step else fault.at_s
    while job.executed == before and passed() < early:
        assert all(process.is_alive() for process in ranks), "a rank ended before its first step"
        time.sleep(0.01)
    start_s = fault_s = passed()
    if fault is not None:
        ranks[0].join(fault.at_s if fault.from_first_step else max(0.0, fault.at_s - passed()))
        fault_s, victim = passed(), ranks[-1]
        if victim.is_alive():
            victim.terminate() if fault.warned else victim.kill()
            if not fault.warned:
                ranks[0].kill()
    for process in ranks:
        process.join()
    # A rank that was killed after it had written its model is finished.
    finished = all(process.exitcode == 0 for process in ranks) or (job.model / MANIFEST).exists()
    return Ended(finished, start_s, fault_s, passed())
