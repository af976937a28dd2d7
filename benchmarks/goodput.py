"""How much of a run on spot machines is useful: four preemptions in 1,600 steps, after Ray's nightly test.

    python benchmarks/goodput.py [--quick] [--json FILE]

Ray (release/train_tests, 8 workers, 4 preemptions, 1,600 steps) reports 75.6 % useful steps with a checkpoint every
400 steps and 94.6 % with a checkpoint on notice. Here two ranks of ``tasks.train.run`` train a model whose steps take
at least 50 ms; the faults come at times drawn from a seed, which the trainer cannot see. *periodic* saves every 400
steps and is killed without notice; *auto* chooses its interval, told a mean time between failures of 400 steps, and is
killed without notice; *notice* saves every 400 steps and gets SIGTERM first. Executed steps are counted by the model
and times from outside; start-up is what passes until an attempt's first step has begun.
"""

from __future__ import annotations

import io
import json
import math
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tasks import logs
from tasks.artifacts.prepared import PreparedData, Signature
from tasks.models.config import ModelConfig
from tasks.preprocess.config import DataConfig
from tasks.preprocess.engine import prepare
from tasks.storage import storage_for
from tasks.train.config import TrainingConfig
from tasks.train.survival.goodput import STALL, STEPS, read_attempts

WORLD = 2
STEP_S = 0.05
FAULTS = 4
STEPS_BETWEEN_FAILURES = 400
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch._dynamo", "benchmarks.goodput", "tasks.train.run"])
STEPS_PER_EPOCH = 20
MODES: dict[str, dict[str, Any]] = {
    "periodic": {"checkpoint_every": 400},
    "auto": {"mean_time_between_failures": STEPS_BETWEEN_FAILURES * STEP_S},
    "notice": {"checkpoint_every": 400},
}


class Steady(nn.Module):
    """A network whose training steps take :data:`STEP_S`, and which notes in ``counter`` each that rank 0 begins."""

    def __init__(self, pixels: int, outputs: int, counter: str) -> None:
        super().__init__()
        self.counter = Path(counter)
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(pixels, 512), *(nn.Linear(512, 512) for _ in range(6)), nn.Linear(512, outputs)
        )

    def forward(self, inputs: Tensor) -> Tensor:
        # The passes that settle the trainer's buckets are of one row.
        if self.training and len(inputs) > 1:
            if dist.get_rank() == 0:
                with self.counter.open("ab", buffering=0) as executed:
                    executed.write(b".")
            time.sleep(STEP_S)
        return self.layers(inputs.float())


def build(signature: Signature, counter: str) -> nn.Module:
    """The factory that the trainer is told of."""
    return Steady(math.prod(signature.inputs[0].shape), signature.outputs, counter)


def rank_main(rank: int, port: int, place: str, steps: int, mode: str) -> None:
    """One rank of one attempt."""
    from tasks.train.run import TrainingRequest, run
    from tasks.train.survival.guard import Preempted

    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in where.items()})
    torch.set_num_threads(1)
    rows = sum(PreparedData.open(Path(place) / "prepared").segment_rows("train"))
    request = TrainingRequest(
        prepared=Path(place) / "prepared",
        model=ModelConfig("benchmarks.goodput:build", {"counter": f"{place}/{mode}.executed"}),
        training=TrainingConfig(
            batch_size=math.ceil(rows / STEPS_PER_EPOCH),
            epochs=steps // STEPS_PER_EPOCH,
            patience=0,
            **MODES[mode],
        ),
        directory=Path(place) / f"{mode}.model",
        checkpoints_home=f"{place}/{mode}.home",
        made_by={},
    )
    logs.configure("error")
    with redirect_stdout(io.StringIO()):
        try:
            run(request)
        except Preempted:
            os._exit(1)


def attempt(place: str, steps: int, mode: str, fault_at: float | None) -> tuple[bool, float, float]:
    """Run the ranks to the end or, ``fault_at`` seconds after the first step, to the fault.

    Whether they finished, and the seconds until the first step had begun and until all processes had ended.
    """
    counter = Path(f"{place}/{mode}.executed")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = [(rank, port, place, steps, mode) for rank in range(WORLD)]
    ranks = [FORK.Process(target=rank_main, args=a, daemon=True) for a in arguments]
    before = counter.stat().st_size if counter.exists() else 0
    started = time.perf_counter()
    for process in ranks:
        process.start()
    while not counter.exists() or counter.stat().st_size == before:
        assert all(process.is_alive() for process in ranks), "a rank ended before its first step"
        time.sleep(0.01)
    start_s = time.perf_counter() - started
    if fault_at is not None:
        ranks[0].join(fault_at)
        victim = ranks[-1]
        if victim.is_alive():
            os.kill(victim.pid or 0, signal.SIGTERM if mode == "notice" else signal.SIGKILL)
            victim.join()
            if mode != "notice":
                ranks[0].kill()
    for process in ranks:
        process.join()
    return all(process.exitcode == 0 for process in ranks), start_s, time.perf_counter() - started


def measure(place: str, mode: str, steps: int, seed: int) -> dict[str, float]:
    """One run to its end: what of it was useful."""
    draw = random.Random(seed)
    # Exponential gaps; capped so that all faults fall into the run.
    mean = steps / (FAULTS + 1) * STEP_S
    gaps = [min(draw.expovariate(1 / mean), 1.2 * mean) for _ in range(FAULTS)]
    attempts = [attempt(place, steps, mode, gap) for gap in [*gaps, None]]
    assert [finished for finished, _, _ in attempts] == [False] * FAULTS + [True]
    pages = read_attempts(storage_for(f"{place}/{mode}.home"))
    # A killed attempt's page is some seconds old; what is on it belongs together.
    stepping = sum(page.seconds[STEPS] for page in pages)
    executed = Path(f"{place}/{mode}.executed").stat().st_size
    useful_s = steps * stepping / sum(page.executed for page in pages)
    wall, start = sum(wall for _, _, wall in attempts), sum(start for _, start, _ in attempts)
    return {
        "executed": executed,
        "useful_steps": steps / executed,
        "stall": sum(page.seconds[STALL] for page in pages) / stepping,
        "goodput": useful_s / wall,
        "apart": useful_s / (wall - start),
        "start_s": start / len(attempts),
    }


@click.command()
@click.option("--steps", default=1600, help=f"A multiple of {STEPS_PER_EPOCH}.")
@click.option("--seed", default=0)
@click.option("--quick", is_flag=True, help="Few steps: whether it runs, not what it yields.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(steps: int, seed: int, quick: bool, json_file: Path | None) -> None:
    """Print what of each run was useful."""
    steps = 240 if quick else steps
    print(f"{WORLD} ranks, {steps} steps of at least {STEP_S * 1e3:.0f} ms, {FAULTS} faults, seed {seed}")
    titles = ("executed", "useful steps", "stall/steps", "goodput", "start-up apart", "start-up s")
    print(f"{'':<10}" + "".join(f"{title:>15}" for title in titles))
    rows = {}
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place) / "prepared", "", "", DataConfig(), {})
        for mode in MODES:
            row = rows[mode] = measure(place, mode, steps, seed)
            print(
                f"{mode:<10}{row['executed']:>15}{row['useful_steps']:>15.1%}{row['stall']:>15.2%}"
                f"{row['goodput']:>15.1%}{row['apart']:>15.1%}{row['start_s']:>15.2f}",
                flush=True,
            )
    if json_file:
        json_file.write_text(json.dumps({"steps": steps, "seed": seed, "modes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
