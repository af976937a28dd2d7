"""How much of a run on spot machines is useful: four preemptions in 1,600 steps, after Ray's nightly test.

    python benchmarks/goodput.py [--json FILE]

Ray (release/train_tests, 8 workers, 4 preemptions, 1,600 steps) reports 75.6 % useful steps with a checkpoint every
400 steps and 94.6 % with a checkpoint on notice. Here two ranks take steps of at least 50 ms; the faults come at times
drawn from a seed, which the run cannot see. *periodic* saves every 400 steps and is killed without notice; *auto*
chooses its interval, told a mean time between failures of 400 steps, and is killed without notice; *notice* saves every
400 steps and gets SIGTERM first. All go through the same guard, checkpoints and ledger as training. Executed steps and
times are counted from outside; start-up is what passes until an attempt's first step is done.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import click

from tasks.storage import storage_for
from tasks.train.ledger import account, read_pages

WORLD = 2
STEP_S = 0.05
FAULTS = 4
STEPS_BETWEEN_FAILURES = 400
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["torch", "torch._dynamo", "benchmarks.goodput", "tasks.train.guard"])
MODES = {
    "periodic": {"steps": 400},
    "auto": {"mean_time_between_failures_s": STEPS_BETWEEN_FAILURES * STEP_S},
    "notice": {"steps": 400},
}


def rank_main(rank: int, port: int, home: str, steps: int, interval: dict[str, Any], counter: str) -> None:
    """One rank of one attempt. ``counter`` is a file to which rank 0 adds a byte for every step it executes."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from tasks.train.checkpoint import Checkpoints
    from tasks.train.guard import Guard, Preempted
    from tasks.train.interval import Interval
    from tasks.train.ledger import Ledger
    from tasks.train.preemption import Watcher

    started = time.perf_counter()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(8))))
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = Checkpoints(home, model=model, optimizer=optimizer, identity={})
    restored = checkpoints.restore()
    done = restored.step if restored else 0
    checkpoints.prepare({})
    ledger = Ledger(checkpoints.home, checkpoints.attempt, WORLD, writes=rank == 0, started=started)
    with Watcher([]) as watcher, Path(counter).open("ab", buffering=0) as executed:
        guard = Guard(checkpoints, Interval(**interval), watcher, ledger)
        guard.begin(done)
        try:
            while done < steps:
                with guard.step():
                    begun = time.perf_counter()
                    model(torch.randn(16, 512)).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    time.sleep(max(0.0, STEP_S - (time.perf_counter() - begun)))
                done += 1
                if rank == 0:
                    executed.write(b".")
                guard.after_step(done, lambda: ({}, None))
            checkpoints.finish()
            guard.close()
        except Preempted:
            os._exit(1)


def attempt(home: str, steps: int, mode: str, counter: Path, fault_at: float | None) -> tuple[bool, float, float]:
    """Run the ranks to the end or, ``fault_at`` seconds after the first step, to the fault.

    Whether they finished, and the seconds until the first step was done and until all processes had ended.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = [(rank, port, home, steps, MODES[mode], str(counter)) for rank in range(WORLD)]
    ranks = [FORK.Process(target=rank_main, args=a) for a in arguments]
    before = counter.stat().st_size if counter.exists() else 0
    started = time.perf_counter()
    for process in ranks:
        process.start()
    while not counter.exists() or counter.stat().st_size == before:
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


def run(mode: str, steps: int, seed: int) -> dict[str, float]:
    """One run to its end: what of it was useful."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as scratch:
        home, counter = f"{scratch}/home", Path(scratch) / "executed"
        # Exponential gaps; capped so that all faults fall into the run.
        mean = steps / (FAULTS + 1) * STEP_S
        gaps = [min(draw.expovariate(1 / mean), 1.2 * mean) for _ in range(FAULTS)]
        attempts = [attempt(home, steps, mode, counter, gap) for gap in [*gaps, None]]
        assert [finished for finished, _, _ in attempts] == [False] * FAULTS + [True]
        ledger = account(read_pages(storage_for(home)))
        executed = counter.stat().st_size
    useful_s = steps * ledger.seconds["steps"] / ledger.executed
    wall, start = sum(wall for _, _, wall in attempts), sum(start for _, start, _ in attempts)
    return {
        "executed": executed,
        "useful_steps": steps / executed,
        "stall": ledger.seconds["stall"] / ledger.seconds["steps"],
        "goodput": useful_s / wall,
        "apart": useful_s / (wall - start),
        "start_s": start / len(attempts),
    }


@click.command()
@click.option("--steps", default=1600)
@click.option("--seed", default=0)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(steps: int, seed: int, json_file: Path | None) -> None:
    """Print what of each run was useful."""
    print(f"{WORLD} ranks, {steps} steps of at least {STEP_S * 1e3:.0f} ms, {FAULTS} faults, seed {seed}")
    titles = ("executed", "useful steps", "stall/steps", "goodput", "start-up apart", "start-up s")
    print(f"{'':<10}" + "".join(f"{title:>15}" for title in titles))
    rows = {}
    for mode in MODES:
        row = rows[mode] = run(mode, steps, seed)
        print(
            f"{mode:<10}{row['executed']:>15}{row['useful_steps']:>15.1%}{row['stall']:>15.2%}{row['goodput']:>15.1%}"
            f"{row['apart']:>15.1%}{row['start_s']:>15.2f}",
            flush=True,
        )
    if json_file:
        json_file.write_text(json.dumps({"steps": steps, "seed": seed, "modes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
