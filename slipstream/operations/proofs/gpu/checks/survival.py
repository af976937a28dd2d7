"""Killed trainings, and a training that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from slipstream.operations.proofs.gpu.attempts import (
    InjectedFault,
    TrainingJob,
    end_of_log,
    result_digests,
    run_attempt,
)
from slipstream.operations.proofs.gpu.check import CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.trainings import write_table
from slipstream.shared.artifacts.prepared.data import Signature

FAULTS = (InjectedFault("step", at=5), InjectedFault("mid-write"), InjectedFault("step", "SIGTERM", at=7))
#: Number of the training pass that fails.
FAILING = 6


def job_of(context: CheckContext, name: str) -> TrainingJob:
    """Return a training on all devices."""
    return TrainingJob(
        context.directory / "table", context.directory / name, context.devices, str(context.directory / name / "home")
    )


def resume(context: CheckContext) -> Iterator[CheckFigure]:
    """Compare weights, history, and the checkpoint's optimiser state and random generators with an undisturbed run."""
    write_table(context.directory / "table", "classification")
    # The first process group of NCCL takes a while.
    whole, killed = (replace(job_of(context, name), patience_s=60) for name in ("whole", "killed"))
    assert run_attempt(whole).finished, end_of_log(whole)
    for fault in FAULTS[:1] if context.small else FAULTS:
        ended = run_attempt(killed, fault)
        assert ended.fired and not ended.finished, f"{fault} did not end it"
        yield CheckFigure("killed", fault.where)
    started = time.perf_counter()
    assert run_attempt(killed).finished, end_of_log(killed)
    took = time.perf_counter() - started
    ours, theirs = result_digests(killed), result_digests(whole)
    different = [name for name in theirs if ours.get(name) != theirs[name]]
    different += sorted(ours.keys() - theirs.keys())
    yield CheckFigure("files that differ", float(len(different)), ", ".join(different))
    yield CheckFigure("files equal bit for bit", float(len(theirs) - len(different)))
    yield CheckFigure("the last attempt", took, "s")


class OutOfMemoryModel(nn.Module):
    """Model that runs out of memory in one of its passes and records the time; on a CPU it raises the GPU's error."""

    def __init__(self, signature: Signature) -> None:
        super().__init__()
        self.layer, self.passes = nn.Linear(signature.inputs[0].shape[0], signature.outputs), 0

    def forward(self, numeric: Tensor, *_: Tensor) -> Tensor:
        self.passes += int(self.training and bool(numeric.any()))
        if self.passes == FAILING and os.environ.get("RANK") == "0":
            with open(os.environ["NOTED"], "w", encoding="utf-8") as file:  # noqa: PTH123  # nothing slow
                file.write(str(time.time()))
            if not numeric.is_cuda:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1024.00 TiB")
            torch.empty(1 << 50, dtype=torch.uint8, device=numeric.device)
        return self.layer(numeric)


def runs_out(signature: Signature) -> nn.Module:
    return OutOfMemoryModel(signature)


def error(context: CheckContext) -> Sequence[CheckFigure]:
    """Fail on rank 0 alone, under torchrun, while the others are in a collective."""
    write_table(context.directory / "table", "classification")
    config, noted = context.directory / "config.json", context.directory / "noted"
    settings = {"model": {"name": f"{__name__}:runs_out"}, "training": {"epochs": 5, "batch_size": 75}}
    config.write_text(json.dumps(settings), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={context.devices}", "--monitor-interval=0.1", "-m", "slipstream", "train"]
    command += [str(context.directory / "table"), str(context.directory / "model"), str(config)]
    environment = {**os.environ, "NOTED": str(noted), "OMP_NUM_THREADS": "1"}
    said, at = "", 0.0
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as agent:
        assert agent.stdout
        for line in agent.stdout:
            print(line, end="")
            if "out of memory" in line and not said:
                said, at = line.strip(), time.time()
    ended = time.time()
    assert agent.returncode, "the job ended well"
    assert said, "no rank reported too little memory"
    began = float(noted.read_text(encoding="utf-8"))
    return [
        CheckFigure("until it was said", at - began, "s"),
        CheckFigure("until the job ended", ended - began, "s"),
        CheckFigure("line", said[:160]),
    ]
