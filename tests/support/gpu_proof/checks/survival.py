"""Killed trainings, and failing ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream.artifacts.prepared.data import Signature
from tests.support import REPOSITORY
from tests.support.gpu_proof.check import Figure, Place
from tests.support.toys import table
from tests.support.training_runs import Fault, Job, attempt, outcome

FAULTS = (Fault("step", at=5), Fault("mid-write"), Fault("step", "SIGTERM", at=7))
#: The step that fails, counted in passes.
FAILING = 6
PROMPT_S = 5.0


def job_of(place: Place, name: str) -> Job:
    """On every device."""
    return Job(place.directory / "table", place.directory / name, place.devices, str(place.directory / name / "home"))


def resume(place: Place) -> Sequence[Figure]:
    """Compared are the weights, the history, and the optimiser's state and random generators in the checkpoint."""
    table(place.directory / "table", "classification")
    # The first process group of NCCL takes a while.
    whole, killed = (replace(job_of(place, name), patience_s=60) for name in ("whole", "killed"))
    assert attempt(whole).finished, (whole.place / "log-0").read_text()[-500:]
    for fault in FAULTS[:1] if place.small else FAULTS:
        ended = attempt(killed, fault)
        assert ended.fired and not ended.finished, f"{fault} did not end it"
    started = time.perf_counter()
    assert attempt(killed).finished, (killed.place / "log-0").read_text()[-500:]
    took = time.perf_counter() - started
    ours, theirs = outcome(killed), outcome(whole)
    different = [name for name in theirs if ours.get(name) != theirs[name]]
    assert ours.keys() == theirs.keys() and not different, f"differ: {', '.join(different)}"
    return [Figure("files equal bit for bit", float(len(theirs))), Figure("the last attempt", took, "s")]


class RunsOut(nn.Module):
    """Wants more memory than there is in one of its passes, and notes when; on a CPU it says what a GPU would."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(signature.inputs[0].shape[0], signature.outputs), 0

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        self.passes += int(self.training and bool(numeric.any()))
        if self.passes == FAILING and os.environ.get("RANK") == "0":
            with open(os.environ["NOTED"], "w") as file:  # noqa: PTH123  # nothing that may be slow before it
                file.write(str(time.time()))
            if not numeric.is_cuda:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 TiB")
            torch.empty(1 << 50, dtype=torch.uint8, device=numeric.device)
        return self.layer(numeric)


def runs_out(signature: Signature) -> nn.Module:
    return RunsOut(signature)


def error(place: Place) -> Sequence[Figure]:
    """Under torchrun, on rank 0 alone: the others are in a collective, and NCCL's shutdown would wait for them."""
    table(place.directory / "table", "classification")
    config, noted = place.directory / "config.json", place.directory / "noted"
    settings = {"model": {"name": f"{__name__}:runs_out"}, "training": {"epochs": 5, "batch_size": 75}}
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={place.devices}", "--monitor-interval=0.1", "-m", "slipstream", "train"]
    command += [str(place.directory / "table"), str(place.directory / "model"), str(config)]
    environment = {**os.environ, "NOTED": str(noted), "OMP_NUM_THREADS": "1"}
    said, at = "", 0.0
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as agent:
        assert agent.stdout
        for line in agent.stdout:
            print(line, end="")
            if "out of memory" in line and not said:
                said, at = line.strip(), time.time()
    ended = time.time()
    assert agent.returncode, "the job ended well"
    assert said, "no rank reported too little memory"
    began = float(noted.read_text())
    assert at - began < PROMPT_S, f"said only {at - began:.1f} s later"
    return [
        Figure("until it was said", at - began, "s"),
        Figure("until the job ended", ended - began, "s"),
        Figure("line", said[:160]),
    ]
