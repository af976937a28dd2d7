"""A sweep of two pods on a rehearsed cluster: the packaged workflow, lost pods, and the result."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from slipstream.config import RunConfig
from slipstream.operations.proofs.rehearsal.kills import BY_THE_CLOCK, LOSSES, WRITES, How, Kill, Kills
from slipstream.operations.proofs.rehearsal.propeller import Execution
from slipstream.operations.proofs.rehearsal.rehearsal import (
    CONFIG,
    TARGET,
    Rehearsal,
    literal,
    rehearsal,
    shrunk,
    write_table,
)
from slipstream.pipeline.sweep.config import SweepConfig
from slipstream.pipeline.sweep.records import TrialHistory
from slipstream.pipeline.sweep.space import searched_parameters
from slipstream.pipeline.sweep.store import SweepStore, best_trial
from slipstream.shared.profiles.profile import parse_profile
from slipstream.shared.storage import download_all
from tests.support.sweep_runs import alone

WORKFLOW = "workflows.sweep.sweep"
PROFILE = shrunk(parse_profile("sweeping", {"default": {"retries": 5, "interruptible": True}}))
#: Of the processes in its pods.
THREADS = PROFILE.placement("sweep").threads
SPACE = {
    "training.learning_rate": {"low": 1e-3, "high": 1e-1, "log": True},
    "model.arguments.hidden": {"choices": [[8], [16, 16]]},
}
TRIALS = 6


@dataclass
class OfWorkers(Kills):
    """Kills of sweep workers at given writes.

    The workers write to one store, which cannot tell their writes apart, so any running worker is lost.
    """

    nodes: Sequence[str] = ()
    store: str = ""
    losses: Mapping[int, How] = field(default_factory=dict)
    seen: int = 0

    def asked(self, method: str, path: str) -> None:
        if method not in WRITES or self.store not in path or any(part in path for part in BY_THE_CLOCK):
            return
        with self.lock:
            self.seen += 1
            how = self.losses.get(self.seen)
            running = [(n, a, pods) for n, a, pods in self.running.values() if n in self.nodes and pods[0].running]
            if how and running:
                node, attempt, pods = running[self.seen % len(running)]
                self.strike(Kill(node, attempt, self.seen, how), pods)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    with rehearsal(tmp_path_factory.mktemp("place"), PROFILE) as made:
        yield made


def run(here: Rehearsal, name: str, kills: Kills | None = None) -> tuple[Execution, RunConfig, list[TrialHistory]]:
    """An execution with a store of its own: what was tried in it."""
    store = here.bucket.uri(f"sweeps/{name}")
    sweep = SweepConfig(space=SPACE, trials=TRIALS, workers=2, store=store)
    config = replace(CONFIG, sweep=sweep, training=replace(CONFIG.training, epochs=9))
    execution = here.execution(name, kills=kills)
    inputs = {"data": literal(write_table(here.bucket)), "target": literal(TARGET), "config": literal(config)}
    execution.run(WORKFLOW, inputs)
    return execution, config, SweepStore(store, searched_parameters(config)).trials()


def as_alone(prepared: Path, config: RunConfig, trials: list[TrialHistory], place: Path) -> None:
    """Each complete trial has the weights of its training alone."""
    complete = [trial for trial in trials if trial.ended and trial.ended.state == "complete"]
    assert complete
    for trial in complete:
        assert trial.ended
        weights = alone(prepared, config, trial, place / str(trial.number), threads=THREADS)
        assert trial.ended.weights == weights, f"trial {trial.number}"


@pytest.mark.prove
def test_pods_of_a_sweep_that_are_lost_lose_no_trial(here: Rehearsal, tmp_path: Path) -> None:
    first, config, trials = run(here, "undisturbed")
    assert len(trials) == TRIALS and all(trial.ended for trial in trials)
    (node,) = {attempt.node for attempt in first.record.attempts if attempt.task == "prepare"}
    prepared = download_all(first.outputs[node]["artifact"].scalar.blob.uri, tmp_path / "prepared")
    as_alone(prepared, config, trials, tmp_path / "undisturbed")
    workers = sorted({attempt.node for attempt in first.record.attempts if attempt.task == "search"})
    assert len(workers) == 2
    losses = dict(zip((9, 18, 26, 34, 41, 48), (*LOSSES, *LOSSES), strict=True))
    kills = OfWorkers(nodes=workers, store="/sweeps/disturbed/", losses=losses)
    execution, config, trials = run(here, "disturbed", kills)
    assert len(kills.fired) >= 4, kills
    assert {attempt.number for attempt in execution.record.attempts if attempt.task == "search"} >= {0, 1}
    assert [trial.number for trial in trials] == list(range(TRIALS)) and all(trial.ended for trial in trials)
    assert best_trial(trials)
    as_alone(prepared, config, trials, tmp_path / "disturbed")
