"""Telemetry of a device: readings against the driver's own tool, cost per step, and diagnoses of provoked causes."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import psutil
import torch

from slipstream.operations.proofs.gpu.check import CannotRun, CheckContext, CheckFigure
from slipstream.operations.proofs.gpu.checks.loading import SIGNATURE, records
from slipstream.operations.proofs.gpu.trainings import train, write_prepared
from slipstream.operations.proofs.gpu.waits import NoWaits
from slipstream.pipeline.train.batch_buffers import DeviceBuffer, HostBuffer
from slipstream.pipeline.train.data_loader import StoredRows
from slipstream.pipeline.train.fault_tolerance.guard import Guard
from slipstream.pipeline.train.loop import optimizer, train_loop
from slipstream.pipeline.train.telemetry.totals import gpu_uuid
from slipstream.shared.artifacts.prepared.data import TARGET
from slipstream.shared.artifacts.results import devices
from slipstream.shared.artifacts.results.training import read_attempt
from slipstream.shared.models.config import ModelConfig
from slipstream.shared.telemetry import ring
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.records import DeviceReading, Sample
from slipstream.shared.telemetry.series import energy_joules, mean_of_known
from slipstream.shared.telemetry.totals import read_totals
from slipstream.shared.telemetry.watch import telemetry_sampled

#: Maximum relative difference of two readings.
WITHIN = 0.05
LABELS = MetricLabels("gpu-proof", "telemetry", 0, "here")
TOOL = "nvidia-smi"
QUERY = ("utilization.gpu", "memory.used", "power.draw")
#: Seconds of load that are compared, seconds before in which clocks and power settle, and seconds on a CPU.
LOAD_S, SETTLING_S, REHEARSAL_S = 14.0, 3.0, 4.0
MIB = 1 << 20


def telemetry(context: CheckContext) -> Iterator[CheckFigure]:
    yield from causes(context)
    yield from no_waits(context)
    if context.device.type == "cpu":
        yield from beside_proc(context.directory / "samples")
        return
    if shutil.which(TOOL) is None:
        raise CannotRun(f"{TOOL} is not here to compare readings with; steps did not wait, and causes were named")
    yield from beside_tool(context.directory / "samples", gpu_uuid(context.device), lambda s: work(context.device, s))


# Readings of a GPU against those of its driver's tool


def work(device: torch.device, seconds: float) -> None:
    """Compute matmuls for ``seconds``, with a quarter of the free memory allocated."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.empty(free // 4, dtype=torch.uint8, device=device)
    matrix = torch.ones(4096, 4096, dtype=torch.half, device=device)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(100):
            matrix @ matrix
        torch.cuda.synchronize(device)
    del held


@dataclass(frozen=True)
class ToolReading:
    """Reading of the driver's tool; None for a value that it does not know of this device."""

    at: float
    busy: float | None
    memory: float | None
    watts: float | None


def ask_tool(uuid: str) -> ToolReading:
    words = [TOOL, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits", f"--id={uuid}"]
    began = time.time()
    said = subprocess.run(words, capture_output=True, text=True, encoding="utf-8", timeout=20, check=True).stdout
    percent, mebibytes, watts = (number(cell) for cell in said.strip().split(","))
    return ToolReading((began + time.time()) / 2, scaled(percent, 0.01), scaled(mebibytes, MIB), watts)


def number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:  # "[N/A]"
        return None


def scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def beside_tool(
    directory: Path, uuid: str, load: Callable[[float], None], seconds: float = LOAD_S, settling: float = SETTLING_S
) -> Iterator[CheckFigure]:
    """Compare means over the same time, and the energy with the tool's power multiplied by that time."""
    from threading import Thread

    worker, told = Thread(target=load, args=(settling + seconds,), daemon=True), list[ToolReading]()
    with telemetry_sampled(directory, LABELS):
        worker.start()
        time.sleep(settling)
        until = time.monotonic() + seconds - 1
        while time.monotonic() < until:
            told.append(ask_tool(uuid))
            time.sleep(0.5)
    worker.join()
    samples = [each for each in ring.read_samples(directory) if told[0].at - 0.5 <= each.at <= told[-1].at + 0.5]
    ours = [device for sample in samples for device in sample.devices if device.uuid == uuid and device.up]
    if not ours and any(device.uuid.startswith("MIG-") for sample in samples for device in sample.devices):
        raise CannotRun(f"{TOOL} does not say what parts of a GPU do")
    assert len(ours) > seconds / 2, f"{len(ours)} readings of {uuid} in {seconds:g} s"
    yield from compared(ours, samples_of(samples, uuid), told)


def samples_of(samples: list[Sample], uuid: str) -> list[Sample]:
    """Return the samples with this device only."""
    return [
        Sample(each.at, each.host, tuple(device for device in each.devices if device.uuid == uuid)) for each in samples
    ]


def compared(ours: list[DeviceReading], samples: list[Sample], told: list[ToolReading]) -> Iterator[CheckFigure]:
    """Fail if a reading is too far from the tool's, or if only one of both has it."""
    watts, passed = mean_of_known(each.watts for each in told), samples[-1].at - samples[0].at
    pairs: Mapping[str, tuple[float | None, float | None, float, str]] = {
        "utilisation": (mean_of_known(each.busy for each in ours), mean_of_known(each.busy for each in told), 100, "%"),
        "memory": (
            mean_of_known(each.memory_used_bytes for each in ours),
            mean_of_known(each.memory for each in told),
            2**-30,
            "GiB",
        ),
        "power": (mean_of_known(each.power_watts for each in ours), watts, 1, "W"),
        "energy": (energy_joules(samples), scaled(watts, passed), 1, "J"),
    }
    for name, (own, its, factor, unit) in pairs.items():
        if own is None and its is None:
            yield CheckFigure(name, "neither says")
            continue
        assert own is not None, f"{name}: {TOOL} says {its:.4g}, nothing was read"
        if its is None and name == "energy":  # a counter, though the driver has no power to compare it with
            yield CheckFigure(name, "not compared")
            continue
        assert its, f"{name}: {own:.4g} was read, {TOOL} says {its}"
        assert abs(own / its - 1) <= WITHIN, f"{name}: {own * factor:.5g} {unit}, {TOOL} says {its * factor:.5g}"
        yield CheckFigure(name, own * factor, unit)
        yield CheckFigure(f"{name} apart", 100 * abs(own / its - 1), "%")


# Readings of the host against /proc


def beside_proc(directory: Path) -> Iterator[CheckFigure]:
    """Compute: the sampler must count at least this process's CPU time, and at most the machine's."""
    moments = list[tuple[float, float, float]]()
    with telemetry_sampled(directory, LABELS):
        ballast = np.ones(32 * MIB)  # 256 MiB
        until = time.monotonic() + REHEARSAL_S
        while time.monotonic() < until:
            float(ballast[:MIB].sum())
            moments.append((time.time(), time.process_time(), machine_s()))
    samples = [each for each in ring.read_samples(directory) if moments[0][0] <= each.at <= moments[-1][0]]
    assert len(samples) >= 3, f"{len(samples)} samples in {REHEARSAL_S:g} s"
    at, own, machine = np.array(moments).T
    first, last = samples[0], samples[-1]
    counted = last.host.cpu_seconds - first.host.cpu_seconds
    least, most = (float(np.diff(np.interp([first.at, last.at], at, each))[0]) for each in (own, machine))
    # Clocks of processors count in hundredths of a second.
    assert counted >= (1 - WITHIN) * least - 0.05, f"{counted:.3g} s of CPU time, this process alone took {least:.3g}"
    assert counted <= (1 + WITHIN) * most + 0.05, f"{counted:.3g} s of CPU time, all processes took {most:.3g}"
    memory, limit = last.host.memory_used_bytes, last.host.memory_limit_bytes
    anonymous, whole = anonymous_bytes(), psutil.virtual_memory().total
    assert memory is not None and anonymous <= memory <= whole, f"{memory} bytes used, {anonymous} of this process"
    assert limit is not None and memory <= limit <= whole, f"{limit} bytes allowed, of {whole}"
    yield CheckFigure("CPU time", counted, "s")
    yield CheckFigure("of this process", least, "s")
    yield CheckFigure("of the machine", most, "s")
    yield CheckFigure("memory", memory / 2**30, "GiB")


def machine_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait - times.guest - times.guest_nice


def anonymous_bytes() -> int:
    """Return the anonymous memory of this process."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# Trainings


@dataclass(frozen=True)
class ProvokedCause:
    """Provoked bottleneck, and the diagnosis and part of its sentence that it must lead to."""

    verdict: str
    says: str
    batch: int
    layers: tuple[int, ...]
    #: Additional seconds of every buffer of batches while it is gathered, or copied to the device.
    gathering_s: float = 0.0
    copying_s: float = 0.0


CAUSES = {
    "slow loader": ProvokedCause(devices.DATA, "most time on gathering", 256, (32,), gathering_s=0.1),
    "slow copies to the device": ProvokedCause(devices.DATA, "most time on copy", 256, (32,), copying_s=0.1),
    "tiny batches": ProvokedCause(devices.LAUNCH, "do not depend on its rows", 8, (16,) * 60),
}
STEPS, EPOCHS = 10, 2


def causes(context: CheckContext) -> Iterator[CheckFigure]:
    for name, cause in CAUSES.items():
        directory = context.directory / name.replace(" ", "-")
        with ExitStack() as provoked:
            provoked.enter_context(one_thread())
            for patch in provocations(cause):
                provoked.enter_context(patch)
            trained = trained_on(directory, cause.batch, cause.layers)
        found = read_attempt(trained).bottleneck
        assert found is not None
        assert found.verdict == cause.verdict and cause.says in found.sentence, f"{name}: {found.sentence}"
        yield CheckFigure(name, 100 * found.shares[cause.verdict], f"% {found.verdict}")


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: on busy cores, threads that wait for each other would become the bottleneck."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def provocations(cause: ProvokedCause) -> Iterator[AbstractContextManager[object]]:
    gather = StoredRows.gather

    def gather_slowly(self: StoredRows, rows: np.ndarray, out: np.ndarray) -> None:
        time.sleep(cause.gathering_s)
        gather(self, rows, out)

    if cause.gathering_s:
        yield mock.patch.object(StoredRows, "gather", gather_slowly)
    if cause.copying_s:
        for buffer in (HostBuffer, DeviceBuffer):
            yield mock.patch.object(buffer, "send", repeated(buffer.send, cause.copying_s))


def repeated(send: Callable[[Any, int], None], seconds: float) -> Callable[[Any, int], None]:
    """Repeat a copy for ``seconds``, as over a narrow bus; on a CPU, within its memory."""

    def sent(self: HostBuffer, batches: int) -> None:
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            send(self, batches)
            if not isinstance(self, DeviceBuffer):
                self.records.copy()
                time.sleep(0.001)  # a bus would leave the cores to the host

    return sent


def trained_on(directory: Path, batch: int, layers: tuple[int, ...], sampled: Path | None = None) -> Path:
    """Train a classifier of a table for ``STEPS`` steps."""
    made = records(STEPS * batch)
    made[TARGET] = made["numeric"][:, 1] > 0
    prepared = directory / "prepared"
    write_prepared(prepared, SIGNATURE, {"train": made, "validation": made[:8], "test": made[:8]})
    model = ModelConfig("mlp", {"hidden": layers})
    settings = {"epochs": EPOCHS, "batch_size": batch, "evaluate_every": 10**6, "checkpoint_every": 10**6}
    return train(directory / "model", prepared, model, sampled=sampled, **settings)


def no_waits(context: CheckContext) -> Iterator[CheckFigure]:
    """Watch steps with telemetry: with torch's detector on a GPU, with ``NoWaits`` on a CPU."""
    directory = context.directory / "watched"
    sampled = directory / "samples"
    with telemetry_sampled(sampled, LABELS), marks_are_watched(context) as watched:
        trained_on(directory, 64, (32, 32), sampled)
    (totals,) = read_totals(sampled)
    assert totals.steps == EPOCHS * STEPS - 1 and totals.phase_seconds, totals  # without the first
    assert watched["before_step"] == watched["train_step"] == watched["enqueued"] > STEPS, watched
    yield CheckFigure("without a wait", float(watched["train_step"]), "steps")


@contextmanager
def marks_are_watched(context: CheckContext, settling: int = 4) -> Iterator[dict[str, int]]:
    """Raise if the host waits after ``settling`` steps; yield the numbers of watched calls."""
    watched = dict.fromkeys(("before_step", "train_step", "enqueued"), 0)

    def guarded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
        passed = 0

        def watch(*arguments: Any) -> Any:
            nonlocal passed
            passed += 1
            if passed <= settling:
                return call(*arguments)
            watched[name] += 1
            with waits_are_errors(context):
                return call(*arguments)

        return watch

    with ExitStack() as patched:
        for owner, name in ((Guard, "before_step"), (train_loop, "train_step"), (Guard, "enqueued")):
            patched.enter_context(mock.patch.object(owner, name, guarded(getattr(owner, name), name)))
        if context.device.type == "cpu":
            patched.enter_context(mock.patch.object(optimizer, "known_to_host", lambda tensor: False))
        yield watched


@contextmanager
def waits_are_errors(context: CheckContext) -> Iterator[None]:
    if context.device.type == "cpu":
        with NoWaits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
