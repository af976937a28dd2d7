"""Watched trainings: no behaviour of the driver changes weights or delays the end, Prometheus has the dashboard's
metrics, and kills lose few samples and no cent."""

import json
import multiprocessing.process
import os
import shutil
import signal
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from slipstream.operations.proofs.processes import FORK, free_port
from slipstream.pipeline.report.costs import stage_costs
from slipstream.pipeline.train.checkpoint.home import CHECKPOINTS, complete_checkpoints
from slipstream.pipeline.train.config import TrainingConfig
from slipstream.pipeline.train.loop.step import StepResult
from slipstream.pipeline.train.telemetry import pods
from slipstream.shared.artifacts.records import from_json
from slipstream.shared.artifacts.results.devices import DEVICES, TrainingDevices
from slipstream.shared.artifacts.results.ledger import read_attempts
from slipstream.shared.profiles.profile import load_profile
from slipstream.shared.stages import StageRun
from slipstream.shared.storage import storage_for
from slipstream.shared.telemetry.metrics import MetricLabels
from slipstream.shared.telemetry.node import NodeFacts, write_facts
from slipstream.shared.telemetry.ring import read_samples
from slipstream.shared.telemetry.totals import read_totals
from slipstream.shared.telemetry.watch import telemetry_sampled
from tests.support.fake_nvml import FakeNvml
from tests.support.monitoring import panels
from tests.support.sampler_process import until
from tests.support.training import rank_body, table_of_numbers, trained

LABELS = MetricLabels("f1a2", "train", 1, "node-7")
#: 120 steps.
SETTINGS = TrainingConfig(epochs=4, batch_size=30, patience=0, checkpoint_every=25)
#: Of the ranks, which compute on the processors.
ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}


def slow_rank(rank: int, world: int, port: int, settings: dict[str, Any], environment: dict[str, str]) -> None:
    """Takes so long for each step as ``STEP_S`` says."""
    from slipstream.pipeline.train.loop import train_loop

    step, seconds = train_loop.train_step, float(environment["STEP_S"])

    def slowly(*arguments: Any) -> StepResult:
        time.sleep(seconds)
        return step(*arguments)

    train_loop.train_step = slowly  # type: ignore[assignment]
    rank_body(rank, world, port, settings, environment)


@contextmanager
def watched(directory: Path, nvml: FakeNvml, metrics: str = "") -> Iterator[None]:
    """A sampler that finds the fake driver: it alone does."""
    with ExitStack() as kept:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in (nvml.environment() | {"SLIPSTREAM_METRICS": metrics}).items():
                patch.setenv(name, value)
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            kept.enter_context(telemetry_sampled(directory, LABELS, {"paid": 2.0, "on_demand": 3.0}))
        yield


def ups(directory: Path) -> list[bool]:
    samples = read_samples(directory)
    return [device.up for device in samples[-1].devices] if samples else []


def devices_in(model: Path) -> TrainingDevices:
    return from_json((model / DEVICES).read_bytes(), TrainingDevices, DEVICES)


# NVML


@pytest.fixture
def nvml(tmp_path: Path) -> FakeNvml:
    """Fake NVML with two fully equipped devices, until a test changes them."""
    return FakeNvml(tmp_path / "nvml")


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return table_of_numbers(tmp_path_factory.mktemp("table") / "data", 900)


@pytest.fixture(scope="module")
def weights(table: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Of the same training without telemetry."""
    place = tmp_path_factory.mktemp("unwatched") / "run"
    return (trained(table, place, 2, SETTINGS, environment=ON_CPU) / "last.safetensors").read_bytes()


@pytest.mark.prove
@pytest.mark.parametrize(
    ("behaviour", "up"),
    [((), [True, True]), (("lost 1",), [True, False]), (("hang nvmlDeviceGetPowerUsage",), [False, False])],
    ids=["as it should", "a lost device", "a call that never returns"],
)
def test_whatever_the_driver_does_the_weights_are_the_same_and_the_agent_ends(
    behaviour: tuple[str, ...], up: list[bool], nvml: FakeNvml, table: Path, weights: bytes, tmp_path: Path
) -> None:
    sampled = tmp_path / "telemetry"
    with watched(sampled, nvml):
        until(lambda: ups(sampled) == [True, True] and len(read_samples(sampled)) > 2)
        environment = ON_CPU | {"STEP_S": "0.05"}
        fault = threading.Thread(target=play_amid_training, args=(nvml, behaviour, sampled), daemon=True)
        fault.start()
        model = trained(table, tmp_path / "run", 2, SETTINGS, environment=environment, body=slow_rank, sampled=sampled)
        ended = time.monotonic()
        last = ups(sampled)
    assert time.monotonic() - ended < 2
    assert last == up and not fault.is_alive()
    assert (model / "last.safetensors").read_bytes() == weights
    (pod,) = devices_in(model).pods
    assert [(device.name, device.kind) for device in pod.devices] == [("GPU 0", "gpu"), ("GPU 1", "gpu")]
    first = [next(share for share in device.busy if share is not None) for device in pod.devices]
    assert first == pytest.approx([0.6, 0.61])
    assert [device.busy[-1] is not None for device in pod.devices] == up


def play_amid_training(nvml: FakeNvml, behaviour: tuple[str, ...], sampled: Path) -> None:
    until(lambda: any(rank.steps >= 30 for rank in read_totals(sampled)), 60)
    nvml.play(*behaviour)


# Prometheus


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="there is no prometheus: apt-get install prometheus")
def test_a_prometheus_server_has_data_for_every_panel(nvml: FakeNvml, table: Path, tmp_path: Path) -> None:
    served, own = free_port(), free_port()
    config = {
        "global": {"scrape_interval": "500ms"},
        "scrape_configs": [{"job_name": "pods", "static_configs": [{"targets": [f"127.0.0.1:{served}"]}]}],
    }
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    address = f"--web.listen-address=127.0.0.1:{own}"
    files = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
    sampled = tmp_path / "telemetry"
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(["prometheus", address, *files], stderr=log) as server,
        watched(sampled, nvml, f"127.0.0.1:{served}"),
    ):
        try:
            # Longer than the ledger's period, as it has the verdict so far.
            environment = ON_CPU | {"STEP_S": "0.06"}
            trained(table, tmp_path / "run", 2, SETTINGS, environment=environment, body=slow_rank, sampled=sampled)
            shown = urllib.request.urlopen(f"http://127.0.0.1:{served}/metrics", timeout=5).read()
            until(lambda: asked(own, 'sum(slipstream_steps_total{execution="f1a2"})') == ["238"])
            assert not [question for question in questions() if not asked(own, question)]
        finally:
            server.kill()
    check = subprocess.run(["promtool", "check", "metrics"], input=shown, capture_output=True)
    assert (check.returncode, check.stdout, check.stderr) == (0, b"", b"")


def questions() -> Iterator[str]:
    """The expressions of the dashboard, of this execution."""
    for panel in panels():
        for target in panel["targets"]:
            query = target["expr"].replace("$execution", "f1a2").replace("$task", "train")
            yield query.replace("$__rate_interval", "1m")


def asked(port: int, query: str) -> list[str]:
    """The values that a Prometheus server answers a query with."""
    url = f"http://127.0.0.1:{port}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=5) as answer:
        return [series["value"][1] for series in json.load(answer)["data"]["result"]]


# Kills


def pod_of(node: str, place: Path, settings: dict[str, Any], step_s: float) -> None:
    """A pod whose agent is its only rank, too: both are killed at once."""
    pods.PERIOD_S = 1.0
    sampled = place / f"samples-{node}"
    sampled.mkdir(parents=True)
    write_facts(sampled, NodeFacts(time.time(), node, "", "", spot=True, spot_is_certain=True))
    environment = ON_CPU | {"STEP_S": str(step_s)}
    with telemetry_sampled(sampled, LABELS):
        slow_rank(0, 1, free_port(), settings | {"sampled": sampled}, environment)


def begin(node: str, place: Path, table: Path, step_s: float) -> multiprocessing.process.BaseProcess:
    from tests.support.training import SMALL

    settings = {"prepared": table, "model": SMALL, "training": SETTINGS, "directory": place / "model"}
    settings |= {"home": str(place / "checkpoints"), "made_by": {}}
    process = FORK.Process(target=pod_of, args=(node, place, settings, step_s))
    process.start()
    return process


@pytest.mark.prove
def test_a_kill_costs_little_of_what_was_sampled_and_no_cent(table: Path, tmp_path: Path) -> None:
    storage = storage_for(str(tmp_path / "checkpoints"))
    first = begin("node-1", tmp_path, table, 0.15)
    until(lambda: complete_checkpoints(storage.list(CHECKPOINTS)) and storage.list("devices/"), 60)
    # Steps are known, every 5 s, that no checkpoint has, nor will before the kill.
    until(lambda: 3 < read_attempts(storage)[0].last_step % 25 < 20, 60)
    os.kill(first.pid or 0, signal.SIGKILL)
    killed = time.time()
    first.join()
    shutil.rmtree(tmp_path / "samples-node-1")  # gone with its machine
    second = begin("node-2", tmp_path, table, 0.03)
    second.join(60)
    assert second.exitcode == 0

    found = devices_in(tmp_path / "model")
    assert [(pod.attempt, pod.node) for pod in found.pods] == [(1, "node-1"), (2, "node-2")]
    # By its period, shortened from 30 s; a sample is a second old, and this machine may be busy.
    assert pods.PERIOD_S <= 30 and killed - found.pods[0].at[-1] < 1 + 1 + 5

    one, two = found.attempts
    assert (one.ended == "finished", two.ended) == (False, "finished")
    assert one.lost > 0 and one.spot and two.spot
    # A dollar a second, so that cents are hundredths of seconds.
    profile = load_profile("local")
    placement = replace(profile.placement("train"), price_per_hour=7200.0, spot_price_per_hour=3600.0)
    priced = replace(profile, stages={**profile.stages, "train": placement})
    train, total = stage_costs([StageRun("train", two.seconds, reused=False)], found, priced)
    seconds = Fraction(one.seconds) + Fraction(two.seconds)
    assert cents(train.paid) == cents(total.paid) == round(100 * seconds)
    assert cents(train.on_demand) == round(200 * seconds)
    assert abs(cents(train.lost) - 100 * one.lost) <= 1


def cents(dollars: float | None) -> int:
    assert dollars is not None
    return round(100 * dollars)
